"""Models that take the time of an accelerator, but not this machine's cores, layer by layer.

    model = EmulatedModel(resnet50(seconds=0.1))
    loss = model(torch.tensor(float(rank + 1)))     # sleeps a third of the time
    loss.backward()                                 # sleeps the rest; gradients come layer by layer, the last first

A :class:`Profile` has the parameter shapes of the real model. Its time is distributed over the layers by their
multiplications; memory-bound layers (normalization) count by their elements. A backward takes twice as long as its
forward. The parameters and their gradients are real tensors, so whatever synchronizes gradients works on them as on any
model. Only the arithmetic is left out: a gradient is filled with one number, so that a mean over ranks can be checked.

A sleeping layer leaves the core to others, as a kernel on an accelerator does; the fill is the one thing that costs
memory traffic, four bytes written a parameter. Against a link that is less than a hundredth: a gigabyte is written in
about 0.2 s here, and takes 8 s at 1 Gbit/s, twice that in an all-reduce. Against shared memory it is not small. The
time of the fill is part of the layer's time.
"""

import functools
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gradsync.base.errors import ConfigurationError

__all__ = ["EmulatedGpuModel", "EmulatedModel", "Layer", "Profile", "bert_base", "resnet50", "transformer"]

Shape = tuple[int, ...]

FORWARD_SHARE = 1 / 3
# One element read and written takes an accelerator about as long as this many multiplications.
ELEMENT_COST = 100
# Below this many rows a scaled parameter becomes flat, since rounding its rows would change its size too much.
FEWEST_ROWS = 8
# Shorter sleeps are saved up: each takes some 0.1 ms longer than asked for.
GRAIN_SECONDS = 0.001
# What the host may compute between two layers before the accelerator stands still.
MOST_AHEAD_SECONDS = 0.005
# A process that was held up longer does not make up for it, as an accelerator would not.
MOST_CREDIT_SECONDS = 0.01
# Of a trial on a GPU, about half a millisecond: short enough to fall into one time slice. All trials take long enough
# for the clock to leave its idle rate.
TRIAL_CYCLES, TRIALS = 1_000_000, 400


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One step of a forward, and of the backward in turn. It may have no parameters."""

    name: str
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    forward_seconds: float
    backward_seconds: float

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model as its layers, in the order of the forward."""

    name: str
    layers: tuple[Layer, ...]

    @property
    def parameters(self) -> int:
        return sum(layer.elements for layer in self.layers)

    @property
    def tensors(self) -> int:
        return sum(len(layer.shapes) for layer in self.layers)

    @property
    def forward_seconds(self) -> float:
        return sum(layer.forward_seconds for layer in self.layers)

    @property
    def backward_seconds(self) -> float:
        return sum(layer.backward_seconds for layer in self.layers)

    def scaled(self, *, parameters: float = 1.0, seconds: float = 1.0) -> "Profile":
        """The same number of layers and tensors, with the elements and the seconds multiplied."""
        for name, factor in (("parameters", parameters), ("seconds", seconds)):
            if not (math.isfinite(factor) and factor > 0):
                raise ConfigurationError(f"{name} of a profile are scaled by a number above 0, got {factor}")
        layers = (
            replace(
                layer,
                shapes={name: _scaled_shape(shape, parameters) for name, shape in layer.shapes.items()},
                forward_seconds=layer.forward_seconds * seconds,
                backward_seconds=layer.backward_seconds * seconds,
            )
            for layer in self.layers
        )
        return Profile(name=self.name, layers=tuple(layers))


def resnet50(*, seconds: float = 0.1) -> Profile:
    """ResNet-50 on images of 224×224: 25.6 million parameters in 161 tensors; ``seconds`` for forward and backward."""
    return _spread("resnet50", _resnet50_layers(), seconds)


def bert_base(*, seconds: float = 0.14, length: int = 128) -> Profile:
    """BERT-base with its pooler, on sequences of ``length``: 109.5 million parameters in 199 tensors.

    The last gradient of its backward is also its largest, that of the word embedding.
    """
    return _spread("bert_base", _bert_layers(length), seconds)


def transformer(*, parameters: int, layers: int, seconds: float, length: int = 1024) -> Profile:
    """A GPT of about that many parameters, a tenth of them in the embedding."""
    if layers < 1 or parameters < 1000 * layers:
        raise ConfigurationError(
            f"a transformer has at least 1 layer, and 1000 parameters a layer; got layers={layers}, "
            f"parameters={parameters}"
        )
    width = max(8, round(math.sqrt(0.9 * parameters / (12 * layers)) / 8) * 8)
    blocks = [layer for index in range(layers) for layer in _block(f"blocks.{index}", width, length)]
    rest = parameters - sum(layer.elements for layer in blocks) - 2 * width
    embedding = _layer("embedding", {"weight": (max(1, round(rest / width)), width)}, ELEMENT_COST * length * width)
    return _spread("transformer", [embedding, *blocks, _norm("norm", width, length)], seconds)


