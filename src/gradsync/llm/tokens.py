"""Text as one file of numbers, built once and mapped into memory by every rank.

Without a tokenizer a token is a byte. Documents are separated by a byte 0, or by the tokenizer's end-of-text.

[Note: one file] Tokens first, then what they are, then how long that is::

    ┃ tokens: uint8, uint16 or uint32 ┃ JSON: count, dtype, vocabulary, description ┃ its length ┃ magic ┃

One file is renamed into place as a whole, so nobody ever sees the tokens of one build with the description of another.
The end of the file is written last and states its size: a file that was cut short is not taken for a whole one. Tokens
come first because a mapping begins at the start of a page.
"""

import hashlib
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

from gradsync.errors import ConfigurationError
from gradsync.files import whole_file
from gradsync.llm.text_sources import TextSource, import_extra, open_source, stamp_of

__all__ = ["BYTES", "TokenFile", "default_cache_folder", "prepare_tokens"]

BYTES = 256
DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32}
TYPECODES = {"uint8": "B", "uint16": "H", "uint32": "I"}
# Changes with the format or with what a source is turned into: files of other versions are not found any more.
MAGIC = b"gradtok1"
TAIL = struct.Struct("<Q8s")
# Tokenizers take time and memory for text in one piece: longer documents are encoded in pieces, cut at line ends.
PIECE_BYTES = 1_000_000


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
        facts = _facts_of(path)
        if facts is None:
            return None
        dtype = DTYPES[facts["dtype"]]
        return cls(
            path=path,
            length=facts["length"],
            vocab_size=facts["vocab_size"],
            description=facts["description"],
            tokens=torch.from_file(str(path), shared=False, size=facts["length"], dtype=dtype),
        )

    def split(self, validation: float = 0.01, *, at_least: int = 0) -> tuple[Tensor, Tensor]:
        """Tokens to train on, and the tail to validate with: that share, and not less than ``at_least`` tokens.

        The tail is never more than half. Both are views of the mapped file.
        """
        if not 0.0 <= validation < 1.0:
            raise ConfigurationError(f"validation is a share of at least 0 and less than 1, got {validation!r}")
        wanted = max(round(self.length * validation), at_least) if validation else 0
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
    found = TokenFile.open(path)
    if found is None:
        _build(path, source, ByteCodec() if tokenizer is None else TokenizerCodec(tokenizer))
        found = TokenFile.open(path)
    if found is None:
        raise ConfigurationError(f"{path} is not what was just written to it. Choose another cache folder")
    return found


def default_cache_folder() -> Path:
    """``$XDG_CACHE_HOME/gradsync``, or ``~/.cache/gradsync``."""
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

    vocab_size = BYTES
    dtype = "uint8"
    separator = b"\0"
    name = "bytes"

    def encode(self, document: bytes) -> Iterator[bytes]:
        yield document


class TokenizerCodec:
    """The tokens of a tokenizer of transformers, in the smallest dtype that holds its vocabulary."""

    def __init__(self, name: str) -> None:
        transformers = import_extra("transformers", f"the tokenizer {name}")
        self.name = name
        folder = Path(name).expanduser()
        local = folder.is_dir()
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder) if local else name, local_files_only=local
            )
        except Exception as error:
            # Some broken folders end in a TypeError or KeyError inside transformers.
            reason = str(error).strip().partition("\n")[0]
            raise ConfigurationError(
                f"transformers cannot load the tokenizer {name!r}: {reason}. Expected a name of the hub, or a folder "
                "that save_pretrained wrote"
            ) from error
        self.vocab_size = len(self._tokenizer)
        self.dtype = "uint8" if self.vocab_size <= 1 << 8 else "uint16" if self.vocab_size <= 1 << 16 else "uint32"
        end = self._tokenizer.eos_token_id
        self.separator = b"" if end is None else self._packed([end])

    def encode(self, document: bytes) -> Iterator[bytes]:
        for piece in _pieces(document):
            text = piece.decode("utf-8", errors="replace")
            # Not verbose: that a text is longer than what the model reads at once is the point of cutting it later.
            yield self._packed(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def _packed(self, tokens: list[int]) -> bytes:
        return array(TYPECODES[self.dtype], tokens).tobytes()


def _pieces(document: bytes) -> Iterator[bytes]:
    begin = 0
    while begin < len(document):
        end = document.find(b"\n", begin + PIECE_BYTES) + 1 or len(document)
        yield document[begin:end]
        begin = end


# -- the file ---------------------------------------------------------------------------------------------------------


def _build(path: Path, source: TextSource, codec: ByteCodec | TokenizerCodec) -> None:
    """See [Note: one file]."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            _write(file, source, codec)
    except OSError as error:
        # A source says itself what it cannot read, so this is about the cache.
        raise ConfigurationError(
            f"cannot write {path} into the cache: {error.strerror}. Choose another folder with cache_folder"
        ) from error


def _write(file: BinaryIO, source: TextSource, codec: ByteCodec | TokenizerCodec) -> None:
    first = True
    for document in source:
        if not document:
            continue
        if not first:
            file.write(codec.separator)
        first = False
        for packed in codec.encode(document):
            file.write(packed)
    length = file.tell() // DTYPES[codec.dtype].itemsize
    if not length:
        raise ConfigurationError(f"there is no text in {source.description}: everything in it is empty")
    facts = {
        "length": length,
        "dtype": codec.dtype,
        "vocab_size": codec.vocab_size,
        "description": f"{source.description}; {length:,} tokens of {codec.vocab_size:,} kinds ({codec.name})",
    }
    encoded = json.dumps(facts).encode()
    file.write(encoded + TAIL.pack(len(encoded), MAGIC))


def _facts_of(path: Path) -> dict[str, Any] | None:
    """What the end of a file says, where it is the end of a whole file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size < TAIL.size:
                return None
            file.seek(size - TAIL.size)
            length, magic = TAIL.unpack(file.read(TAIL.size))
            if magic != MAGIC or length > size - TAIL.size:
                return None
            file.seek(size - TAIL.size - length)
            facts: dict[str, Any] = json.loads(file.read(length))
    except (OSError, ValueError):
        # What cannot be read is built once more, and the build says why it cannot be.
        return None
    whole = facts["length"] * DTYPES[facts["dtype"]].itemsize + length + TAIL.size
    return facts if size == whole else None
