"""The models that a training run knows by name: a compact GPT in several sizes, and every causal LM of transformers.

All of them map tokens to logits, ``model(tokens: B×T) -> B×T×V``. They do not compute the loss: :func:`loss_of` is the
mean over the targets of a micro-batch, and :func:`count_targets` is its weight in the window.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradsync.base.errors import ConfigurationError
from gradsync.base.extras import import_extra
from gradsync.tools.llm.text_sources import explained

__all__ = ["GPT", "IGNORED", "SIZES", "CausalLM", "GPTConfig", "build_model", "count_targets", "loss_of"]

# A target that counts for nothing, as in F.cross_entropy.
IGNORED = -100

# In one piece, or in several that an index names.
WEIGHT_FILES = [f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json")]


@dataclass(frozen=True, kw_only=True)
class GPTSize:
    """What a named size fixes; vocabulary and sequence length come from the run."""

    layers: int
    heads: int
    width: int


SIZES: dict[str, GPTSize] = {
    "nano": GPTSize(layers=2, heads=2, width=64),  # 0.1M parameters with bytes as vocabulary
    "tiny": GPTSize(layers=2, heads=2, width=128),  # 0.4M: what a slow core trains at more than 5000 tokens/s
    "mini": GPTSize(layers=6, heads=4, width=256),  # 5M
    "gpt2": GPTSize(layers=12, heads=12, width=768),  # 124M with GPT-2's vocabulary of 50257
}


@dataclass(frozen=True, kw_only=True)
class GPTConfig(GPTSize):
    """The shape of a :class:`GPT`."""

    vocab_size: int
    sequence_length: int


class CausalLM(nn.Module):
    """A model whose ``forward(tokens)`` returns the logits of the token that follows each."""

    @property
    def parameter_count(self) -> int:
        """How many numbers all parameters have; what is shared counts once."""
        return sum(each.numel() for each in self.parameters())


# -- the model --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values in one projection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.input = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.input(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    """Two layers and a GELU, in the approximation that GPT-2 uses."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.input = nn.Linear(config.width, 4 * config.width)
        self.output = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(F.gelu(self.input(x), approximate="tanh"))
        return result


class TransformerBlock(nn.Module):
    """One layer: both halves read a normalized stream and add to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(CausalLM):
    """A pre-norm GPT with learned positions, whose head is the embedding of its tokens."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.sequence_length, config.width)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self._initialize()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # 2·layers projections add to the stream: scaled like this its variance does not grow with depth.
        for module in self.modules():
            if isinstance(module, Attention | FeedForward):
                nn.init.normal_(module.output.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.config.sequence_length:
            raise ConfigurationError(
                f"this model has positions for {self.config.sequence_length} tokens, the batch has {length}. Build "
                f"it with sequence_length={length}, or cut the sequences"
            )
        x = self.token_embedding(tokens) + self.position_embedding.weight[:length]
        for block in self.blocks:
            x = block(x)
        # No module of its own: a state dict holds the matrix once, under one name.
        return F.linear(self.norm(x), self.token_embedding.weight)


class HuggingFaceModel(CausalLM):
    """A causal LM of transformers, which is :attr:`model`, with the forward that all models here have.

    Names of parameters are those of transformers behind ``model.``, in the state dict as everywhere else;
    ``model.save_pretrained(folder)`` writes a folder that transformers loads.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


# -- by name ----------------------------------------------------------------------------------------------------------


def build_model(name: str, *, vocab_size: int, sequence_length: int) -> CausalLM:
    """The model called ``name``, in float32 and in training mode.

    One of :data:`SIZES`; ``hf:NAME``, pretrained, from the hub or from transformers' cache of it; or a folder with a
    ``config.json``: pretrained where it holds weights too, otherwise with random ones. Random weights are drawn from
    torch's global generator.
    """
    if name in SIZES:
        return GPT(GPTConfig(vocab_size=vocab_size, sequence_length=sequence_length, **vars(SIZES[name])))
    place = name.removeprefix("hf:")
    # Path("") is the current folder, which nobody has named.
    if place and Path(place).expanduser().is_dir():
        place = str(Path(place).expanduser())
    elif not (place and name.startswith("hf:")):
        raise ConfigurationError(
            f"there is no model {name!r}. Expected one of {', '.join(SIZES)}; hf:NAME for a causal LM of the Hugging "
            "Face hub, as in hf:openai-community/gpt2; or a folder with its config.json"
        )
    return _from_transformers(place, vocab_size=vocab_size, sequence_length=sequence_length)


def _from_transformers(place: str, *, vocab_size: int, sequence_length: int) -> HuggingFaceModel:
    folder = Path(place)
    local = folder.is_dir()
    if local and not (folder / "config.json").is_file():
        raise ConfigurationError(
            f"the folder {place} has no config.json, so it is no model. Expected what save_pretrained writes, or a "
            "config.json alone for random weights"
        )
    transformers = import_extra("transformers", f"the model {place}")
    with explained(f"transformers cannot load a config of {place!r}"):
        config = transformers.AutoConfig.from_pretrained(place, local_files_only=local)
    _check_fit(place, config.get_text_config(), vocab_size=vocab_size, sequence_length=sequence_length)
    # A cache of keys and values is for generation.
    config.use_cache = False
    causal = transformers.AutoModelForCausalLM
    with explained(f"transformers cannot build {place!r}"):
        # Without a dtype transformers takes that of the checkpoint; the optimizer's copy of weights is float32.
        if local and not any((folder / each).is_file() for each in WEIGHT_FILES):
            model = causal.from_config(config, dtype=torch.float32)
        else:
            model = causal.from_pretrained(place, config=config, dtype=torch.float32, local_files_only=local)
    return HuggingFaceModel(model).train()


def _check_fit(place: str, config: Any, *, vocab_size: int, sequence_length: int) -> None:
    if config.vocab_size < vocab_size:
        raise ConfigurationError(
            f"the --model {place} has a vocabulary of {config.vocab_size}, the data one of {vocab_size}. Give the "
            "model's own tokenizer with --tokenizer"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < sequence_length:
        raise ConfigurationError(
            f"the --model {place} has positions for {positions} tokens, the sequences have {sequence_length}. Choose a "
            f"--length of at most {positions}"
        )


# -- loss -------------------------------------------------------------------------------------------------------------


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy over the targets that are not :data:`IGNORED`, at least in float32.

    Zero, and not 0/0, where all are ignored: such a micro-batch weighs nothing, and nothing times NaN is NaN.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)


def count_targets(targets: Tensor) -> int:
    """How many targets :func:`loss_of` is the mean of: the micro-batch's weight. On the CPU: a GPU would wait."""
    return int((targets != IGNORED).sum())
