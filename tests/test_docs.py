"""Every script in README and docs runs as it stands, and every make target they name exists."""

import re
from pathlib import Path

import pytest

from tests.scripts import Ran, run_scripts

# One worker runs them all: they share a fixture that takes long.
pytestmark = pytest.mark.xdist_group("docs")

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPT = re.compile(r"^```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def found() -> dict[str, str]:
    return {
        f"{page.name}-{match['name']}": match["code"] for page in PAGES for match in SCRIPT.finditer(page.read_text())
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """All of them, on two ranks."""
    folder = tmp_path_factory.mktemp("scripts")
    paths = {}
    for name, code in found().items():
        paths[name] = folder / f"{len(paths)}.py"
        paths[name].write_text(code)
    results = run_scripts(list(paths.values()), ranks=2, folder=folder)
    return {name: results[path] for name, path in paths.items()}


@pytest.mark.timeout(110)
@pytest.mark.parametrize("name", found())
def test_script_runs_under_torchrun(name: str, ran: dict[str, Ran]) -> None:
    assert ran[name].error is None, ran[name].error


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
