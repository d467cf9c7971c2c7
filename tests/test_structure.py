"""The shape of the package: its layers, its surface, and what it needs."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gradsync

PACKAGE = Path(gradsync.__file__).parent

# Bottom to top. A module imports only from modules above it in this list. A package stands after its modules.
LAYERS = (
    "version",
    "errors",
    "communicator.base",
    "communicator.alarm",
    "communicator.background",
    "communicator.process_group",
    "communicator.topology",
    "communicator.subgroups",
    "communicator.peer_link",
    "communicator.peer_exchange",
    "communicator.round_robin",
    "communicator.hierarchical",
    "communicator.host_peers",
    "communicator.shared_heap",
    "communicator.shared_signals",
    "communicator.shared_memory",
    "communicator.mpi_world",
    "communicator.mpi",
    "communicator.in_process",
    "communicator.fitting",
    "communicator.choose",
    "communicator",
    "bucket_layout",
    "chunk",
    "bucket",
    "agreement",
    "cost_model",
    "bucket_tuner",
    "gradient_order",
    "backward_watch",
    "step_guard",
    "observer",
    "gradient_norm",
    "reduction.base",
    "reduction.mean",
    "reduction.cast",
    "reduction.comm_hook",
    "reduction",
    "pipeline",
    "ready_hooks",
    "sparse_reduction",
    "absence",
    "turns",
    "weights",
    "witness",
    "window",
    "precise_accumulation",
    "ownership",
    "synchronizer_options",
    "arrangement",
    "backward_engine",
    "synchronizer",
    "clipping",
    "accumulation",
    "layer_drop",
    "replica_state",
    "replica",
    "mixed_precision",
    "uneven_inputs",
    "data_parallel",
    "attach",
    "averaging",
    "timeline",
    "testing",
    "checkpoint.files",
    "checkpoint.layout",
    "checkpoint.tensor_file",
    "checkpoint.tree",
    "checkpoint.rng",
    "checkpoint.manifest",
    "checkpoint.together",
    "checkpoint.folder",
    "checkpoint",
    "accelerator.gradient_state",
    "accelerator.plugins",
    "accelerator.handlers",
    "accelerator.environment",
    "accelerator.world",
    "accelerator.process_control",
    "accelerator.operations",
    "accelerator.loss_scaler",
    "accelerator.precision",
    "accelerator.sharding",
    "accelerator.dispatching",
    "accelerator.data_loader",
    "accelerator.model_windows",
    "accelerator.optimizer",
    "accelerator.scheduler",
    "accelerator.preparation",
    "accelerator.metrics",
    "accelerator.state_saving",
    "accelerator.accelerator",
    "accelerator",
    "llm",
    "llm.settings",
    "llm.schedule",
    "llm.heartbeat",
    "llm.interruption",
    "llm.phases",
    "llm.replicas",
    "llm.text_sources",
    "llm.model",
    "llm.tokens",
    "llm.batches",
    "llm.run_folder",
    "llm.charts",
    "llm.report",
    "llm.saving",
    "llm.trainer",
    "llm.screen",
    "llm.recording",
    "llm.run",
    "doctor.finding",
    "doctor.machine",
    "doctor.network",
    "doctor.software",
    "doctor.wire_rank",
    "doctor.wire",
    "doctor",
    "lab.errors",
    "lab.rate",
    "lab.iproute",
    "lab.kernel",
    "lab.inventory",
    "lab.ranks",
    "lab.host",
    "lab.program",
    "lab.lab",
    "lab.fork",
    "lab.profile",
    "lab.emulated",
    "lab",
    "bench.statistics",
    "bench.machine",
    "bench.record",
    "bench.measure",
    "bench.fsdp_groups",
    "bench.peers",
    "bench.windows",
    "bench.workload",
    "bench.tuning",
    "bench.real_workload",
    "bench.memory",
    "bench.plots",
    "bench.scenario",
    "bench.scenarios.accumulation",
    "bench.scenarios.overlap",
    "bench.scenarios.skip_sync",
    "bench.scenarios.bucket_size",
    "bench.scenarios.scaling",
    "bench.scenarios.wire_shown",
    "bench.scenarios.wire",
    "bench.scenarios.round_robin",
    "bench.scenarios.convergence",
    "bench.scenarios.peers_shown",
    "bench.scenarios.peers",
    "bench.scenarios",
    "bench.report",
    "bench.screen",
    "bench.runner",
    "bench",
    "cli.launching",
    "cli.doctor",
    "cli.train",
    "cli.bench",
    "cli.lab",
    "cli.main",
    "cli",
    "__main__",
)

PUBLIC = {
    "Accelerator",
    "ConfigurationError",
    "DataLoaderConfiguration",
    "DistributedDataParallel",
    "GradientAccumulationPlugin",
    "GradientSynchronization",
    "GradsyncError",
    "LayerDrop",
    "MismatchError",
    "MisuseError",
    "PeerFailedError",
    "Timeline",
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


def test_every_module_has_its_place() -> None:
    assert sorted(LAYERS) == sorted(name for name in FILES if name)
    assert len(set(LAYERS)) == len(LAYERS)


def test_imports_go_one_way() -> None:
    """The whole package, `gradsync` itself, is above everything and imported by nothing inside."""
    place = {name: number for number, name in enumerate(LAYERS)}
    wrong = [
        f"{name} imports {imported or 'gradsync'}"
        for name in LAYERS
        for imported in imports_of(FILES[name])
        if place.get(imported, len(LAYERS)) >= place[name]
    ]
    assert wrong == []


def test_the_check_sees_imports() -> None:
    """A check that finds nothing anywhere would pass on anything."""
    assert {"bucket", "pipeline", "errors"} <= set(imports_of(FILES["backward_engine"]))
    assert {"attach", "data_parallel", "errors"} <= set(imports_of(FILES[""]))


LIST_IMPORTS = """
import json, sys
import torch, torch._dynamo, torch.distributed.algorithms.join  # with what torch itself needs: numpy, sympy, ...
before = set(sys.modules)
import gradsync
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def test_importing_gradsync_needs_torch_and_nothing_else() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", LIST_IMPORTS], capture_output=True, text=True, check=True, timeout=120
    )
    imported = set(json.loads(answer.stdout))
    assert "gradsync" in imported
    assert imported - sys.stdlib_module_names - {"gradsync", "torch"} == set()


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
