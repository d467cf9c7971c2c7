"""The shape of the package: its layers, its surface, and what it needs."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradsync

PACKAGE = Path(gradsync.__file__).parent

PUBLIC = {
    "Accelerator",
    "ConfigurationError",
    "DataLoaderConfiguration",
    "DistributedDataParallel",
    "Elastic",
    "ReplicaCheck",
    "GradientAccumulationPlugin",
    "GradientSynchronization",
    "GradsyncError",
    "LayerDrop",
    "LocalSteps",
    "MismatchError",
    "MisuseError",
    "OverlappedOptimizer",
    "PeerFailedError",
    "ShardedOptimizer",
    "SyncPolicy",
    "Timeline",
    "BadStepError",
    "CommunicatorLostError",
    "__version__",
    "average_gradients",
    "clip_grad_norm_",
    "clip_grad_value_",
    "synchronize_gradients",
}


def module_name(path: Path) -> str:
    """`communicator/base.py` is `communicator.base`, `communicator/__init__.py` is `communicator`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(path: Path) -> Iterator[str]:
    """The gradsync modules that a file imports anywhere, functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import in line {node.lineno}"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            module = node.module or ""
            # `from gradsync import errors` imports a module, `from gradsync.errors import X` a name.
            names = [name if name.removeprefix("gradsync.") in FILES else module for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (
            name.removeprefix("gradsync").removeprefix(".") for name in names if name.split(".")[0] == "gradsync"
        )


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """What `make check` asks of imports, for the package in `folder`/src."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    environment = os.environ | {"PYTHONPATH": str(folder / "src")}
    return subprocess.run(
        [*command, "--no-logo", "--no-cache"], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def test_imports_point_downward() -> None:
    answer = lint(PACKAGE.parents[1])
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "7 kept, 0 broken" in answer.stdout


UPWARD = "from gradsync.core.engine.pipeline import Pipeline\n"


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("core/bucket/layout.py", UPWARD),
        ("core/bucket/layout.py", "from gradsync.communicator import Communicator\n"),
        ("communicator/base.py", "def later():\n    " + UPWARD),
        ("core/engine/observer.py", UPWARD),
        ("utilities.py", ""),
    ],
    ids=[
        "upward",
        "a bucket that can start a collective",
        "inside a function",
        "cycle in a package",
        "file without a place",
    ],
)
def test_the_check_sees_what_is_wrong(tmp_path: Path, where: str, what: str) -> None:
    """A check that finds nothing anywhere would pass on anything."""
    shutil.copytree(PACKAGE, tmp_path / "src" / "gradsync", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parents[1] / "pyproject.toml", tmp_path)
    with (tmp_path / "src" / "gradsync" / where).open("a") as file:
        file.write(what)
    answer = lint(tmp_path)
    assert answer.returncode == 1, answer.stdout + answer.stderr


def test_nothing_inside_imports_the_whole() -> None:
    """`gradsync` itself is above everything: inside, names come from where they are made."""
    assert [name for name, path in FILES.items() if name and "" in imports_of(path)] == []
    assert {"errors", "parallel.attach", "parallel.data_parallel"} <= set(imports_of(FILES[""]))


def test_the_public_names() -> None:
    assert set(gradsync.__all__) == PUBLIC
    assert gradsync.__all__ == sorted(gradsync.__all__)
    assert all(getattr(gradsync, name) is not None for name in gradsync.__all__)


def test_every_module_says_what_it_exports_and_what_it_is() -> None:
    for name, path in FILES.items():
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{name} has no docstring"
        targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
        assert "__all__" in [target.id for target in targets if isinstance(target, ast.Name)], f"{name} has no __all__"


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_errors_are_one_tree() -> None:
    errors = [getattr(gradsync.errors, name) for name in gradsync.errors.__all__]
    assert all(issubclass(error, gradsync.GradsyncError) for error in errors)
    # Code that catches what torch's DistributedDataParallel raises goes on working.
    assert issubclass(gradsync.GradsyncError, RuntimeError)
    assert issubclass(gradsync.ConfigurationError, ValueError)


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_files_stay_readable() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: length for name, length in lengths.items() if length >= 500} == {}
