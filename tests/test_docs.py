"""Every script in README and docs runs as it stands, and every make target they name exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPT = re.compile(r"^```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def scripts() -> list[object]:
    return [
        pytest.param(match["code"], id=f"{page.name}-{match['name']}")
        for page in PAGES
        for match in SCRIPT.finditer(page.read_text())
    ]


@pytest.mark.parametrize("code", scripts())
def test_script_runs_under_torchrun(code: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr


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
