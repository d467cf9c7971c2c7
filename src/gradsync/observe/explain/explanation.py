"""An explanation: the split with bars, which rank waits for which, the buckets, and what to change, as text or HTML.

It is made from recordings, or by ``model.explain()`` from inside a training.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.communicator import Communicator
from gradsync.communicator.agreement import gather_bytes
from gradsync.communicator.logs import join_names
from gradsync.core.reduction.measurement import measure_link
from gradsync.observe.charts.canvas import PARTS
from gradsync.observe.charts.numbers import count, duration, saving, size
from gradsync.observe.charts.page import frame, heading, lines, strip, table
from gradsync.observe.explain.advice import WORTH_SAYING, Advice, advise
from gradsync.observe.explain.merging import MergedRecording, merge
from gradsync.observe.explain.split import PARTS as STEP_PARTS
from gradsync.observe.explain.split import SlowRank, Split, find_stragglers, missing_evidence
from gradsync.observe.explain.split import split as split_of
from gradsync.observe.recording.attach import align_clocks
from gradsync.observe.recording.files import Recording, lines_of, parse_recording
from gradsync.observe.recording.recorder import Recorder

__all__ = ["ADVICE_TITLE", "BAR", "NAMES", "Explanation", "bar", "explain_model", "explain_recordings", "gained"]

MEANINGS = {
    "data": "waiting for the data loader",
    "loop": "the loop's own code, until the forward",
    "forward": "computing the loss",
    "backward": "computing gradients",
    "waiting": "for the rank that came last",
    "turn": "busy with earlier buckets",
    "exposed": "of the last bucket, or of gathers",
    "optimizer": "updating parameters",
    "other": "clipping, evaluating, the engine",
}
NAMES = {"waiting": "waiting for a rank", "turn": "queued communication", "exposed": "exposed communication"}
HIDDEN_NAME = "hidden communication"
LABEL = max(map(len, NAMES.values()))
BAR = 20
SHOWN_BUCKETS = 12
BUCKET_COLUMNS = ("bucket", "bytes", "ready", "start", "link", "hidden", "parameters")
HIDDEN = "behind computing, not in the sum"
ADVICE_TITLE = "what to change, and what it would save for the samples of a step:"
# Waiting that is less of a step is not spoken of.
WORTH_A_LINE = 0.005
REMEDY = (
    "Models on the CPU are, unless GRADSYNC_RECORD is off; for one on an accelerator set GRADSYNC_RECORD to a folder, "
    "or pass observer=gradsync.observe.recording.Recorder()"
)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Where the time of a step went, and what to do about it. ``str()`` of it is made to be read."""

    timeline: MergedRecording
    split: Split
    stragglers: tuple[SlowRank, ...] = ()
    advice: tuple[Advice, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        """The explanation as HTML for a notebook, with bars in the colours of reports."""
        whole, rows, at = [], [], 0.0
        for name, share, (label, seconds, percent, meaning) in self.rows():
            piece = (PARTS[name], f"{label}: {percent}")
            whole.append((at, at + share, *piece))
            rows.append((label, seconds, percent, strip([(0.0, share, *piece)], width=160) if percent else "", meaning))
            at += share
        parts = [heading(self.headline), strip(whole), table(rows, right=(1, 2)), lines(self.who())]
        if self.split.buckets:
            parts.append(table(self.bucket_rows(), header=BUCKET_COLUMNS, right=range(6)))
        return frame(*parts, lines(self.advice_lines()))

    @property
    def headline(self) -> str:
        timeline, mean = self.timeline, self.split.mean
        header = timeline.recordings[0].header
        who = (
            f"{count(header.world_size, 'rank')} on {header.device.partition(':')[0]}"
            if timeline.is_whole
            else f"rank {timeline.members[0]} of {header.world_size} alone"
        )
        return (
            f"a step takes {duration(mean.step)}: {who}, mean of {count(len(timeline.steps), 'step')} of "
            f"{max(each.total for each in timeline.recordings):,}"
        )

    def lines(self) -> Iterator[str]:
        """The whole explanation as lines of plain text."""
        yield self.headline
        yield ""
        for _, share, (label, seconds, percent, meaning) in self.rows():
            shown = f"{percent:>6}  {bar(share):{BAR}}  " if percent else " "
            yield f"  {label:{LABEL}} {seconds:>8} {shown}{meaning}"
        yield ""
        yield from self.who()
        yield from self.bucket_lines()
        yield ""
        yield from self.advice_lines()

    def rows(self) -> Iterator[tuple[str, float, tuple[str, str, str, str]]]:
        """Each part of a step with its share of it, and what is written: its name, seconds, percent and meaning. Hidden
        communication comes last, without a share: it is not in the sum."""
        mean = self.split.mean
        for name, seconds in self.parts():
            share = seconds / mean.step if mean.step else 0.0
            yield name, share, (NAMES.get(name, name), duration(seconds), f"{share:.1%}", MEANINGS[name])
        yield "hidden", 0.0, (HIDDEN_NAME, duration(mean.hidden), "", HIDDEN)

    def parts(self) -> list[tuple[str, float]]:
        return [(name, getattr(self.split.mean, name)) for name in STEP_PARTS]

    def who(self) -> Iterator[str]:
        """Sentences on ranks, on collectives, and on what is not known."""
        split, timeline = self.split, self.timeline
        yield from map(str, self.stragglers)
        if not self.stragglers and split.mean.waiting > WORTH_A_LINE * split.mean.step:
            last = ", ".join(f"rank {rank} in {often:.0%}" for rank, often in sorted(split.was_last.items()))
            yield f"ranks wait {duration(split.mean.waiting)} of a step for each other; last came {last} of the steps"
        if len(timeline.members) > 1:
            for rank, parts in split.ranks.items():
                phases = ("data", "loop", "forward", "backward", "waiting", "optimizer")
                yield f"  rank {rank}: " + ", ".join(f"{name} {duration(getattr(parts, name))}" for name in phases)
        wasted = max(0.0, split.synchronizations - 1)
        yield (
            f"a step has {_plural(split.micro_batches, 'micro-batch', 'es')}, "
            + _plural(split.synchronizations, "synchronization")
            + (f" ({wasted:.3g} for nothing)" if wasted >= 0.5 else "")
            + f" and {_plural(split.collectives, 'collective')}"
        )
        if compiled := timeline.recordings[0].header.compiled:
            yield f"the model is compiled: {compiled}"
        if not timeline.is_whole:
            yield "what other ranks did is not in here: waiting for one of them counts as communication"
        unmeasured = [each.header.rank for each in timeline.recordings if each.header.clock.error is None]
        if unmeasured and len(timeline.members) > 1:
            yield "clocks were not measured: right if all ranks are on one machine, and else not to be trusted"
        errors = [each.header.clock.error or 0.0 for each in timeline.recordings]
        if max(errors) > 0:
            yield f"clocks agree to {duration(max(errors))}"
        unended = [each.header.rank for each in timeline.recordings if not each.ended]
        if unended:
            who = join_names([f"rank {rank}" for rank in unended])
            yield f"the recording of {who} has no end: the run goes on, or it was killed"

    def bucket_lines(self) -> Iterator[str]:
        """The table of buckets as text, a row per bucket."""
        if not self.split.buckets:
            return
        yield ""
        for index, nbytes, ready, start, link, hidden, names in (BUCKET_COLUMNS, *self.bucket_rows()):
            yield f"  {index:>6} {nbytes:>10} {ready:>9} {start:>9} {link:>9} {hidden:>9}  {names}"
        left = len(self.split.buckets) - SHOWN_BUCKETS
        if left > 0:
            yield f"  … and {left} more: those that keep the link busy longest are shown"

    def bucket_rows(self) -> Iterator[tuple[str, ...]]:
        """The rows of the table of buckets, under :data:`BUCKET_COLUMNS`."""
        longest = sorted(self.split.buckets, key=lambda bucket: bucket.seconds, reverse=True)[:SHOWN_BUCKETS]
        for bucket in (each for each in self.split.buckets if each in longest):
            times, names = (bucket.ready, bucket.start, bucket.seconds, bucket.hidden), bucket.parameters
            words = ", ".join(names) if len(names) < 3 else f"{names[0]} … {names[-1]} ({len(names)})"
            yield str(bucket.index), size(bucket.nbytes), *map(duration, times), words

    def advice_lines(self) -> Iterator[str]:
        if not self.advice:
            yield self.nothing
            return
        yield ADVICE_TITLE
        for number, advice in enumerate(self.advice, 1):
            yield f"  {number}. saves {gained(advice)}: {advice.cause}"
            yield f"     → {advice.change}"

    @property
    def nothing(self) -> str:
        """A sentence that says why there is no advice."""
        return (
            missing_evidence(self.timeline, self.split)
            or f"nothing stands out: no change that is known here would gain {WORTH_SAYING:.0%} of a step"
        )


def explain_recordings(recordings: Sequence[Recording]) -> Explanation:
    """Explain the recordings of all ranks, or of one alone."""
    timeline = merge(recordings)
    parts = split_of(timeline)
    stragglers = find_stragglers(timeline, parts)
    advice = tuple(advise(timeline, parts, stragglers))
    return Explanation(timeline=timeline, split=parts, stragglers=stragglers, advice=advice)


def explain_model(
    recorder: Recorder | None, communicator: Communicator, device: torch.device, *, all_ranks: bool
) -> Explanation:
    """What the recorder of a model on ``device`` knows; with ``all_ranks`` what all of them know, on all of them.
    Collective then."""
    recording = None if recorder is None else recorder.recording
    if not all_ranks:
        if recording is None:
            raise MisuseError(f"this model is not recorded. {REMEDY}")
        return explain_recordings([replace(recording, ended=True)])
    clock = align_clocks(communicator)
    if communicator.world_size > 1:
        # Where sizes of buckets were chosen nobody has measured it, and what bytes cost cannot be told from buckets.
        measure_link(communicator, device)
    if recorder is not None and recording is not None:
        recorder.align(clock)
        recording = recorder.recording
    # It has no end yet, which means nothing for a rank that answers.
    recording = None if recording is None else replace(recording, ended=True)
    mine = "" if recording is None else "\n".join(lines_of(recording))
    texts = [each.decode() for each in gather_bytes(communicator, mine.encode())]
    unrecorded = [rank for rank, text in enumerate(texts) if not text]
    if unrecorded:
        # On all ranks alike.
        raise ConfigurationError(f"rank {unrecorded[0]} is not recorded. {REMEDY}")
    return explain_recordings([parse_recording(text, f"rank {rank}") for rank, text in enumerate(texts)])


def gained(advice: Advice) -> str:
    """The gain of an advice, in the unit of all advice."""
    return saving(advice.saved, advice.gain)


def _plural(number: float, noun: str, ending: str = "s") -> str:
    """A mean with its noun: 1 collective, 2.5 collectives."""
    words = f"{number:.3g}"
    return f"{words} {noun}{'' if words == '1' else ending}"


def bar(share: float) -> str:
    """A bar of characters, drawn in eighths of one, so that a percent is seen."""
    eighths = round(min(max(share, 0.0), 1.0) * BAR * 8)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
