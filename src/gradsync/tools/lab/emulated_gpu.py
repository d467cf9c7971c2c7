"""A model whose layers keep a GPU waiting for as long as they would compute, and hand out real gradients there.

    model = EmulatedGpuModel(resnet50(seconds=0.06))
    loss = model(torch.tensor(1.0, device="cuda"))
    loss.backward()

A layer is one kernel of one thread, which watches the clock of its multiprocessor. So several ranks on one GPU compute
side by side under MPS, as they would on GPUs of their own, and leave the rest of it to NCCL. By time slices they do
not: a kernel of one rank then holds up those of the others.

The gradients have the real shapes. Each is filled with the input, so that a mean over ranks can be checked.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gradsync.tools.lab.emulated import put_at
from gradsync.tools.lab.profile import Layer, Profile

__all__ = ["EmulatedGpuModel", "cycles_per_second"]

# Of a trial, about half a millisecond: short enough to fall into one time slice. All trials take long enough for the
# clock to leave its idle rate.
TRIAL_CYCLES, TRIALS = 1_000_000, 400


class EmulatedGpuModel(nn.Module):
    """The layers of a profile, on the current GPU or ``device``. It names its parameters as the real model does."""

    def __init__(self, profile: Profile, *, device: torch.device | str = "cuda") -> None:
        super().__init__()
        self.profile = profile
        self._steps = [_GpuLayer(layer, torch.device(device)) for layer in profile.layers]
        for layer, step in zip(profile.layers, self._steps, strict=True):
            put_at(self, layer.name, step)

    def forward(self, inputs: Tensor) -> Tensor:
        """The mean of ``inputs``, when the GPU has spent the time of a forward. The host does not wait for it."""
        value = inputs.detach().to(torch.float32).mean()
        signal = value
        for step in self._steps:
            signal = step(signal, value)
        return signal


class _GpuLayer(nn.Module):
    def __init__(self, layer: Layer, device: torch.device) -> None:
        super().__init__()
        seconds = (layer.forward_seconds, layer.backward_seconds)
        self.cycles = tuple(int(each * cycles_per_second()) for each in seconds)
        for name, shape in layer.shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, device=device)))

    def forward(self, signal: Tensor, value: Tensor) -> Tensor:
        answer: Tensor = _Spin.apply(self.cycles, signal, value, *self._parameters.values())
        return answer


class _Spin(torch.autograd.Function):
    """The time of one layer. The signal ties the layers together, so that backward takes them one after another."""

    @staticmethod
    def forward(ctx: Any, cycles: tuple[int, int], signal: Tensor, value: Tensor, *parameters: Tensor) -> Tensor:
        ctx.cycles, ctx.value = cycles[1], value
        ctx.like = [(parameter.shape, parameter.dtype) for parameter in parameters]
        torch.cuda._sleep(cycles[0])
        return signal.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        torch.cuda._sleep(ctx.cycles)
        filling = gradient * ctx.value
        # Fresh tensors, which autograd makes the parameters' own without copying them.
        gradients = [
            filling.to(dtype).expand(shape).clone(memory_format=torch.contiguous_format) if wanted else None
            for (shape, dtype), wanted in zip(ctx.like, ctx.needs_input_grad[3:], strict=True)
        ]
        return None, gradient, None, *gradients


@functools.cache
def cycles_per_second() -> float:
    """Of the clock that the kernels watch; the fastest of many trials, since clocks rise and others may have a turn."""
    fastest = 0.0
    for _ in range(TRIALS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        torch.cuda._sleep(TRIAL_CYCLES)
        ended.record()
        ended.synchronize()
        fastest = max(fastest, TRIAL_CYCLES / began.elapsed_time(ended) * 1e3)
    return fastest
