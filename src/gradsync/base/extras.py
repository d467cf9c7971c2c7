"""Optional packages: imported where they are used, and installed as extras of gradsync."""

import importlib
from typing import Any

from gradsync.base.errors import ConfigurationError

__all__ = ["import_extra"]


def import_extra(module: str, purpose: str, extra: str = "hf") -> Any:
    """An optional package, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{purpose} needs the package {module}, which cannot be imported ({error}). Install it with "
            f"pip install 'gradsync[{extra}]'"
        ) from error
