"""Every exception gradsync raises on purpose.

::

    GradsyncError (RuntimeError)
    ├── ConfigurationError (ValueError)   an argument that cannot be honoured, before anything was changed
    │   ├── NoProcessGroupError           nothing to synchronize over
    │   └── NotCallableError (TypeError)  what was to be a hook cannot be called
    ├── MismatchError                     ranks hold different models, settings or collectives
    ├── MisuseError                       a call at a time when its result would be wrong
    │   └── LateGradientError             a gradient arrived after its bucket had started
    └── PeerFailedError                   another rank failed; the message names it

A message says what was expected, what came (rank, parameter) and what to do. The classes also derive from the
built-in class that ``torch.nn.parallel.DistributedDataParallel`` raises in the same situation, so that code which
catches that goes on working.
"""

__all__ = [
    "ConfigurationError",
    "GradsyncError",
    "LateGradientError",
    "MismatchError",
    "MisuseError",
    "NoProcessGroupError",
    "NotCallableError",
    "PeerFailedError",
]


class GradsyncError(RuntimeError):
    """The root of the tree: catches everything gradsync raises on purpose."""


class ConfigurationError(GradsyncError, ValueError):
    """An argument cannot be honoured. Raised before anything is changed."""


class NoProcessGroupError(ConfigurationError):
    """There is neither a process group nor a communicator to synchronize over."""


class NotCallableError(ConfigurationError, TypeError):
    """What was registered as a hook cannot be called."""


class MismatchError(GradsyncError):
    """Ranks that must agree do not: the message names the first difference and both ranks."""


class MisuseError(GradsyncError):
    """A call came at a time when its result would be wrong. The message holds the remedy."""


class LateGradientError(MisuseError):
    """A parameter received a further gradient after its bucket had started."""


class PeerFailedError(GradsyncError):
    """Another rank failed, so this synchronization has no result. The message names the rank."""
