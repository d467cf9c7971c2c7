"""Every exception gradsync raises on purpose.

::

    GradsyncError (RuntimeError)
    ├── ConfigurationError (ValueError)   an argument that cannot be honoured, before anything was changed
    │   ├── NoProcessGroupError           nothing to synchronize over
    │   └── NotCallableError (TypeError)  an object registered as a hook is not callable
    ├── MismatchError                     ranks hold different models, settings or collectives
    ├── MisuseError                       a call at a time when its result would be wrong
    │   └── LateGradientError             a gradient arrived after its bucket had started
    └── PeerFailedError                   another rank failed; the message names it
        ├── BadStepError                  a rank rejected the window; raised on that rank, too
        └── CommunicatorLostError         the communicator is lost with it and cannot be used again

Every message says what was expected, what was found (rank, parameter) and what to do. The classes also derive from the
built-in class that ``torch.nn.parallel.DistributedDataParallel`` raises in the same situation, so code that catches
the built-in class keeps working.
"""

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


class GradsyncError(RuntimeError):
    """Base class of all gradsync errors: catches everything that gradsync raises on purpose."""


class ConfigurationError(GradsyncError, ValueError):
    """An argument cannot be honoured. Raised before anything changes."""


class NoProcessGroupError(ConfigurationError):
    """There is neither a process group nor a communicator to synchronize over."""


class NotCallableError(ConfigurationError, TypeError):
    """The object registered as a hook is not callable."""


class MismatchError(GradsyncError):
    """Ranks disagree on something that must be equal. The message names the first difference and both ranks."""


class MisuseError(GradsyncError):
    """A call at a time when its result would be wrong. The message says how to fix it."""


class LateGradientError(MisuseError):
    """A parameter received another gradient after its bucket had started."""


class PeerFailedError(GradsyncError):
    """Another rank failed, so this synchronization has no result. The message names the rank."""


class BadStepError(PeerFailedError):
    """A rank has rejected the window, and ``on_bad_step="raise"`` was asked for: raised on all ranks, also on that one.

    The message names the rank, and the parameter whose gradient is not finite. Training goes on after ``zero_grad()``.
    """


class CommunicatorLostError(PeerFailedError):
    """A rank has exited, hung or given up, so the communicator is permanently out of step: every later use raises this.

    After a plain :class:`PeerFailedError`, ``zero_grad()`` is enough to continue. After this one, start over: either
    create the process group and the communicator again on all ranks, or restart all ranks.
    """
