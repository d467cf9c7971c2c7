"""Text that every machine has, for scenarios that really train: the source files of Python's standard library."""

import torch
from torch import Tensor

from gradsync.base.errors import ConfigurationError
from gradsync.tools.llm.text_sources import open_source

__all__ = ["SYMBOLS", "read_symbols"]

SYMBOLS = 128


def read_symbols(count: int) -> Tensor:
    """The first bytes of it, as symbols. Those above 127, which are rare, count as one."""
    data = bytearray()
    for document in open_source("stdlib"):
        data += document
        if len(data) >= count:
            return torch.frombuffer(data[:count], dtype=torch.uint8).long().clamp(max=SYMBOLS - 1)
    raise ConfigurationError(
        f"this needs {count:,} bytes of Python's standard library, but there are {len(data):,}. Install its source "
        "files"
    )
