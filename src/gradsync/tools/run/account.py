"""What one rank counted while a script ran: the file it leaves for the process that reports on all ranks."""

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradsync.base.errors import ConfigurationError
from gradsync.base.files import from_json, whole_file

__all__ = ["Account", "Kind", "WrapperAccount", "account_path", "find_accounts", "read_account", "write_account"]

VERSION = 1
# Whose class wraps a model.
Kind = Literal["torch", "gradsync"]
NAME = re.compile(r"run-rank-(\d+)\.json")


@dataclass(frozen=True, kw_only=True)
class WrapperAccount:
    """One wrapped model. ``wasted`` of its ``synchronized`` backwards came before the last of a window, and sent what
    was sent again; ``collectives`` are those of buckets, ``broadcasts`` those of buffers in a forward.

    ``backward_with`` and ``backward_without`` are seconds of a backward that synchronizes, and of one that does not;
    ``wire`` and ``hidden`` those that torch's class has measured of its own collectives. None is what was not seen.
    """

    kind: Kind
    model: str
    parameters: int
    nbytes: int
    buckets: int
    steps: int
    backwards: int
    synchronized: int
    wasted: int
    collectives: int
    broadcasts: int
    backward_with: float | None
    backward_without: float | None
    wire: float | None
    hidden: float | None

    @property
    def exposed(self) -> float | None:
        """Seconds that one synchronization adds to its backward: as measured by the wrapper, else by comparison."""
        if self.wire is not None and self.hidden is not None:
            return max(0.0, self.wire - self.hidden)
        if self.backward_with is not None and self.backward_without is not None:
            return max(0.0, self.backward_with - self.backward_without)
        return None


@dataclass(frozen=True, kw_only=True)
class Account:
    """A rank's. ``seconds`` by phase, from the first forward to the end of the last optimizer step; ``called`` are the
    collectives that the script, or a library it uses, has started through torch.distributed, by name."""

    rank: int
    world_size: int
    host: str
    kept: bool
    steps: int
    seconds: dict[str, float]
    called: dict[str, int]
    wrappers: tuple[WrapperAccount, ...]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def account_path(folder: Path, rank: int) -> Path:
    """The path of a rank's account."""
    return folder / f"run-rank-{rank}.json"


def write_account(folder: Path, account: Account) -> Path:
    """Whole or not at all; of two models that one rank trained in two lives the last stays."""
    folder.mkdir(parents=True, exist_ok=True)
    path = account_path(folder, account.rank)
    with whole_file(path) as file:
        file.write(json.dumps({"version": VERSION, **dataclasses.asdict(account)}, indent=1).encode())
    return path


def find_accounts(folder: Path) -> list[Path]:
    """The files of all ranks, by rank."""
    found = [(int(match[1]), path) for path in folder.glob("*.json") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def read_account(path: Path) -> Account:
    """Raises if the file is of another version, or not whole."""
    try:
        told = json.loads(path.read_bytes())
        version = told.get("version") if isinstance(told, dict) else None
        if version != VERSION:
            raise ConfigurationError(
                f"{path} was written by another version of gradsync (format {version}, this one reads {VERSION}). Read "
                "it with that one, or run the script again"
            )
        return from_json(Account, told)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{path} cannot be read as the account of a rank: {error}") from error
