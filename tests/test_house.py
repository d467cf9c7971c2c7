"""The files of the house: what the workflow and the hooks call exists, and the Makefile tells of its targets."""

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
PINS = "\n".join(path.read_text() for path in (ROOT / "requirements").glob("*.txt"))
# Programs whose package has another name.
PACKAGES = {"lint-imports": "import-linter"}


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def recipe(target: str) -> list[str]:
    """The lines that make runs for ``target``."""
    found = re.search(rf"^{re.escape(target)}:[^\n]*\n((?:\t[^\n]*\n)*)", MAKEFILE, re.MULTILINE)
    assert found is not None, f"the Makefile has no {target}"
    return found[1].splitlines()


def test_the_workflow_calls_targets_that_exist() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    called = [target for command in commands for line in re.findall(r"\bmake (.+)", command) for target in line.split()]
    assert {"check", "test", "dist"} <= set(called)
    assert all(recipe(target) for target in called)


def test_the_workflow_tests_what_is_promised() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"]
    matrix = jobs["others"]["strategy"]["matrix"]
    project = (ROOT / "pyproject.toml").read_text()
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)", project)
    assert f'"torch>={matrix["torch"][0].removesuffix(".*")}"' in project
    pinned = re.search(r"^torch==(\d+\.\d+)", PINS, re.MULTILINE)
    assert pinned is not None
    # The pinned pair has a job of its own, which runs the checks as well.
    (left_out,) = matrix["exclude"]
    assert left_out == {"python": jobs["pinned"]["steps"][1]["with"]["python-version"], "torch": f"{pinned[1]}.*"}
    assert left_out["torch"] == matrix["torch"][-1]


def test_hooks_are_the_checks_with_the_pinned_tools() -> None:
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    checks = [line.strip().removeprefix("$(BIN)/") for line in recipe("check")]
    for hook, check in zip(repository["hooks"], checks, strict=True):
        program, *options = check.removesuffix(" .").split()
        called, *given = hook["entry"].split()
        assert called == f".venv/bin/{program}"
        assert set(options) <= set(given), hook["id"]
        assert re.search(rf"^{PACKAGES.get(program, program)}==", PINS, re.MULTILINE), f"{program} is not pinned"


def test_help_tells_of_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    told = re.findall(r"^\t@echo 'make ([a-z-]+) ", MAKEFILE, re.MULTILINE)
    assert sorted(told) == sorted(set(phony[1].split()) - {"help"})
