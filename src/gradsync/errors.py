"""Every exception that gradsync raises: see :mod:`gradsync.base.errors`."""

from gradsync.base.errors import (
    BadStepError,
    CommunicatorLostError,
    ConfigurationError,
    GradsyncError,
    LateGradientError,
    MismatchError,
    MisuseError,
    NoProcessGroupError,
    NotCallableError,
    PeerFailedError,
)

__all__ = [
    "BadStepError",
    "CommunicatorLostError",
    "ConfigurationError",
    "GradsyncError",
    "LateGradientError",
    "MismatchError",
    "MisuseError",
    "NoProcessGroupError",
    "NotCallableError",
    "PeerFailedError",
]