def _spread(name: str, layers: list[Layer], seconds: float) -> Profile:
    """The layers with ``seconds`` in all, in the proportion of their work."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigurationError(f"the seconds of a profile must be above 0, got {seconds}")
    profile = Profile(name=name, layers=tuple(layers))
    return profile.scaled(seconds=seconds / (profile.forward_seconds + profile.backward_seconds))


def _layer(name: str, shapes: Mapping[str, Shape], work: float) -> Layer:
    """A layer before its seconds are known: its work in multiplications stands for them."""
    forward = FORWARD_SHARE * work
    return Layer(name=name, shapes=shapes, forward_seconds=forward, backward_seconds=work - forward)


def _scaled_shape(shape: Shape, factor: float) -> Shape:
    if factor == 1.0:
        return shape
    if shape[0] * factor >= FEWEST_ROWS:
        return (round(shape[0] * factor), *shape[1:])
    return (max(1, round(math.prod(shape) * factor)),)


def _linear(name: str, inputs: int, outputs: int, items: int) -> Layer:
    return _layer(name, {"weight": (outputs, inputs), "bias": (outputs,)}, items * inputs * outputs)


def _norm(name: str, width: int, items: int) -> Layer:
    return _layer(name, {"weight": (width,), "bias": (width,)}, ELEMENT_COST * items * width)


def _scores(name: str, width: int, length: int) -> Layer:
    """The two products of attention, which have no parameters."""
    return _layer(name, {}, 2 * length * length * width)


def _block(name: str, width: int, length: int) -> Iterator[Layer]:
    yield _norm(f"{name}.norm1", width, length)
    yield _linear(f"{name}.attention.qkv", width, 3 * width, length)
    yield _scores(f"{name}.attention.scores", width, length)
    yield _linear(f"{name}.attention.projection", width, width, length)
    yield _norm(f"{name}.norm2", width, length)
    yield _linear(f"{name}.mlp.up", width, 4 * width, length)
    yield _linear(f"{name}.mlp.down", 4 * width, width, length)


def _bert_layers(length: int) -> list[Layer]:
    width, words = 768, 30522
    lookup = ELEMENT_COST * length * width
    layers = [
        _layer("embeddings.word_embeddings", {"weight": (words, width)}, lookup),
        _layer("embeddings.position_embeddings", {"weight": (512, width)}, lookup),
        _layer("embeddings.token_type_embeddings", {"weight": (2, width)}, lookup),
        _norm("embeddings.LayerNorm", width, length),
    ]
    for index in range(12):
        name = f"encoder.layer.{index}"
        layers += [_linear(f"{name}.attention.self.{part}", width, width, length) for part in ("query", "key", "value")]
        layers += [
            _scores(f"{name}.attention.self.scores", width, length),
            _linear(f"{name}.attention.output.dense", width, width, length),
            _norm(f"{name}.attention.output.LayerNorm", width, length),
            _linear(f"{name}.intermediate.dense", width, 4 * width, length),
            _linear(f"{name}.output.dense", 4 * width, width, length),
            _norm(f"{name}.output.LayerNorm", width, length),
        ]
    return [*layers, _linear("pooler.dense", width, width, 1)]


def _resnet50_layers() -> list[Layer]:
    layers = list(_convolution("conv1", "bn1", (3, 64, 7), 112))
    inputs = 64
    for stage, (blocks, width, pixels) in enumerate([(3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)], start=1):
        for index in range(blocks):
            name = f"layer{stage}.{index}"
            # The first block of a later stage halves the image in its 3×3 convolution.
            before = pixels * 2 if index == 0 and stage > 1 else pixels
            layers += _convolution(f"{name}.conv1", f"{name}.bn1", (inputs, width, 1), before)
            layers += _convolution(f"{name}.conv2", f"{name}.bn2", (width, width, 3), pixels)
            layers += _convolution(f"{name}.conv3", f"{name}.bn3", (width, 4 * width, 1), pixels)
            if index == 0:
                layers += _convolution(f"{name}.downsample.0", f"{name}.downsample.1", (inputs, 4 * width, 1), pixels)
            inputs = 4 * width
    return [*layers, _linear("fc", inputs, 1000, 1)]


def _convolution(name: str, norm: str, sizes: tuple[int, int, int], pixels: int) -> Iterator[Layer]:
    inputs, outputs, side = sizes
    shape = (outputs, inputs, side, side)
    yield _layer(name, {"weight": shape}, math.prod(shape) * pixels**2)
    yield _norm(norm, outputs, pixels**2)


# -- the models -------------------------------------------------------------------------------------------------------


class EmulatedModel(nn.Module):
    """The layers of a profile. It names its parameters as the real model does: ``layer1.0.conv1.weight``.

    Each gradient is the mean of the input times a factor that is different for each parameter, so that a gradient in
    the wrong place shows (:meth:`gradient_of`). The loss is the mean of the input.
    """

    def __init__(self, profile: Profile, *, time_scale: float = 1.0, size_scale: float = 1.0) -> None:
        super().__init__()
        self.profile = profile.scaled(parameters=size_scale, seconds=time_scale)
        self._clock = _SleepingClock()
        names = [f"{layer.name}.{name}" for layer in self.profile.layers for name in layer.shapes]
        self._factors = {name: number / len(names) for number, name in enumerate(names, 1)}
        self._steps: list[_EmulatedLayer] = []
        for layer in self.profile.layers:
            factors = tuple(self._factors[f"{layer.name}.{name}"] for name in layer.shapes)
            self._steps.append(_EmulatedLayer(layer, self._clock, factors))
            _put_at(self, layer.name, self._steps[-1])

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


class EmulatedGpuModel(nn.Module):
    """The layers of a profile, on the current GPU or ``device``, which they keep busy as long as they would compute.

    A layer is one kernel of one thread, which watches the clock of its multiprocessor. So several ranks on one GPU
    compute side by side under MPS, as they would on GPUs of their own, and leave the rest of it to NCCL. By time slices
    they do not: a kernel of one rank then holds up those of the others. Each gradient is filled with the input's mean.
    """

    def __init__(self, profile: Profile, *, device: torch.device | str = "cuda") -> None:
        super().__init__()
        self.profile = profile
        clock = _GpuClock()
        self._steps = [_EmulatedLayer(layer, clock, device=torch.device(device)) for layer in profile.layers]
        for layer, step in zip(profile.layers, self._steps, strict=True):
            _put_at(self, layer.name, step)

    def forward(self, inputs: Tensor) -> Tensor:
        """The mean of ``inputs``, when the GPU has spent the time of a forward. The host does not wait for it."""
        value = inputs.detach().to(torch.float32).mean()
        signal = value
        for step in self._steps:
            signal = step(signal, value)
        return signal


class _EmulatedLayer(nn.Module):
    """An emulated layer: its parameters, and the work that yields their gradients."""

    def __init__(
        self,
        layer: Layer,
        clock: "_SleepingClock | _GpuClock",
        factors: tuple[float, ...] = (),
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.clock, self.factors = layer, clock, factors or (1.0,) * len(layer.shapes)
        for name, shape in layer.shapes.items():
            # Zeros take no memory of the host until they are written.
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, device=device)))

    def forward(self, signal: Tensor, value: float | Tensor) -> Tensor:
        answer: Tensor = _Work.apply(self, value, signal, *self._parameters.values())
        return answer


class _Work(torch.autograd.Function):
    """The work of one layer. The signal ties the layers together, so that backward takes them one after another."""

    @staticmethod
    def forward(ctx: Any, step: _EmulatedLayer, value: float | Tensor, signal: Tensor, *parameters: Tensor) -> Tensor:
        step.clock.begin(step.layer.forward_seconds)
        ctx.step, ctx.value = step, value
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        answer = signal.clone()
        step.clock.finish(step.layer.forward_seconds)
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        step: _EmulatedLayer = ctx.step
        step.clock.begin(step.layer.backward_seconds)
        # A float on the CPU, and on a GPU, which the host must not wait for, a tensor.
        scale = gradient * ctx.value if isinstance(ctx.value, Tensor) else float(gradient) * ctx.value
        # Fresh tensors, which autograd makes the parameters' own without copying them.
        gradients = [
            _filled(scale, factor, *like) if wanted else None
            for factor, like, wanted in zip(step.factors, ctx.like, ctx.needs_input_grad[3:], strict=True)
        ]
        step.clock.finish(step.layer.backward_seconds)
        return None, None, gradient, *gradients


def _filled(
    scale: float | Tensor, factor: float, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if isinstance(scale, Tensor):
        return scale.to(dtype).expand(shape).clone(memory_format=torch.contiguous_format)
    return torch.full(shape, scale * factor, dtype=dtype, device=device)


class _SleepingClock:
    """Sleeps, on average as long as asked for: what a sleep took too long, later ones make up.

    What the host computes between two layers is taken off the second: an accelerator goes on meanwhile, since the host
    runs ahead of it. What the host waits for is not.
    """

    def __init__(self) -> None:
        self._owed = 0.0
        self._began = 0.0
        self._host = 0.0

    def start(self) -> None:
        """Start again: no layer comes before the next."""
        self._host = time.thread_time() + _queued_seconds()

    def begin(self, seconds: float) -> None:
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


class _GpuClock:
    """Keeps the GPU's stream busy; the host goes on."""

    def __init__(self) -> None:
        self._cycles_per_second = cycles_per_second()

    def begin(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_second))

    def finish(self, seconds: float) -> None:
        """Return at once: there is nothing to wait for."""


@functools.cache
def cycles_per_second() -> float:
    """The rate of the clock that kernels watch; the fastest of many trials: clocks rise, others may have a turn."""
    fastest = 0.0
    for _ in range(TRIALS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        torch.cuda._sleep(TRIAL_CYCLES)
        ended.record()
        ended.synchronize()
        fastest = max(fastest, TRIAL_CYCLES / began.elapsed_time(ended) * 1e3)
    return fastest


def _put_at(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register ``module`` under a dotted name, with plain modules on the way."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, module)
