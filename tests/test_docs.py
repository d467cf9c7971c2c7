"""Every script in README and docs runs as it stands, and every make target they name exists."""

import re
from pathlib import Path

import pytest

from tests.scripts import run_scripts
from tests.torch_ddp_suite import EXPECTED

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPT = re.compile(r"^```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def found() -> dict[str, str]:
    return {
        f"{page.name}-{match['name']}": match["code"] for page in PAGES for match in SCRIPT.finditer(page.read_text())
    }


@pytest.mark.program
@pytest.mark.timeout(110)
def test_every_script_runs_under_torchrun(tmp_path: Path) -> None:
    """All of them in one test: they share the processes that run them."""
    paths = {}
    for name, code in found().items():
        paths[name] = tmp_path / f"{len(paths)}.py"
        paths[name].write_text(code)
    results = run_scripts(list(paths.values()), ranks=2, folder=tmp_path)
    assert len(results) >= 10
    assert {name: results[path].error for name, path in paths.items() if results[path].error is not None} == {}


def test_every_python_block_is_a_script_that_is_run() -> None:
    for page in PAGES:
        text = page.read_text()
        assert text.count("```python\n") == len(SCRIPT.findall(text)), page.name


def test_every_make_target_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(
            r"\bmake ([a-z][a-z-]*)\b", "\n".join(re.findall(r"`[^`]+`|^make .*$", page.read_text(), re.MULTILINE))
        ):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} names make {target}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_test_of_torch_that_fails_is_explained() -> None:
    page = (ROOT / "docs" / "torch-tests.md").read_text()
    assert [name for name, reason in EXPECTED.items() if f"`{name}`" not in page or reason not in page] == []
