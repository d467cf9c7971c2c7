"""Every exception that gradsync raises: see :mod:`gradsync.base.errors`."""

from gradsync.base.errors import (
    ConfigurationError,
    GradsyncError,
    LateGradientError,
    MismatchError,
    MisuseError,
    NoProcessGroupError,
    NotCallableError,
    PeerFailedError,
    VetoError,
    WireLostError,
)

__all__ = [
    "ConfigurationError",
    "GradsyncError",
    "LateGradientError",
    "MismatchError",
    "MisuseError",
    "NoProcessGroupError",
    "NotCallableError",
    "PeerFailedError",
    "VetoError",
    "WireLostError",
]
