"""torch's own tests of DistributedDataParallel, with gradsync's class in the place of torch's.

    python -m tests.torch_ddp_suite                    # all of them; minutes
    python -m tests.torch_ddp_suite -k buffer -v       # some, with the tracebacks
    python -m tests.torch_ddp_suite --of torch         # the same over torch's class: can a test pass here at all?

The tests are those of the wheel (`torch.testing._internal.distributed`) that wrap a model, over Gloo. Most of them want
a GPU a rank for no other reason than that NCCL needs one, so what they put on GPUs is left on the host: `_HostForGpu`
rewrites devices, and the wrapper is told of none. Processes are forked from one that has imported torch, and end with
their test.

`EXPECTED` names what fails, and why; `docs/torch-tests.md` tells it. Whatever differs from it makes the exit code 1.
"""

import argparse
import contextlib
import inspect
import logging
import os
import re
import sys
import tempfile
import time
import types
import unittest
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

RANKS = 2
# Of one test, in seconds. Those that pass take a few.
TIMEOUT = 90

# -- what is expected -------------------------------------------------------------------------------------------------

# Why tests fail over gradsync's class, and which. `NEEDS_GPU` fail over torch's class too, where there is no GPU.
NEEDS_GPU = {
    "SyncBatchNorm works only on GPUs": (
        "test_DistributedDataParallel_SyncBatchNorm",
        "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
        "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
        "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
        "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
        "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
        "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
        "test_DistributedDataParallel_SyncBatchNorm_half",
        "test_ddp_inference",
        "test_ddp_uneven_inputs_stop_iteration_sync_bn",
        "test_sync_bn_logged",
    ),
    "the test asks the wrapper for its GPU": ("test_ddp_device",),
}
DIFFERS = {
    "the test reads torch's `reducer`, or the arguments it is created from": (
        "test_ddp_build_debug_param_to_name_mapping",
        "test_ddp_build_debug_param_to_name_mapping_requires_grad",
        "test_ddp_control_flow_different_across_ranks",
        "test_ddp_control_flow_same_across_ranks",
        "test_detect_ddp_is_actually_static",
    ),
    "the test reads the low-precision copies that torch's `mixed_precision` attaches to parameters": (
        "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
        "test_ddp_native_mixed_precision_ignored_params",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
    ),
    "the test expects an error about unused parameters, which gradsync allows": (
        "test_ddp_multiple_nested_unused_params_err_ignore_params",
        "test_ddp_multiple_nested_unused_params_error",
        "test_ddp_unused_params_rebuild_buckets_exception",
    ),
    "the test expects an error if a graph declared static changes, or is declared static too late": (
        "test_invalid_static_graph",
        "test_static_graph_api_cpu",
    ),
    "the test reads times, bucket statistics or the last error from the logging data": (
        "test_ddp_logging_data_cpu",
        "test_ddp_logging_data_gpu",
        "test_ddp_python_error_logged",
        "test_different_graph_across_ranks",
        "test_skip_all_reduce_unused_parameters",
    ),
    "the test counts profiler events of the group's collectives and of torch's search for unused parameters": (
        "test_ddp_profiling_torch_profiler",
    ),
}
TOO_LONG = {"test_ddp_uneven_inputs": "its models are made for GPUs and take longer than its timeout on the host"}
EXPECTED = {name: reason for group in (NEEDS_GPU, DIFFERS) for reason, names in group.items() for name in names}


# -- GPUs that are not there ------------------------------------------------------------------------------------------


def _on_host(device: Any) -> Any:
    if isinstance(device, bool):
        return device
    if isinstance(device, int) or (isinstance(device, str | torch.device) and str(device).startswith("cuda")):
        return "cpu"
    return device


