"""Accelerate's own test scripts, on two ranks over Gloo, with our classes in the place of theirs.

    python -m tests.accelerate_suite [-k WORD] [-v]

Every function of a script that tests something is reported by itself: it passes if it passes on both ranks. The outcome
is compared with what is expected (docs/accelerate-tests.md has the reasons); a difference, in either direction, is
exit code 1. A rank runs ``python -m tests.accelerate_suite --child SCRIPT FOLDER``.
"""

import argparse
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = "accelerate.test_utils.scripts"
TIMEOUT = 300.0

SCRIPTS = (
    "test_ops",
    "test_distributed_data_loop",
    "test_ddp_comm_hook",
    "test_sync",
    "test_script",
    "external_deps.test_metrics",
)

# Functions that fail here, and why. The page has the same names.
EXPECTED = {
    "test_distributed_data_loop": {
        "test_stateful_dataloader_save_state": "every rank saves into a temporary folder of its own; here a checkpoint "
        "is one folder that all ranks see",
    },
    "test_script": {
        "check_seedable_sampler_in_batch_sampler_shard": "asks for a class of Accelerate's inside a prepared loader",
        "test_reinstantiated_state": "there is no state of the process that could be reset under an Accelerator",
    },
}

# Scripts, and functions of the scripts above, that are not run here, and why.
NOT_RUN = {
    "test_cli": "prints versions, tests nothing",
    "test_merge_weights": "FSDP",
    "test_notebook": "Accelerate's launcher for notebooks",
    "external_deps.test_checkpointing": "downloads a model and a dataset",
    "external_deps.test_ds_alst_ulysses_sp": "DeepSpeed",
    "external_deps.test_ds_multiple_model": "DeepSpeed",
    "external_deps.test_peak_memory_usage": "downloads a model, measures a GPU",
    "external_deps.test_performance": "downloads a model and a dataset",
    "external_deps.test_pippy": "pipeline parallelism",
    "external_deps.test_zero3_integration": "DeepSpeed",
}

Results = dict[str, str | None]


# -- a rank ---------------------------------------------------------------------------------------------------------


def run_script(name: str, folder: Path) -> None:
    """Run a script's ``main`` with our classes, noting what becomes of each function that tests something."""
    sys.modules.setdefault("evaluate", types.ModuleType("evaluate"))  # imported, and used on GPUs only
    script = importlib.import_module(f"{PACKAGE}.{name}")
    replace_classes(script, name)
    results: Results = {}
    path = folder / f"{os.environ['RANK']}.json"

    def note(function: str, outcome: str | None) -> None:
        # One bad outcome stays, of the many calls that a function may have.
        results[function] = results.get(function) or outcome
        path.write_text(json.dumps(results))

    for function in [each for each in vars(script) if each.startswith(("test_", "check_")) or each.endswith("_check")]:
        if isinstance(getattr(script, function), types.FunctionType):
            setattr(script, function, noting(getattr(script, function), note))
    try:
        script.main()
    except BaseException:
        note("main", traceback.format_exc())
        raise
    note("main", None)


