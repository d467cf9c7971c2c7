"""Atomic file write: temporary file, fsync, rename. A file gets its name only once it is complete and on disk."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["PARTIAL", "whole_file"]

PARTIAL = ".partial"


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which becomes ``path`` when the block ends; if the block raises, the old file stays.

    Several processes may write the same file at once: each uses its own temporary name, and the last one wins.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            # A full disk does not say which file it was.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
