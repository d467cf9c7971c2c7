"""Error messages that name the option a user typed, where the library knows its values by other names."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from gradsync.base.errors import ConfigurationError

__all__ = ["OPTION", "refusing"]

# As it is typed: not inside of a word, and not what somebody gave as a value, such as '--foo' or -inf.
OPTION = re.compile(r"(?<![\w'\"-])--[a-z][a-z-]*\b")


@contextmanager
def refusing(option: str) -> Iterator[None]:
    """Put ``option`` in front of a :class:`~gradsync.base.errors.ConfigurationError` that names no option."""
    try:
        yield
    except ConfigurationError as error:
        if OPTION.search(str(error)):
            raise
        raise ConfigurationError(f"{option}: {error}") from error