def noting(function: Callable[..., Any], note: Callable[[str, str | None], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # pytest's own failures are not exceptions
            note(function.__name__, traceback.format_exc())
        else:
            note(function.__name__, None)

    return run


def replace_classes(script: Any, name: str) -> None:
    """Put ours into the names that the script has imported. Configuration objects stay Accelerate's."""
    import accelerate
    import torch
    from accelerate.test_utils.training import RegressionDataset

    from gradsync import Accelerator, GradientAccumulationPlugin, utils
    from gradsync.accelerator import world
    from gradsync.errors import MismatchError

    def like_accelerate(**options: Any) -> Accelerator:
        options.setdefault("gradient_accumulation_plugin", GradientAccumulationPlugin.like_accelerate())
        return Accelerator(**options)

    class OnCPU(torch.nn.parallel.DistributedDataParallel):
        """torch's, for a script that takes every rank to have a GPU."""

        def __init__(self, module: torch.nn.Module, **_: Any) -> None:
            super().__init__(module)

    class State:
        """What scripts take for Accelerate's singleton: the ranks that have met."""

        def __new__(cls) -> Any:
            return Accelerator().state

        @staticmethod
        def _reset_state(*_: Any) -> None:
            """Nothing is kept that could be reset."""

    world.World._reset_state = State._reset_state  # type: ignore[attr-defined]
    accelerate.Accelerator = accelerate.accelerator.Accelerator = Accelerator
    ours: dict[str, Any] = {each: getattr(utils, each) for each in utils.__all__ if each[0].islower()}
    ours |= {"Accelerator": Accelerator, "AcceleratorState": State, "prepare_data_loader": prepare_data_loader}
    ours |= {"PartialState": State, "DistributedOperationException": MismatchError}
    if name == "test_sync":
        # It compares with Accelerate's division of short windows. Data drawn again in each run now and then gives a
        # rank's own gradient within allclose's tolerance of the mean, which the script takes for synchronized.
        ours["Accelerator"] = like_accelerate
        ours["GradientAccumulationPlugin"] = GradientAccumulationPlugin.like_accelerate
        ours["RegressionDataset"] = functools.partial(RegressionDataset, seed=42)
    if name == "test_ddp_comm_hook":
        torch.nn.parallel.DistributedDataParallel = OnCPU  # type: ignore[misc]
    for each, value in ours.items():
        if hasattr(script, each):
            setattr(script, each, value)


def prepare_data_loader(dataloader: Any, *_: Any, put_on_device: bool = False, **options: Any) -> Any:
    """Accelerate's function of that name, which is given ranks and device one by one."""
    from gradsync import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    return accelerator.prepare_data_loader(dataloader, device_placement=put_on_device)


# -- all scripts ----------------------------------------------------------------------------------------------------


def launch(name: str) -> tuple[Results, str]:
    """What became of each function on all ranks, and what was printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        process = subprocess.Popen(
            [*command, "-m", "tests.accelerate_suite", "--child", name, folder],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ, "ACCELERATE_USE_CPU": "true"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=TIMEOUT)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = f"{process.communicate()[0]}\nno end within {TIMEOUT:g} s"
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    results: Results = {}
    for rank in ranks:
        for function, outcome in rank.items():
            results[function] = results.get(function) or outcome
    if len(ranks) < 2 or process.returncode != 0:
        results["main"] = results.get("main") or f"exit code {process.returncode}"
    return results, output


def report(name: str, results: Results, verbose: bool) -> list[str]:
    """Print a line a function; returns what differs from what is expected."""
    differences = []
    expected = EXPECTED.get(name, {})
    for function in sorted({*results, *expected}):
        failed = results.get(function, "not called")
        reason = expected.get(function)
        verdict = "passed" if failed is None else "failed"
        if failed is not None and reason is not None:
            verdict = f"failed as expected: {reason}"
        elif (failed is None) != (reason is None):
            differences.append(f"{name}.{function}")
            verdict = "FAILED" if reason is None else "PASSED, but was expected to fail"
        print(f"  {function}: {verdict}", flush=True)
        if failed and (verbose or reason is None):
            print("    " + failed.rstrip().replace("\n", "\n    "))
    return differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", metavar="WORD", default="", help="only scripts with WORD in their name")
    parser.add_argument("-v", action="store_true", help="show tracebacks of expected failures, and all output")
    parser.add_argument("--child", nargs=2, metavar=("SCRIPT", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_script(arguments.child[0], Path(arguments.child[1]))
        return 0
    differences: list[str] = []
    for name in [each for each in SCRIPTS if arguments.k in each]:
        print(name, flush=True)
        results, output = launch(name)
        found = report(name, results, arguments.v)
        if found or arguments.v:
            print(output)
        differences += found
    for name, reason in NOT_RUN.items():
        if arguments.k in name:
            print(f"{name}\n  not run: {reason}")
    print(f"differs from what is expected: {', '.join(differences)}" if differences else "all as expected")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
