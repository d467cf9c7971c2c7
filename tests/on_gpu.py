"""Tests that say no device compute on a GPU, with the numbers that they would draw on the CPU.

`compute_on(device)` is for a worker of NCCL ranks. From then on a tensor that a test makes, or a module of torch
that it makes, is on the device. What gradsync, torch's optimizers and torch's loaders make stays where it is in a
user's program, which passes devices and has a default of "cpu": `torch.set_default_device` would hide what the library
puts in the wrong place.

Random numbers are drawn on the CPU and copied, so that a seed means the same on all kinds of ranks, and the reference
that the parent computes is one of the same model and data.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils.data import get_worker_info

__all__ = ["compute_on", "computes_on_cpu", "pretend_device"]

# The caller of these wants a tensor of its own.
TRANSPARENT = ("torch.nn.", "torch._tensor", "torch.functional", "torch.overrides", "torch.utils._contextlib")
HOST = ("tests.ranks", "tests.on_gpu")
DRAWN = {torch.rand, torch.randn, torch.randint, torch.randperm}
DRAWN_LIKE = {torch.rand_like, torch.randn_like, torch.randint_like}
DRAWN_IN_PLACE = {
    torch.Tensor.uniform_,
    torch.Tensor.normal_,
    torch.Tensor.random_,
    torch.Tensor.bernoulli_,
    torch.Tensor.exponential_,
}


def compute_on(device: torch.device) -> None:
    """For the rest of this thread's life."""
    _OnDevice(device).__enter__()


def computes_on_cpu() -> bool:
    """Whether what a test makes here is on the CPU: what it passes as `cpu=` to an Accelerator."""
    return not any(isinstance(mode, _OnDevice) for mode in _get_current_function_mode_stack())


class _OnDevice(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._constructors = _device_constructors()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in DRAWN_IN_PLACE and _drawn_here(given, args[0].device):
            on_host = torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu")
            func(on_host, *args[1:], **given)
            return args[0].copy_(on_host)
        if getattr(func, "__module__", "") == "torch.nn.init" and _drawn_here(given, given["tensor"].device):
            tensor = given.pop("tensor")
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            return tensor.data.copy_(func(on_host, *args[1:], **given))
        if func in DRAWN_LIKE and _drawn_here(given, args[0].device):
            on_host = torch.empty_like(args[0], device="cpu", requires_grad=False)
            return func(on_host, *args[1:], **given).to(args[0].device)
        if func in self._constructors and given.get("device") is None and _asked_by_a_test(given, args):
            if func in DRAWN and _drawn_here(given, self._device):
                requires_grad = given.pop("requires_grad", False)
                made = func(*args, **given | {"device": "cpu"}).to(self._device)
                return made.requires_grad_(requires_grad)
            given["device"] = self._device
        return func(*args, **given)


def pretend_device() -> None:
    """Where there is no GPU, the engine does as on one: it reads what ranks say a window later, and records nothing
    unasked."""
    # Imported late: the tests of the process ranks must not depend on the library under test.
    from gradsync.core.engine import flag_reader
    from gradsync.core.window import skip_vote, weights
    from gradsync.parallel import replica

    for module in (flag_reader, skip_vote, weights):
        vars(module)["reads_at_once"] = lambda device: False
    for module in (flag_reader, weights):
        vars(module)["HostCopy"] = _Copy
    choose = replica.choose_recorder
    vars(replica)["choose_recorder"] = lambda observer, device: choose(observer, torch.device("cuda"))


class _Copy:
    def __init__(self, numbers: torch.Tensor) -> None:
        self._copy = numbers.clone()

    def wait(self) -> Any:
        return self._copy.tolist()


def _drawn_here(given: Mapping[str, Any], device: torch.device) -> bool:
    """Whether numbers for that device come from this host's generator."""
    generator = given.get("generator")
    return device.type != "cpu" and (generator is None or generator.device.type == "cpu")


def _asked_by_a_test(given: Mapping[str, Any], args: Sequence[Any]) -> bool:
    if given.get("pin_memory") or given.get("out") is not None or any(isinstance(each, torch.Tensor) for each in args):
        # As it says, or like the tensors it is made of.
        return False
    if get_worker_info() is not None:
        # The forked worker of a loader, in which CUDA does not work.
        return False
    # 0 is here, 1 __torch_function__, 2 its caller.
    frame = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(TRANSPARENT):
        frame = frame.f_back  # type: ignore[assignment]
    module = "" if frame is None else str(frame.f_globals.get("__name__"))
    return module.startswith("tests.") and module not in HOST