class _HostForGpu(TorchFunctionMode):
    """What is to be put on a GPU stays on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _on_host(kwargs["device"])
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _on_host(args[1]), *args[2:])
        return func(*args, **kwargs)


def _pretend_gpus() -> None:
    moved = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return moved(self, *map(_on_host, args), **{name: _on_host(value) for name, value in kwargs.items()})

    nn.Module.to = to  # type: ignore[method-assign, assignment]
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign, assignment, misc]
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.device = lambda _: contextlib.nullcontext()  # type: ignore[misc, assignment]
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: RANKS
    _HostForGpu().__enter__()


def _without_devices(wrapper: Any) -> Any:
    """The wrapper, told of no GPU."""

    class DistributedDataParallel(wrapper):  # type: ignore[misc]
        def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, *a: Any, **k: Any):
            super().__init__(module, None, None, *a, **k)

    # Where pickle looks for it.
    DistributedDataParallel.__module__, DistributedDataParallel.__qualname__ = __name__, "DistributedDataParallel"
    globals()["DistributedDataParallel"] = DistributedDataParallel
    return DistributedDataParallel


# -- torch's tests ----------------------------------------------------------------------------------------------------


def _import_tests(wrapper: Any) -> Any:
    """The module of torch's tests, to which ``wrapper`` is DistributedDataParallel, and which misses no GPU."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(RANKS),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TIMEOUT),
    )
    try:
        import expecttest  # noqa: F401
    except ImportError:  # the tests derive from its class and use nothing of it
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    nn.parallel.DistributedDataParallel = wrapper  # type: ignore[misc]
    nn.parallel.distributed.DistributedDataParallel = wrapper  # type: ignore[misc]
    from torch.testing._internal import common_distributed as common

    common.TIMEOUT_OVERRIDE.clear()
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common, name, lambda *_, **__: lambda function: function)
    common.skip_if_no_gpu = lambda function: function
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def _wrapping_tests(base: type) -> list[str]:
    """The tests that wrap a model, themselves or in a helper that they call."""
    functions = {name: inspect.unwrap(value) for name, value in vars(base).items() if callable(value)}
    sources = {name: inspect.getsource(each) for name, each in functions.items() if inspect.isfunction(each)}
    wrapping = {name for name, source in sources.items() if re.search(r"DistributedDataParallel\(|\bDDP\(", source)}
    while True:
        callers = {name for name, source in sources.items() if any(f"self.{each}(" in source for each in wrapping)}
        if callers <= wrapping:
            return sorted(name for name in wrapping if name.startswith("test_"))
        wrapping |= callers


def _forking(tests: Any) -> Any:
    """The test case, whose processes are forked instead of started again."""

    class TorchTests(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TorchTests


# -- running them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a test, with the traceback of one that failed or the reason to skip it."""

    name: str
    verdict: Literal["passed", "failed", "skipped"]
    told: str
    seconds: float

    @property
    def surprising(self) -> bool:
        return (self.verdict == "failed") != (self.name in EXPECTED) and self.verdict != "skipped"

    def __str__(self) -> str:
        reason = EXPECTED.get(self.name, "") if self.verdict == "failed" else self.told
        mark = "!" if self.surprising else " "
        return f"{mark} {self.verdict:8} {self.seconds:5.1f} s  {self.name}" + (f": {reason}" if reason else "")


def run(case: Any, name: str) -> Result:
    if name in TOO_LONG:
        return Result(name=name, verdict="skipped", told=TOO_LONG[name], seconds=0.0)
    outcome = unittest.TestResult()
    began = time.monotonic()
    case(name).run(outcome)
    seconds = time.monotonic() - began
    failures = [text for _, text in outcome.errors + outcome.failures]
    if failures:
        return Result(name=name, verdict="failed", told=failures[0], seconds=seconds)
    skipped = [reason for _, reason in outcome.skipped]
    return Result(name=name, verdict="skipped" if skipped else "passed", told=" ".join(skipped), seconds=seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="pattern", default="", help="only tests whose name has this")
    parser.add_argument("--of", choices=["gradsync", "torch"], default="gradsync", help="whose class is tested")
    parser.add_argument("-v", dest="verbose", action="store_true", help="print the tracebacks of tests that failed")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    # Each compiling test would import the compiler again.

    import gradsync

    tests = _import_tests(
        _without_devices(
            gradsync.DistributedDataParallel if arguments.of == "gradsync" else nn.parallel.DistributedDataParallel
        )
    )
    if not arguments.verbose:
        logging.disable()
    case = _forking(tests)
    _pretend_gpus()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TEMP_DIR"] = folder
        for name in _wrapping_tests(tests.DistributedTest._DistTestBase):
            if arguments.pattern in name:
                results.append(run(case, name))
                print(results[-1], flush=True)
                if arguments.verbose and results[-1].verdict == "failed":
                    print(results[-1].told, flush=True)
    return report(results) if arguments.of == "gradsync" else 0


def report(results: list[Result]) -> int:
    """Say how many, and what was not expected. The exit code."""
    counts = {verdict: sum(each.verdict == verdict for each in results) for verdict in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    surprises = [each for each in results if each.surprising]
    for each in surprises:
        remedy = (
            f"and should not\n{each.told}" if each.verdict == "failed" else "and EXPECTED says otherwise: delete it"
        )
        print(f"{each.name} {each.verdict} {remedy}")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
