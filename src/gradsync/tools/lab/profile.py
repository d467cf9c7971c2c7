"""The work of an accelerator, layer by layer: the parameters of a model and the time that its computation takes.

Shapes are those of the real models. Times are distributed over the layers by their multiplications; memory-bound layers
(normalization) count by their elements. A backward takes twice as long as its forward.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from gradsync.base.errors import ConfigurationError

__all__ = ["Layer", "Profile", "bert_base", "resnet50", "transformer"]

Shape = tuple[int, ...]

FORWARD_SHARE = 1 / 3
# One element read and written takes an accelerator about as long as this many multiplications.
ELEMENT_COST = 100
# Below this many rows a scaled parameter becomes flat, since rounding its rows would change its size too much.
FEWEST_ROWS = 8


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
        """The same number of layers and tensors, with so many times the elements and so many times the seconds."""
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
    """The layers with so many seconds in all, in the proportion of their work."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigurationError(f"the seconds of a profile must be above 0, got {seconds}")
    profile = Profile(name=name, layers=tuple(layers))
    return profile.scaled(seconds=seconds / (profile.forward_seconds + profile.backward_seconds))


def _layer(name: str, shapes: Mapping[str, Shape], work: float) -> Layer:
    """Before its seconds are known: its work in multiplications stands for them."""
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
