"""What came of a fault, by the notes of its ranks and the output of their launcher."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradsync.tools.bench.fault_program import CUT_LINK, RANKS, WRONG_NUMBERS, Fault

__all__ = ["ElasticJudge", "FaultOutcome", "Judge", "Limits", "has_noticed"]

ALL_LIVE = (*WRONG_NUMBERS, CUT_LINK)
# A step that was under way may end as if nothing had happened, and so may the one that others have begun.
UNDER_WAY = 2

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits in seconds: of a group's collective, until a fault counts as not noticed, until nobody goes on any more,
    and until ranks that do not even begin are given up."""

    timeout: float = 10.0
    notice: float = 20.0
    going_on: float = 60.0
    start: float = 120.0


@dataclass(frozen=True, kw_only=True)
class FaultOutcome:
    """What came of a fault. Seconds are counted from it; None: not within the limit. ``lost`` are steps whose work is
    gone; None: all since the fault, since the parameters are wrong. ``left`` is what was left behind, in words."""

    noticed: float | None
    named: bool
    lost: int | None
    went_on: float | None
    left: tuple[str, ...] = ()
    output: str = ""


def has_noticed(events: Sequence[Event], fault: Fault, at: float) -> bool:
    return any(_is_report(each, fault) and each["at"] > at for each in events)


def _is_report(event: Event, fault: Fault) -> bool:
    """Whether somebody has said something: another rank, or also the one with wrong numbers, which lives and speaks for
    all if it is rank 0."""
    speaks = event["rank"] != fault.victim or fault.case in WRONG_NUMBERS
    return event["what"] in ("warned", "raised") and speaks


class Judge:
    """Evaluates ranks that continue together, after a restart of all of them or without one."""

    def __init__(self, fault: Fault, limits: Limits) -> None:
        self.fault = fault
        self.limits = limits

    def judge(self, events: Sequence[Event], output: str) -> FaultOutcome | None:
        """Evaluate notes and output. None if there was no fault."""
        fault = next((each for each in events if each["what"] == "fault"), None)
        if fault is None:
            return None
        at = float(fault["at"])
        after = [each for each in events if each["at"] > at]
        reports = [each for each in after if _is_report(each, self.fault)]
        # Where all ranks live they all fail together, and a launcher lists them all, in any order.
        words = "\n".join([*(str(each["text"]) for each in reports), "" if self.fault.case in ALL_LIVE else output])
        noticed = self._noticed(after, reports, at)
        return FaultOutcome(
            noticed=noticed,
            named=noticed is not None and self._names(words, int(fault["process"])),
            lost=self._lost(after),
            went_on=self._went_on(after, at),
            output=words[-20000:],
        )

    def _noticed(self, after: Sequence[Event], reports: Sequence[Event], at: float) -> float | None:
        """A launcher that starts ranks again has noticed, if nobody else has: they may be ended before they say a
        word."""
        restarted = [each for each in after if each["what"] == "began" and each["life"] > 0]
        seconds = min((float(each["at"]) - at for each in reports or restarted), default=math.inf)
        return seconds if seconds <= self.limits.notice else None

    def _names(self, words: str, process: int) -> bool:
        """Whether the rank with the fault is named: we say ``rank 1``; torch's excepthook, its monitored barrier and
        torchrun have ways of their own."""
        victim = self.fault.victim
        ways = [rf"\brank(?:\s+|\s*: ){victim}\b", rf"\bpid: {process}\b", rf"\bRanks (?:\d+, )*{victim}\b"]
        if self.fault.case == "exception":
            # Torch puts it before every traceback. One that was cut off has a traceback, too, as all others have.
            ways.append(rf"\[rank{victim}\]")
        return any(re.search(way, words) for way in ways)

    def _went_on(self, after: Sequence[Event], at: float) -> float | None:
        """When all ranks had finished a step that began after the fault, with parameters that are right."""
        last = max((each["life"] for each in after if each["what"] == "step"), default=None)
        done: dict[int, list[float]] = {}
        for each in after:
            if each["what"] == "step" and each["life"] == last:
                done.setdefault(each["rank"], []).append(float(each["at"]))
        place = 0 if last else UNDER_WAY
        if last is None or len(done) < RANKS or any(len(times) <= place for times in done.values()):
            return None
        return self._in_time(max(times[place] for times in done.values()) - at) if _is_right(after, last) else None

    def _in_time(self, seconds: float) -> float | None:
        return seconds if seconds <= self.limits.notice + self.limits.going_on else None

    def _lost(self, after: Sequence[Event]) -> int | None:
        lives = [each for each in after if each["what"] == "began" and each["life"] > 0]
        if not _is_right(after, max((each["life"] for each in lives), default=0)):
            return None
        if lives:
            return self._done_again([int(each["step"]) for each in lives])
        return len({each["step"] for each in after if each["what"] == "step" and each["skipped"]})

    def _done_again(self, begins: Sequence[int]) -> int:
        """How many steps were begun by the time of the fault and are done again by ranks that resume with these."""
        begun = self.fault.step + 1
        return max(0, begun - min(begins, default=begun))


def _is_right(after: Sequence[Event], life: int) -> bool:
    ends = [each for each in after if each["what"] == "ended" and each["life"] == life]
    return len(ends) == RANKS and _agree(ends)


def _agree(ends: Sequence[Event]) -> bool:
    """Whether ranks have come to the same parameters, all of them finite."""
    return all(each["finite"] for each in ends) and len({each["digest"] for each in ends}) == 1


class ElasticJudge(Judge):
    """Evaluates ranks that continue without the one with the fault, which may come back later or never."""

    def _went_on(self, after: Sequence[Event], at: float) -> float | None:
        """When all others had finished a step that began after the fault, with parameters that are right."""
        times = []
        for steps in self._of_others(after):
            place = self._first_of_their_own(steps)
            if len(steps) <= place:
                return None
            times.append(float(steps[place]["at"]))
        return self._in_time(max(times) - at) if self._are_right(after) else None

    def _first_of_their_own(self, steps: Sequence[Event]) -> int:
        """What was begun with the rank that is gone is done again; who failed with it was started again."""
        again = next((number for number, each in enumerate(steps) if each["life"]), None)
        if again is not None:
            return again
        return max((number + 1 for number, each in enumerate(steps) if each["skipped"]), default=UNDER_WAY)

    def _lost(self, after: Sequence[Event]) -> int | None:
        if not self._are_right(after):
            return None
        others = self._of_others(after)
        skipped = max(sum(bool(each["skipped"]) for each in steps) for steps in others)
        if not any(each["life"] for steps in others for each in steps):
            return skipped
        # Others failed, too: the first to be started again goes on from what was kept, and they take that over.
        begun = [each for each in after if each["what"] == "step" and each["life"] and not each["skipped"]]
        return max(skipped, self._done_again([int(each["step"]) - 1 for each in begun]))

    def _of_others(self, after: Sequence[Event]) -> list[list[Event]]:
        others = [rank for rank in range(RANKS) if rank != self.fault.victim]
        return [[each for each in after if each["what"] == "step" and each["rank"] == rank] for rank in others]

    def _are_right(self, after: Sequence[Event]) -> bool:
        """Whether all others came to the end, and all that ended with the same step have the same parameters."""
        ends = {each["rank"]: each for each in after if each["what"] == "ended"}
        others = [each for rank, each in ends.items() if rank != self.fault.victim]
        if len(others) < RANKS - 1:
            return False
        last = max(int(each["step"]) for each in others)
        compared = [each for each in ends.values() if each["step"] == last]
        return len(compared) >= RANKS - 1 and _agree(compared)
