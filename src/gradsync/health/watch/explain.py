"""Reads the dumps that ranks wrote on request, and says which rank waits for which."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gradsync.base.errors import ConfigurationError
from gradsync.communicator.naming import listed
from gradsync.health.watch.dump import FORMAT
from gradsync.health.watch.messages import Member, where
from gradsync.health.watch.status import RankStatus
from gradsync.health.watch.waiting import at_odds, longest, roots

__all__ = ["Dump", "explain_dumps", "find_dumps", "read_dump"]

PATTERN = "rank-*.json"
FRAMES_SHOWN = 3
# What was written longer before the newest is of another request.
SAME_REQUEST_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Dump:
    """One rank's dump. ``groups``: the ranks of each of its process groups, and its status there."""

    member: Member
    time: datetime
    groups: tuple[tuple[tuple[int, ...], RankStatus], ...]
    known: str
    stack: tuple[str, ...]


def find_dumps(folder: Path) -> list[Path]:
    return sorted(folder.glob(PATTERN))


def read_dump(path: Path) -> Dump:
    """Raises ConfigurationError for what no rank has written."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise ConfigurationError(f"{path} has format {data['format']}, and {FORMAT} is read here: update gradsync")
        main: list[str] = next((lines for name, lines in data["stacks"].items() if name.startswith("MainThread")), [])
        return Dump(
            member=Member.read(data),
            time=datetime.fromisoformat(data["time"]),
            groups=tuple((tuple(each["ranks"]), RankStatus.read(each["status"])) for each in data["groups"]),
            known=next((each["known"] for each in data["groups"] if each["known"]), ""),
            stack=tuple(main),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{path} is not what a rank writes on request: {error!r}") from error


def explain_dumps(dumps: Sequence[Dump]) -> list[str]:
    """The status of each rank, and which rank waits for which, in lines."""
    newest = max(dump.time for dump in dumps)
    old = [dump for dump in dumps if (newest - dump.time).total_seconds() > SAME_REQUEST_SECONDS]
    dumps = [dump for dump in dumps if dump not in old]
    by_rank = {dump.member.rank: dump for dump in sorted(dumps, key=lambda dump: dump.member.rank)}
    lines = [f"{dump.member} wrote before, at {dump.time:%H:%M:%S}, and not with the others." for dump in old]
    for ranks in sorted({ranks for dump in dumps for ranks, _ in dump.groups}):
        statuses = {
            rank: status
            for rank, dump in by_rank.items()
            for group, status in dump.groups
            if group == ranks and rank in ranks
        }
        lines += [_place(by_rank[rank], status) for rank, status in statuses.items()]
        lines += ["", *_conclusions(ranks, statuses, by_rank)]
    if not any(dump.groups for dump in dumps):
        lines += [f"{dump.member}: at {_innermost(dump)}" for dump in by_rank.values()]
        lines += ["", "No watch was set up between these ranks, so who waits for whom is not known."]
    # Of those who have written themselves it adds nothing.
    everybody = {rank for dump in dumps for ranks, _ in dump.groups for rank in ranks}
    known = [f"{dump.member} knew: {dump.known}" for dump in by_rank.values() if dump.known]
    return [*lines, *(known if everybody - by_rank.keys() else ())]


def _place(dump: Dump, status: RankStatus) -> str:
    wait = longest(status)
    waits = f", for {wait.seconds:.0f} s" if wait is not None else f", for {status.seconds:.0f} s"
    return f"{dump.member} at {dump.time:%H:%M:%S}: {where(status)}{waits}"


def _conclusions(ranks: Sequence[int], statuses: dict[int, RankStatus], by_rank: dict[int, Dump]) -> list[str]:
    lines = []
    missing = [rank for rank in ranks if rank not in statuses]
    if missing:
        names = listed([f"rank {rank}" for rank in missing])
        lines.append(f"{names} wrote nothing: ended, stopped, or without GRADSYNC_DUMP.")
    for rank, (other, its, theirs) in at_odds(statuses).items():
        lines.append(f"rank {rank} is in {its.what}, where rank {other} is in {theirs.what}.")
    for rank, waiters in roots(statuses).items():
        names = listed([f"rank {waiter}" for waiter in sorted(waiters)])
        verb = "waits" if len(waiters) == 1 else "wait"
        what = max(waiters.values(), key=lambda wait: wait.seconds).what
        lines.append(f"{names} {verb} for rank {rank} in {what}. rank {rank} is at {_innermost(by_rank[rank])}.")
    waiting = [rank for rank, status in statuses.items() if status.waits]
    if not lines and waiting:
        names = listed([f"rank {rank}" for rank in waiting])
        lines.append(f"All ranks have come to what {names} waited for: the wire was at work on it.")
    if waiting and missing and len(lines) == 1:
        lines.append(f"{listed([f'rank {rank}' for rank in waiting])} may wait for what wrote nothing.")
    return lines or ["Nobody waits for anybody."]


def _innermost(dump: Dump) -> str:
    return " < ".join(reversed(dump.stack[-FRAMES_SHOWN:])) or "an unknown place"
