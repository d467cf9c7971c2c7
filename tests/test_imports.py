"""What is imported when, in an interpreter that has imported nothing else.

Importing torch takes longer than everything else here, so one interpreter goes through all of it and tells after each
stage which modules there are.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.test_report import make_run

# One worker runs them all.
pytestmark = [pytest.mark.program, pytest.mark.timeout(120), pytest.mark.xdist_group("imports")]

STAGES = """
import json, sys
import torch, torch._dynamo, torch.distributed.algorithms.join  # with what torch itself needs: numpy, sympy, ...

def tell():
    print(json.dumps(sorted(sys.modules)))

tell()
import gradsync
tell()
import gradsync.tools.llm.model, gradsync.tools.llm.tokens
tell()
import gradsync.tools.llm.report
tell()
gradsync.tools.llm.report.write_report(sys.argv[1])
tell()
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """All that are there after each stage."""
    run = make_run(tmp_path_factory.mktemp("imports") / "run", steps=3)
    command = [sys.executable, "-c", STAGES, str(run)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[1])
    assert answer.returncode == 0, answer.stderr
    stages = ("torch", "gradsync", "models and data", "reports", "a page was written")
    return dict(zip(stages, map(set, map(json.loads, answer.stdout.splitlines())), strict=True))


def packages(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_importing_gradsync_needs_torch_and_nothing_else(modules: dict[str, set[str]]) -> None:
    imported = packages(modules["gradsync"] - modules["torch"])
    assert "gradsync" in imported
    assert imported - sys.stdlib_module_names - {"gradsync", "torch"} == set()


def test_importing_the_modules_imports_no_extra(modules: dict[str, set[str]]) -> None:
    assert "gradsync.tools.llm.model" in modules["models and data"]
    assert not {"transformers", "datasets", "safetensors"} & packages(modules["models and data"])


def test_packages_are_imported_when_something_is_drawn(modules: dict[str, set[str]]) -> None:
    """A training that never draws does not pay for it, and one that does keeps its own figures and settings."""
    assert not {"matplotlib", "jinja2"} & packages(modules["reports"])
    assert "matplotlib.figure" in modules["a page was written"]
    assert "matplotlib.pyplot" not in modules["a page was written"]
