"""A module that behaves like a model on an accelerator: it takes the time, but not this machine's cores.

    model = EmulatedModel(resnet50(seconds=0.1))
    loss = model(torch.tensor(float(rank + 1)))     # sleeps a third of the time
    loss.backward()                                 # sleeps the rest; gradients come layer by layer, the last first

The parameters and their gradients are real tensors of the real shapes, so whatever synchronizes gradients works on it
as on any model. Only the arithmetic is left out: each gradient is filled with one number, the mean of the input times
a factor that is different for each parameter, so that a mean over ranks, and a gradient in the wrong place, can be
checked (:meth:`EmulatedModel.gradient_of`). The loss is the mean of the input.

A sleeping layer leaves the core to others, as a kernel on an accelerator does; the fill is the one thing that costs
memory traffic, four bytes written a parameter. Against a link that is less than a hundredth: a gigabyte is written in
about 0.2 s here, and takes 8 s at 1 Gbit/s, twice that in an all-reduce. Against shared memory it is not small. The
time of the fill is part of the layer's time.
"""

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gradsync.tools.lab.profile import Layer, Profile

__all__ = ["EmulatedModel", "put_at"]

# Shorter sleeps are saved up: each takes some 0.1 ms longer than asked for.
GRAIN_SECONDS = 0.001
# What the host may compute between two layers before the accelerator stands still.
MOST_AHEAD_SECONDS = 0.005
# A process that was held up longer does not make up for it, as an accelerator would not.
MOST_CREDIT_SECONDS = 0.01


class EmulatedModel(nn.Module):
    """The layers of a profile. It names its parameters as the real model does: ``layer1.0.conv1.weight``."""

    def __init__(self, profile: Profile, *, time_scale: float = 1.0, size_scale: float = 1.0) -> None:
        super().__init__()
        self.profile = profile.scaled(parameters=size_scale, seconds=time_scale)
        self._clock = _Clock()
        names = [f"{layer.name}.{name}" for layer in self.profile.layers for name in layer.shapes]
        self._factors = {name: number / len(names) for number, name in enumerate(names, 1)}
        self._steps: list[_EmulatedLayer] = []
        for layer in self.profile.layers:
            factors = tuple(self._factors[f"{layer.name}.{name}"] for name in layer.shapes)
            self._steps.append(_EmulatedLayer(layer, self._clock, factors))
            put_at(self, layer.name, self._steps[-1])

    def forward(self, inputs: Tensor) -> Tensor:
        """The mean of ``inputs``, after the time of a forward. It requires gradients, as a loss does."""
        signal = inputs.detach().to(torch.float32).mean()
        value = float(signal)
        self._clock.start()
        for step in self._steps:
            signal = step(signal, value)
        return signal

    def gradient_of(self, name: str, inputs: float) -> float:
        """Every element of the gradient of the parameter ``name``, for inputs of that mean."""
        return self._factors[name] * inputs


class _EmulatedLayer(nn.Module):
    """Its parameters, and the work that yields their gradients."""

    def __init__(self, layer: Layer, clock: "_Clock", factors: tuple[float, ...]) -> None:
        super().__init__()
        self.layer, self.clock, self.factors = layer, clock, factors
        for name, shape in layer.shapes.items():
            # Zeros take no memory until they are written.
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, signal: Tensor, value: float) -> Tensor:
        answer: Tensor = _Sleep.apply(self, value, signal, *self._parameters.values())
        return answer


class _Clock:
    """Sleeps, on average as long as asked for: what a sleep took too long, later ones make up.

    What the host computes between two layers is taken off the second: an accelerator goes on meanwhile, since the host
    runs ahead of it. What the host waits for is not.
    """

    def __init__(self) -> None:
        self._owed = 0.0
        self._began = 0.0
        self._host = 0.0

    def start(self) -> None:
        """No layer comes before the next."""
        self._host = time.thread_time() + _queued_seconds()

    def begin(self) -> None:
        """A layer begins."""
        # On a core, or in the queue for one that another process had. Read in the order that leaves no time out.
        host = _queued_seconds() + time.thread_time() - self._host
        self._began = time.perf_counter() - min(host, MOST_AHEAD_SECONDS)

    def finish(self, seconds: float) -> None:
        """Return when the layer has taken ``seconds``."""
        self._owed += seconds
        if self._owed >= GRAIN_SECONDS:
            rest = self._owed - (time.perf_counter() - self._began)
            if rest > 0:
                time.sleep(rest)
        self._owed = max(self._owed - (time.perf_counter() - self._began), -MOST_CREDIT_SECONDS)
        self._host = time.thread_time() + _queued_seconds()


def _queued_seconds() -> float:
    """How long this thread was ready to run and had no core."""
    try:
        descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        return int(os.read(descriptor, 100).split()[1]) / 1e9
    finally:
        os.close(descriptor)


class _Sleep(torch.autograd.Function):
    """The work of one layer. The signal ties the layers together, so that backward takes them one after another."""

    @staticmethod
    def forward(ctx: Any, step: _EmulatedLayer, value: float, signal: Tensor, *parameters: Tensor) -> Tensor:
        step.clock.begin()
        ctx.step, ctx.value = step, value
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        answer = signal.clone()
        step.clock.finish(step.layer.forward_seconds)
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        step: _EmulatedLayer = ctx.step
        step.clock.begin()
        scale = float(gradient) * ctx.value
        # Fresh tensors, which autograd makes the parameters' own without copying them.
        gradients = [
            torch.full(shape, scale * factor, dtype=dtype, device=device) if wanted else None
            for factor, (shape, dtype, device), wanted in zip(
                step.factors, ctx.like, ctx.needs_input_grad[3:], strict=True
            )
        ]
        step.clock.finish(step.layer.backward_seconds)
        return None, None, gradient, *gradients


def put_at(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register ``module`` under a dotted name, with plain modules on the way."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, module)
