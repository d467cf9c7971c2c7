"""The result of a check."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from gradsync.base.environment import ProcessEnvironment, read_environment
from gradsync.base.errors import ConfigurationError

__all__ = ["GIB", "KIB", "MIB", "Finding", "Status", "guarded", "judged", "place_of", "size"]

KIB, MIB, GIB = 2**10, 2**20, 2**30


class Status(StrEnum):
    """FAIL: training does not work. WARN: it does, but slowly, or not everywhere."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor's table.

    ``fix`` is what to do, empty if nothing is to be done. ``public`` stands for ``detail`` in a bug report, where
    ``detail`` has host names, addresses or paths.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""
    public: str | None = None

    @property
    def public_detail(self) -> str:
        return self.detail if self.public is None else self.public


# Whether something is wrong, how bad that is, and what to do about it.
Fault = tuple[bool, Status, str]


def judged(name: str, detail: str, *faults: Fault, public: str | None = None) -> Finding:
    """What the first of ``faults`` that is there makes of ``detail``; PASS, if none is."""
    status, fix = next(((status, fix) for there, status, fix in faults if there), (Status.PASS, ""))
    return Finding(name=name, status=status, detail=detail, fix=fix, public=public)


def guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """What ``check`` finds. A check that breaks must not keep the others from being made, and is itself a finding."""
    try:
        return check()
    except Exception as error:
        public = f"the check itself failed: {type(error).__name__}"
        fix = "please report this with the block below"
        return Finding(name=name, status=Status.FAIL, detail=f"{public}: {error}", fix=fix, public=public)


def place_of(variables: Mapping[str, str]) -> ProcessEnvironment:
    """Who this process is; alone, where the variables make no sense: the check of the launcher says what is wrong."""
    try:
        return read_environment(variables)
    except ConfigurationError:
        return ProcessEnvironment()


def size(nbytes: float) -> str:
    """``1.5 GiB``, ``64 MiB``, ``4 KiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}" if nbytes < 1000 * unit else f"{nbytes / unit:.0f} {name}"
    return f"{nbytes / KIB:.3g} KiB"
