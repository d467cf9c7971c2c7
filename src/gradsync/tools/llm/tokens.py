"""Text as one file of token ids, built once and mapped into memory by every rank.

Without a tokenizer a token is a byte. Documents are separated by a byte 0, or by the tokenizer's end-of-text.

[Note: one file] Tokens first, then their description, then the length of that::

    ┃ tokens: uint8, uint16 or uint32 ┃ JSON: count, dtype, vocabulary, description ┃ its length ┃ magic ┃

One file is renamed into place as a whole, so nobody ever sees the tokens of one build with the description of another.
The end of the file is written last and states its size: a truncated file is not mistaken for a complete one. Tokens
come first because a mapping begins at the start of a page.
"""

import hashlib
import io
import json
import os
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gradsync.accelerator.numbered_windows import permutation as _permutation
from gradsync.accelerator.numbered_windows import share_of as _share
from gradsync.base.errors import ConfigurationError
from gradsync.base.extras import import_extra
from gradsync.base.files import whole_file
from gradsync.tools.llm.text_sources import TextSource, blocks_of, explained, open_source, stamp_of

__all__ = ["BatchPlan", "Batches", "MicroBatch", "TokenFile", "prepare_tokens", "validation_batches"]

BYTES = 256
DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32}
TYPECODES = {"uint8": "B", "uint16": "H", "uint32": "I"}
# Changes with the format or with what a source is turned into: files of other versions are not found any more.
MAGIC = b"gradtok1"
TAIL = struct.Struct("<Q8s")
# Tokenizers take time and memory for text in one piece: longer documents are encoded in pieces, cut at line ends.
PIECE_BYTES = 1_000_000
VALIDATION_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A token file on disk. ``tokens`` is mapped: only what is read of it takes memory."""

    path: Path
    length: int
    vocab_size: int
    description: str
    tokens: Tensor

    @classmethod
    def open(cls, path: Path) -> "TokenFile | None":
        """The file at ``path``, or None where there is no whole one."""
        try:
            with path.open("rb") as file:
                size = file.seek(-TAIL.size, os.SEEK_END) + TAIL.size
                length, magic = TAIL.unpack(file.read())
                if magic != MAGIC:
                    return None
                file.seek(-TAIL.size - length, os.SEEK_END)
                facts: dict[str, Any] = json.loads(file.read(length))
        except (OSError, OverflowError, ValueError):
            # What cannot be read is built once more, and the build says why it cannot be.
            return None
        count, dtype = facts["length"], DTYPES[facts.pop("dtype")]
        if size != count * dtype.itemsize + length + TAIL.size:
            return None
        return cls(path=path, tokens=torch.from_file(str(path), shared=False, size=count, dtype=dtype), **facts)

    def split(self, *, at_least: int = 0) -> tuple[Tensor, Tensor]:
        """Tokens to train on, and the tail to validate with: a hundredth of all, and not less than ``at_least`` tokens.

        The tail is never more than half. Both are views of the mapped file.
        """
        wanted = max(round(self.length * VALIDATION_SHARE), at_least)
        cut = self.length - min(wanted, self.length // 2)
        return self.tokens[:cut], self.tokens[cut:]


def prepare_tokens(
    spec: str, *, tokenizer: str | None = None, cache_folder: str | os.PathLike[str] | None = None
) -> TokenFile:
    """The token file of the text that ``spec`` names, see :func:`open_source`; built where the cache has none.

    ``tokenizer`` is the name or the folder of a tokenizer of transformers. Ranks may call this at the same time: each
    builds a file of its own, all are equal, and the last one renamed stays.
    """
    source = open_source(spec)
    folder = Path(cache_folder).expanduser() if cache_folder is not None else default_cache_folder()
    path = folder / f"{_key(spec, source, tokenizer)}.tokens"
    return TokenFile.open(path) or _build(path, source, ByteCodec() if tokenizer is None else TokenizerCodec(tokenizer))


def default_cache_folder() -> Path:
    """The default folder of the cache: ``$XDG_CACHE_HOME/gradsync``, or ``~/.cache/gradsync``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gradsync"


def _key(spec: str, source: TextSource, tokenizer: str | None) -> str:
    """The name of the token file: another text or tokenizer has another one."""
    folder = None if tokenizer is None else Path(tokenizer).expanduser()
    stamp = stamp_of(sorted(each for each in folder.iterdir() if each.is_file())) if folder and folder.is_dir() else ""
    facts = [MAGIC.decode(), spec, source.stamp, tokenizer, stamp]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


# -- from text to numbers ---------------------------------------------------------------------------------------------


class ByteCodec:
    """A token is a byte."""

    vocab_size, dtype, separator, name = BYTES, "uint8", b"\0", "bytes"

    def encode(self, document: bytes) -> Iterator[bytes]:
        yield document


