"""What each rank counted while a script ran, the file it leaves, and the messages made of the files of all ranks."""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradsync.base.errors import ConfigurationError
from gradsync.base.files import from_json, whole_file
from gradsync.communicator.logs import name_missing_ranks
from gradsync.observe.charts.numbers import count, duration, size

__all__ = [
    *("Account", "Kind", "WrapperAccount", "account_path", "find_accounts", "read_account", "summarize"),
    "write_account",
]

# The phases of a loop.
DATA, FORWARD, BACKWARD, OPTIMIZER, REST = "data", "forward", "backward", "optimizer", "rest"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, REST)
VERSION = 1
FILE_NAME = re.compile(r"run-rank-(\d+)\.json")
# Whose class wraps a model.
Kind = Literal["torch", "gradsync"]
NAMES: dict[Kind, str] = {"torch": "torch's DistributedDataParallel", "gradsync": "gradsync's DistributedDataParallel"}
MORE_THAN_NOTHING = 0.001


@dataclass(frozen=True, kw_only=True)
class WrapperAccount:
    """One wrapped model. ``wasted`` of its ``synchronized`` backwards came before the last of a window, and sent what
    was sent again; ``collectives`` are those of buckets, ``broadcasts`` those of buffers in a forward.

    ``backward_with`` and ``backward_without`` are seconds of a backward that synchronizes, and of one that does not;
    ``communication`` and ``hidden`` those that torch's class has measured of its own collectives. None: not seen.
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
    communication: float | None
    hidden: float | None

    @property
    def exposed(self) -> float | None:
        """The seconds that one synchronization adds to its backward: as measured by the wrapper, else by comparison."""
        if self.communication is not None and self.hidden is not None:
            return max(0.0, self.communication - self.hidden)
        if self.backward_with is not None and self.backward_without is not None:
            return max(0.0, self.backward_with - self.backward_without)
        return None


@dataclass(frozen=True, kw_only=True)
class Account:
    """A rank's account. ``seconds`` by phase, from the first forward to the end of the last optimizer step; ``called``
    are the collectives that the script, or a library it uses, has started through torch.distributed, by name."""

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
    """Write the account, whole or not at all; of two models that one rank trained in two lives the last stays."""
    folder.mkdir(parents=True, exist_ok=True)
    path = account_path(folder, account.rank)
    with whole_file(path) as file:
        file.write(json.dumps({"version": VERSION, **dataclasses.asdict(account)}, indent=1).encode())
    return path


def find_accounts(folder: Path) -> list[Path]:
    """The files of all ranks, by rank."""
    found = [(int(match[1]), path) for path in folder.glob("*.json") if (match := FILE_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def read_account(path: Path) -> Account:
    """Raises if the file is of another version, or not whole."""
    try:
        content = json.loads(path.read_bytes())
        version = content.get("version") if isinstance(content, dict) else None
        if version != VERSION:
            raise ConfigurationError(
                f"{path} was written by another version of gradsync (format {version}, this one reads {VERSION}). Read "
                "it with that one, or run the script again"
            )
        return from_json(Account, content)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{path} cannot be read as the account of a rank: {error}") from error


# -- the messages at the end of a run ---------------------------------------------------------------------------------


def summarize(accounts: Sequence[Account], script: str, *, times: bool = True) -> list[str]:
    """Summarize in lines: where the time went, which collectives there were and which for nothing, and what would be
    gained. ``times`` is False where an explanation shows where the time went."""
    if not any(account.wrappers for account in accounts):
        return [_never_wrapped(accounts, script)]
    lines = []
    first = next(account for account in accounts if account.wrappers)
    missing = name_missing_ranks({account.rank for account in accounts}, first.world_size)
    if missing:
        lines.append(f"there is no account of {missing}: what follows is of the others")
    if not first.steps:
        return [*lines, f"{script} wrapped a model, but no optimizer stepped on its parameters after a backward"]
    lines += _where_time_went(first, accounts, times=times)
    for wrapper in first.wrappers:
        lines += _of_wrapper(wrapper, first)
    if first.called:
        most_first = sorted(first.called.items(), key=lambda each: -each[1])
        calls = ", ".join(f"{number} {name}" for name, number in most_first)
        lines.append(f"started through torch.distributed beside these: {calls}")
    return lines


def _never_wrapped(accounts: Sequence[Account], script: str) -> str:
    called = sum(sum(account.called.values()) for account in accounts)
    others = f"; it started {count(called, 'collective')} itself" if called else ""
    if max((account.world_size for account in accounts), default=1) == 1:
        others += ". It ran on one rank, where there is nothing to synchronize: see --nproc"
    return (
        f"{script} never wrapped a model in DistributedDataParallel, nor prepared one for several ranks with an "
        f"Accelerator, so no gradients were synchronized and there is nothing to explain{others}"
    )


def _where_time_went(first: Account, accounts: Sequence[Account], *, times: bool) -> list[str]:
    each = first.total / first.steps
    steps, ranks = count(first.steps, "optimizer step"), count(first.world_size, "rank")
    lines = [f"{steps} on {ranks}, {duration(each)} a step" + (f"; rank {first.rank}:" * times)]
    for phase in PHASES if times else ():
        own = first.seconds.get(phase, 0.0)
        share = own / first.total if first.total else 0.0
        if share < MORE_THAN_NOTHING and phase != REST:
            continue
        means = [account.seconds.get(phase, 0.0) / account.steps for account in accounts if account.steps]
        spread = f"  ({duration(min(means))} to {duration(max(means))} over the ranks)" if len(means) > 1 else ""
        name = "all else" if phase == REST else phase
        lines.append(f"  {name:10}{share:6.1%}  {duration(own / first.steps):>9}{spread}")
    return lines


def _of_wrapper(wrapper: WrapperAccount, account: Account) -> list[str]:
    what = f"{wrapper.model} ({wrapper.parameters:,} parameters, {size(wrapper.nbytes)})"
    if not wrapper.steps:
        return [f"{what} was wrapped by {NAMES[wrapper.kind]} and never trained"]
    per_step = wrapper.collectives / wrapper.steps
    lines = [
        f"{what} in {NAMES[wrapper.kind]}: {_plural(per_step, 'collective')} a step "
        f"({_plural(wrapper.buckets, 'bucket')}), {_number(wrapper.synchronized / wrapper.steps)} of "
        f"{_plural(wrapper.backwards / wrapper.steps, 'backward')} synchronized"
    ]
    if wrapper.broadcasts:
        lines.append(f"  and {_plural(wrapper.broadcasts / wrapper.steps, 'broadcast')} of buffers a step")
    lines += _wasted(wrapper, account) if wrapper.wasted and wrapper.synchronized else ["  none of them was wasted"]
    if wrapper.communication is not None and wrapper.hidden is not None and wrapper.exposed is not None:
        lines.append(
            f"  by its own measure they are under way for {duration(wrapper.communication)} of a backward, "
            f"{duration(wrapper.exposed)} of them not hidden behind its computation"
        )
    return lines


def _wasted(wrapper: WrapperAccount, account: Account) -> list[str]:
    share = wrapper.wasted / wrapper.synchronized
    lines = [
        f"  WASTED: {share:.0%} of them, {_number(wrapper.collectives * share / wrapper.steps)} a step: of the "
        "backwards between two optimizer steps only the last one has to synchronize. Run the others, forward and "
        "backward, under model.no_sync() or with model.require_backward_grad_sync = False"
    ]
    if wrapper.exposed is not None:
        lost = wrapper.exposed * wrapper.wasted
        gain = lost / account.total if account.total else 0.0
        lines.append(f"  to gain: about {duration(lost / wrapper.steps)} a step, {gain:.0%}, with this transport")
    return lines


def _plural(number: float, noun: str) -> str:
    return f"{_number(number)} {noun}" + ("" if number == 1 else "s")


def _number(number: float) -> str:
    return f"{number:.0f}" if abs(number - round(number)) < 0.005 else f"{number:.2f}"
