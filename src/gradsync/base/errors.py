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
        ├── VetoError                     a rank does not want the window; raised there, too
        └── WireLostError                 and with it the wire: nothing can go on over it

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
    "VetoError",
    "WireLostError",
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


class VetoError(PeerFailedError):
    """A rank has vetoed the window, and ``on_veto="raise"`` was asked for: raised on all ranks, also on that one.

    The message names the rank, and the parameter whose gradient is not finite. After ``zero_grad()`` training goes on.
    """


class WireLostError(PeerFailedError):
    """A rank has ended, hangs or gave up, so the wire is out of step for good: every later use of it raises this.

    After its base class alone ``zero_grad()`` goes on. After this one ranks must begin anew: make the process group and
    the communicator again on all of them, or start all of them again.
    """