class TokenizerCodec:
    """The tokens of a tokenizer of transformers, in the smallest dtype that holds its vocabulary."""

    def __init__(self, name: str) -> None:
        transformers = import_extra("transformers", f"--tokenizer {name}")
        self.name, folder = name, Path(name).expanduser()
        place, local = str(folder) if folder.is_dir() else name, folder.is_dir()
        advice = ". Expected a name of the hub, or a folder that save_pretrained wrote"
        with explained(f"--tokenizer {name!r} cannot be loaded by transformers", advice):
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(place, local_files_only=local)
        self.vocab_size = len(self._tokenizer)
        self.dtype = "uint8" if self.vocab_size <= 1 << 8 else "uint16" if self.vocab_size <= 1 << 16 else "uint32"
        end = self._tokenizer.eos_token_id
        self.separator = b"" if end is None else self._packed([end])

    def encode(self, document: bytes) -> Iterator[bytes]:
        for piece in blocks_of(io.BytesIO(document), PIECE_BYTES):
            text = piece.decode("utf-8", errors="replace")
            # Not verbose: that a text is longer than what the model reads at once is the point of cutting it later.
            yield self._packed(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def _packed(self, tokens: list[int]) -> bytes:
        return array(TYPECODES[self.dtype], tokens).tobytes()


# -- the file ---------------------------------------------------------------------------------------------------------


def _build(path: Path, source: TextSource, codec: ByteCodec | TokenizerCodec) -> TokenFile:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            _write(file, source, codec)
    except OSError as error:
        # A source says itself what it cannot read, so this is about the cache.
        raise ConfigurationError(
            f"cannot write {path} into the cache: {error.strerror}. Choose another folder with cache_folder"
        ) from error
    built = TokenFile.open(path)
    if built is None:
        raise ConfigurationError(f"{path} is not what was just written to it. Choose another cache folder")
    return built


def _write(file: BinaryIO, source: TextSource, codec: ByteCodec | TokenizerCodec) -> None:
    """Write the tokens of all documents to the file. See [Note: one file]."""
    separator = b""
    for document in filter(None, source):
        file.write(separator)
        file.writelines(codec.encode(document))
        separator = codec.separator
    length = file.tell() // DTYPES[codec.dtype].itemsize
    if not length:
        raise ConfigurationError(f"there is no text in {source.description}: everything in it is empty")
    description = f"{source.description}; {length:,} tokens of {codec.vocab_size:,} kinds ({codec.name})"
    facts = {"length": length, "dtype": codec.dtype, "vocab_size": codec.vocab_size, "description": description}
    encoded = json.dumps(facts).encode()
    file.write(encoded + TAIL.pack(len(encoded), MAGIC))


# Inputs and targets, both int64 of (sequences, sequence_length).
MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How tokens become windows: ``global_batch`` sequences each, over all ranks, in micro-batches of ``micro_batch``
    at most, in an order that ``seed`` determines.

    The model reads ``sequence_length`` tokens at once. A sample is one longer: the targets are the inputs, shifted by
    one.
    """

    sequence_length: int
    global_batch: int
    micro_batch: int
    seed: int = 0


class Batches:
    """One rank's part of every window. More ranks than ``global_batch`` are allowed: some have nothing to do then."""

    def __init__(self, tokens: Tensor, plan: BatchPlan, rank: int, world_size: int) -> None:
        self.plan, self._rank, self._world_size = plan, rank, world_size
        self._samples = _samples_of(tokens, plan)
        if plan.global_batch > len(self._samples):
            raise ConfigurationError(
                f"a window takes {plan.global_batch} sequences, but {len(tokens)} tokens are only "
                f"{len(self._samples)} samples of {plan.sequence_length + 1}: an epoch must fill at least one window. "
                "Take a smaller global batch, shorter sequences or more text"
            )
        # Those that the latest window needed: of one epoch, or of two where it reached into the next.
        self._permutations: dict[int, Tensor] = {}

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        return len(self._samples)

    @property
    def windows_per_epoch(self) -> float:
        """How many windows an epoch has, not a whole number in general: one may reach into the next epoch."""
        return len(self._samples) / self.plan.global_batch

    def window(self, number: int) -> list[MicroBatch]:
        """This rank's micro-batches of window ``number``, counted from 0. Empty where there are too many ranks."""
        count, begin = len(self._samples), number * self.plan.global_batch
        # The epochs of the whole window, not of this rank's share: all ranks do the same at the same time.
        epochs = range(begin // count, (begin + self.plan.global_batch - 1) // count + 1)
        known = self._permutations
        self._permutations = {
            epoch: known[epoch] if epoch in known else _permutation(count, self.plan.seed, epoch) for epoch in epochs
        }
        share = _share(self.plan.global_batch, self._rank, self._world_size)
        parts = [
            order[max(0, begin + share.start - epoch * count) : max(0, begin + share.stop - epoch * count)]
            for epoch, order in self._permutations.items()
        ]
        return _micro_batches(self._samples, torch.cat(parts), self.plan)


def validation_batches(tokens: Tensor, plan: BatchPlan, limit: int, rank: int, world_size: int) -> list[MicroBatch]:
    """This rank's part of ``limit`` micro-batches at most, the same in every call, spread evenly over the tokens.

    The limit is that of all ranks together: the samples, and so their mean loss, do not depend on the number of ranks.
    Empty on a rank that has none, and where the tokens are too few for a sample.
    """
    if len(tokens) <= plan.sequence_length:
        return []
    samples = _samples_of(tokens, plan)
    count = min(limit * plan.micro_batch, len(samples))
    share = _share(count, rank, world_size)
    chosen = torch.arange(share.start, share.stop, dtype=torch.int64) * len(samples) // count
    return _micro_batches(samples, chosen, plan)


def _samples_of(tokens: Tensor, plan: BatchPlan) -> Tensor:
    """All samples, as a view: one in each row. What is left over at the end is too short for one."""
    width = plan.sequence_length + 1
    count = len(tokens) // width
    if not count:
        raise ConfigurationError(
            f"a sample takes {width} tokens (sequence length {plan.sequence_length}, and one to predict), but there "
            f"are only {len(tokens)}. Take shorter sequences or more text"
        )
    return tokens[: count * width].view(count, width)


def _micro_batches(samples: Tensor, chosen: Tensor, plan: BatchPlan) -> list[MicroBatch]:
    # Not torch.split: that makes one empty part of nothing.
    begins = range(0, len(chosen), plan.micro_batch)
    batches = [samples[chosen[begin : begin + plan.micro_batch]].to(torch.int64) for begin in begins]
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in batches]
