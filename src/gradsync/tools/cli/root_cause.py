"""Which rank failed first, and what is said of it and of the others, once all of them have ended."""

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradsync.tools.cli.failure_message import WRONG_USE, LastWords
from gradsync.tools.launch import Failure, RankPlace

__all__ = ["FailureReport"]

LETTERS_A_LINE = 260
# So many letters in common are the same error.
REPEATED = 60
# By which the launcher ends ranks.
ENDING = (-signal.SIGTERM, -signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """Why a run failed. ``early`` are the ranks that had failed before the others were asked to end, which was
    ``told_at`` that time of day; ``failures`` are all of them. ``signals`` have come before any had: then ranks do no
    more than obey."""

    early: Sequence[Failure]
    failures: Sequence[Failure]
    words: Mapping[int, LastWords]
    signals: Sequence[signal.Signals] = ()
    told_at: float = math.inf

    @property
    def failed(self) -> list[Failure]:
        """The ranks that failed, each with the exit code that it had decided on. One that was on its way out when the
        launcher ended it, or when its interpreter crashed at the end, keeps that code."""
        return [failure for failure in map(self._as_decided, self.failures) if failure.code]

    def _as_decided(self, failure: Failure) -> Failure:
        words = self.words.get(failure.place.rank)
        if words is None or failure.code >= 0:
            return failure
        was_told = failure.code in ENDING and not self._is_early(failure) and not self.signals
        return replace(failure, code=words.code) if words.code or was_told else failure

    @property
    def has_cause(self) -> bool:
        """Whether a rank has failed that did not only lose another one."""
        told = [self.words.get(failure.place.rank) for failure in self.failures]
        return any(words is None for words in told) or any(map(_is_cause, self.words.values()))

    @property
    def first(self) -> Failure:
        """The rank that failed first, of those that did not fail because of another one, nor because they were told to
        end. See [Note: who was first]."""
        failed = self.failed
        first = min(failed, key=self._order)
        words = self.words.get(first.place.rank)
        silent = [each for each in failed if each.place.rank not in self.words and self._is_early(each)]
        before = [each for each in silent if words is not None and each.place.rank in words.gone]
        return first if self._is_refusal(first) else min(before, key=self._order, default=first)

    def _order(self, failure: Failure) -> tuple[int, float, int]:
        rank = failure.place.rank
        words = self.words.get(rank)
        if any(map(failure.obeys, self.signals)):
            return (3, rank, 0)
        if self._is_refusal(failure):
            # All have agreed on it, and know the reason.
            return (0, rank, 0)
        if words is not None and words.code and words.at < self.told_at:
            return (1 if words.is_consequence else 0, words.at, 0)
        # Of those that were seen to end at once: a lost peer makes others abort or exit, and kills nobody.
        kind = 2 if failure.code == -signal.SIGABRT else int(failure.code > 0)
        return (0, failure.at, kind) if self._is_early(failure) else (2, rank, 0)

    def _is_early(self, failure: Failure) -> bool:
        return any(each.place.rank == failure.place.rank for each in self.early)

    def _is_refusal(self, failure: Failure) -> bool:
        words = self.words.get(failure.place.rank)
        return failure.code == WRONG_USE and (words is None or not words.is_exit)

    @property
    def explanation(self) -> LastWords | None:
        """What the first rank has said of its failure."""
        words = self.words.get(self.first.place.rank)
        return words if words is not None and words.code else None

    def lines(self, places: Sequence[RankPlace]) -> list[str]:
        """What is said of the first one, if it has left words, and a line for each other rank, if one of them has."""
        first, own = self.first, self.explanation
        if any(map(first.obeys, self.signals)):
            return []
        left = [] if own is None else [place for place in places if self._left_before(place.rank, own)]
        lines = [f"{place} ended first, with exit code 0: {self._told_end(place)}" for place in left]
        if own is not None:
            lines.append(_told_then(first.place, own) if left else _told_first(first, own))
        # A refusal is the same everywhere.
        if self.words and not self._is_refusal(first):
            told = {first.place.rank, *(place.rank for place in left)}
            lines += [self._told_of(place, own) for place in places if place.rank not in told]
        return lines

    def _left_before(self, rank: int, own: LastWords) -> bool:
        """Whether a rank had ended with 0 when the first one failed, which only lost another rank."""
        words = self.words.get(rank)
        if not own.is_consequence or any(failure.place.rank == rank for failure in self.failed):
            return False
        had_ended = rank in own.gone or (words is not None and words.at < own.at)
        # Errors of torch do not name the rank.
        return had_ended and (bool(own.trace) or f"rank {rank} " in own.message)

    def _told_end(self, place: RankPlace) -> str:
        words = self.words.get(place.rank)
        return f"it {words.message}" if words is not None else "without a word of it"

    def _told_of(self, place: RankPlace, first: LastWords | None) -> str:
        words = self.words.get(place.rank)
        if words is not None and words.code:
            if first is not None and (words.kind, words.message) == (first.kind, first.message):
                return f"{place} failed in the same way, {max(0.0, words.at - first.at):.1f} s later"
            return _told_then(place, _without_what_is_above(replace(words, trace=""), first))
        failure = next((each for each in self.failed if each.place.rank == place.rank), None)
        if failure is None:
            return f"{place} had ended, without an error"
        if self._is_early(failure):
            return str(failure)
        return f"{place} was ended with the others"


def _without_what_is_above(words: LastWords, first: LastWords | None) -> LastWords:
    """Whoever lost a rank repeats its error, which has just been shown. Short ones may stand twice."""
    beginning = first.message[:REPEATED] if first is not None else ""
    known, found, _ = words.message.partition(beginning) if len(beginning) == REPEATED else (words.message, "", "")
    return replace(words, message=f"{known.rstrip(': ')}, as above") if known and found else words


def _is_cause(words: LastWords) -> bool:
    return bool(words.code) and not words.is_consequence


def _told_first(failure: Failure, words: LastWords) -> str:
    if words.is_exit:
        return f"{failure.place} failed first: it {words.message}"
    if words.is_printed:
        return f"{failure.place} failed first, with {words.kind}; its own message is above"
    if words.trace:
        return f"{failure.place} failed first:\n{words.trace.rstrip()}"
    return words.message if words.is_consequence or failure.code == WRONG_USE else f"{failure.place}: {words.message}"


def _told_then(place: RankPlace, words: LastWords) -> str:
    if words.trace and not words.is_printed:
        return f"{place} then failed:\n{words.trace.rstrip()}"
    message = words.message if len(words.message) <= LETTERS_A_LINE else f"{words.message[:LETTERS_A_LINE]}…"
    return f"{place} then {message}" if words.is_exit else f"{place} then raised {words.kind}: {message}"
