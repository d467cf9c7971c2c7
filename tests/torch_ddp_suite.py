"""torch's own tests of DistributedDataParallel, with gradsync's class in the place of torch's.

    python -m tests.torch_ddp_suite                    # all of them; about ten minutes on two cores
    python -m tests.torch_ddp_suite -k buffer -v       # some, with the tracebacks
    python -m tests.torch_ddp_suite --of torch         # the same over torch's class: does a test run here at all?

The tests are those of the wheel (`torch.testing._internal.distributed.distributed_test`) that wrap a model, over Gloo.
Most of them want a GPU a rank for no other reason than that NCCL needs one, so what they put on GPUs is left on the
host: `_HostForGpu` rewrites devices, and the wrapper is told of none. Processes are forked from one that has imported
torch, and end with their test.

`EXPECTED` names what fails and why, and whatever differs from it makes the exit code 1.
"""

import argparse
import inspect
import os
import re
import sys
import tempfile
import time
import types
import unittest
import warnings
from typing import Any, Literal, NamedTuple

os.environ.update(
    BACKEND="gloo",
    WORLD_SIZE=os.environ.get("WORLD_SIZE", "2"),
    GLOO_SOCKET_IFNAME="lo",
    OMP_NUM_THREADS="1",
    DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=os.environ.get("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "90"),
)

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Verdict = Literal["passed", "failed", "skipped"]


class Result(NamedTuple):
    verdict: Verdict
    told: str
    seconds: float


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


def _pretend_gpus(ranks: int) -> None:
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: _on_host(value) if name == "device" else value for name, value in kwargs.items()}
        return moved(self, *map(_on_host, args), **kwargs)

    moved = nn.Module.to
    nn.Module.to = to  # type: ignore[method-assign, assignment]
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign, assignment, misc]
    for name in ("set_device", "synchronize"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.device_count = lambda: ranks
    _HostForGpu().__enter__()


def _without_devices(wrapper: type) -> type:
    """The wrapper, told of no GPU. It keeps the name, because some tests look for it."""

    class DistributedDataParallel(wrapper):  # type: ignore[misc, valid-type]
        def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, *a: Any, **k: Any):
            super().__init__(module, None, None, *a, **k)

    # Where pickle looks for it.
    DistributedDataParallel.__module__, DistributedDataParallel.__qualname__ = __name__, "DistributedDataParallel"
    globals()["DistributedDataParallel"] = DistributedDataParallel
    return DistributedDataParallel


# -- torch's tests ----------------------------------------------------------------------------------------------------


def _import_tests(wrapper: type) -> Any:
    """The module of torch's tests, to which ``wrapper`` is DistributedDataParallel and no GPU is missing."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:  # the tests derive from its class and use nothing of it
            sys.modules["expecttest"] = types.ModuleType("expecttest")
            sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    nn.parallel.DistributedDataParallel = wrapper  # type: ignore[misc, assignment]
    nn.parallel.distributed.DistributedDataParallel = wrapper  # type: ignore[misc, assignment]
    from torch.testing._internal import common_distributed as common

    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common, name, lambda *_, **__: lambda function: function)
    common.skip_if_no_gpu = lambda function: function
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def _wrapping_tests(base: type) -> list[str]:
    """The tests that wrap a model, themselves or in a helper that they call."""
    sources = {
        name: inspect.getsource(inspect.unwrap(value))
        for name, value in vars(base).items()
        if inspect.isfunction(inspect.unwrap(value))
    }
    wrapping = {name for name, source in sources.items() if re.search(r"DistributedDataParallel\(|\bDDP\(", source)}
    while True:
        callers = {name for name, source in sources.items() if any(f"self.{each}(" in source for each in wrapping)}
        if callers <= wrapping:
            return sorted(name for name in wrapping if name.startswith("test_"))
        wrapping |= callers


def _forking(tests: Any) -> type:
    """The test case, whose processes are forked instead of started anew."""

    class TorchTests(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    tests.instantiate_parametrized_tests(TorchTests)
    return TorchTests


def run(case: type, name: str) -> Result:
    outcome = unittest.TestResult()
    began = time.monotonic()
    case(name).run(outcome)  # type: ignore[attr-defined]
    seconds = time.monotonic() - began
    told = [text for _, text in outcome.errors + outcome.failures]
    if told:
        return Result("failed", told[0], seconds)
    if outcome.skipped:
        return Result("skipped", outcome.skipped[0][1], seconds)
    return Result("passed", "", seconds)


# -- what is expected -------------------------------------------------------------------------------------------------

EXPECTED: dict[str, str] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="pattern", default="", help="only tests whose name has this")
    parser.add_argument("--of", choices=["gradsync", "torch"], default="gradsync", help="whose class is tested")
    parser.add_argument("-v", dest="verbose", action="store_true", help="print tracebacks")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.of == "gradsync":
        from gradsync import DistributedDataParallel as wrapper
    else:
        wrapper = nn.parallel.DistributedDataParallel  # type: ignore[assignment, misc]

    tests = _import_tests(_without_devices(wrapper))
    case = _forking(tests)
    names = [
        n
        for b in _wrapping_tests(tests.DistributedTest._DistTestBase)
        for n in dir(case)
        if n == b or (n.startswith(b + "_") and n not in vars(tests.DistributedTest._DistTestBase))
    ]
    names = sorted(set(names))
    _pretend_gpus(int(os.environ["WORLD_SIZE"]))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TEMP_DIR"] = folder
        for name in names:
            if arguments.pattern in name:
                result = run(case, name)
                print(f"{result.verdict:8} {result.seconds:5.1f} s  {name}", flush=True)
                if arguments.verbose:
                    print(result.told, flush=True)
                elif result.told:
                    print("      ", result.told.strip().splitlines()[-1][:160], flush=True)


if __name__ == "__main__":
    main()
