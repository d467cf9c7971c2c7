"""Recordings of chosen times: ranks that compute, start buckets and wait, over a link of known speed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradsync.observe.recording import (
    BucketPart,
    Clock,
    Header,
    RecordedBucket,
    Recording,
    Span,
    Step,
    Synchronization,
)
from gradsync.observe.recording.files import file_name, lines_of, write_lines


@dataclass(kw_only=True)
class Loop:
    """What one rank does in a step, in seconds."""

    data: float = 0.001
    loop: float = 0.0
    forward: float = 0.010
    backward: float = 0.020
    optimizer: float = 0.002
    other: float = 0.0005


@dataclass(kw_only=True)
class World:
    """Ranks on one wire. ``buckets`` are bytes, of ``parameters`` of one size each; each keeps the wire busy for
    ``latency + bytes · per_byte``. ``host`` are seconds between full and started, and ``busy`` the share of a backward
    in which its thread was on a core."""

    ranks: Sequence[Loop]
    buckets: Sequence[int] = (1 << 20,) * 4
    latency: float = 0.0002
    per_byte: float = 1e-9
    parameters: int = 1
    host: float = 0.0
    busy: float | None = None
    micro_batches: int = 1
    synchronizations: int = 1
    steps: int = 20
    offsets: Sequence[float] = ()
    errors: Sequence[float | None] = ()
    _at: list[float] = field(default_factory=list)

    def record(self) -> list[Recording]:
        size = len(self.ranks)
        self._at = [100.0] * size
        steps: list[list[Step]] = [[] for _ in range(size)]
        for number in range(self.steps):
            for rank, step in enumerate(self._step(number)):
                steps[rank].append(step)
        layout = tuple(
            BucketPart(nbytes=nbytes, parameters=self._names(number)) for number, nbytes in enumerate(self.buckets)
        )
        return [
            Recording(
                header=Header(
                    rank=rank,
                    world_size=size,
                    optimizer="AdamW",
                    parameters={
                        name: nbytes // self.parameters
                        for number, nbytes in enumerate(self.buckets)
                        for name in self._names(number)
                    },
                    caps=(max(self.buckets, default=0),),
                    caps_chosen=True,
                    clock=Clock(
                        offset=-self.offsets[rank] if self.offsets else 0.0,
                        error=self.errors[rank] if self.errors else 0.0,
                    ),
                ),
                layouts=(layout,),
                steps=tuple(step.shifted(self.offsets[rank] if self.offsets else 0.0) for step in steps[rank]),
                total=self.steps,
                ended=True,
            )
            for rank in range(size)
        ]

    def _names(self, number: int) -> tuple[str, ...]:
        if self.parameters == 1:
            return (f"layer{number}.weight",)
        return tuple(f"layer{number}.{place}.weight" for place in range(self.parameters))

    def _step(self, number: int) -> list[Step]:
        size = len(self.ranks)
        begins, spans = list(self._at), [[] for _ in range(size)]
        parts: list[list[Synchronization]] = [[] for _ in range(size)]

        def do(rank: int, name: str, seconds: float) -> None:
            if seconds > 0:
                spans[rank].append(Span(name=name, begin=self._at[rank], end=self._at[rank] + seconds))
                self._at[rank] += seconds

        for batch in range(self.micro_batches):
            for rank, loop in enumerate(self.ranks):
                do(rank, "loop", loop.loop)
                do(rank, "data", loop.data)
                do(rank, "forward", loop.forward)
            backwards = list(self._at)
            for rank, loop in enumerate(self.ranks):
                do(rank, "backward", loop.backward)
            if batch >= self.micro_batches - self.synchronizations:
                for rank, part in enumerate(self._synchronize(backwards)):
                    parts[rank].append(part)
                    do(rank, "synchronization", part.finished - self._at[rank])
        for rank, loop in enumerate(self.ranks):
            do(rank, "other", loop.other)
            do(rank, "optimizer", loop.optimizer)
        return [
            Step(
                number=number,
                layout=0,
                begin=begins[rank],
                end=self._at[rank],
                micro_batches=self.micro_batches,
                spans=tuple(spans[rank]),
                synchronizations=tuple(parts[rank]),
            )
            for rank in range(size)
        ]

    def _synchronize(self, backwards: Sequence[float]) -> list[Synchronization]:
        """Bucket k of n is ready when k/n of the backward has run; the last one starts when it has ended."""
        count, free = len(self.buckets), 0.0
        times: list[list[RecordedBucket]] = [[] for _ in self.ranks]
        for index, nbytes in enumerate(self.buckets):
            starts = [
                begin + loop.backward * (index + 1) / count for begin, loop in zip(backwards, self.ranks, strict=True)
            ]
            free = max(free, *starts) + self.latency + nbytes * self.per_byte
            for rank, start in enumerate(starts):
                times[rank].append(
                    RecordedBucket(
                        index=index,
                        full=start - self.host,
                        ready=start - self.host / 2,
                        start=start,
                        reduced=free,
                        finish=free,
                    )
                )
        return [
            Synchronization(
                begin=backwards[rank],
                backward_end=backwards[rank] + loop.backward,
                finished=max(free, backwards[rank] + loop.backward),
                buckets=tuple(times[rank]),
                busy=None if self.busy is None else self.busy * loop.backward,
            )
            for rank, loop in enumerate(self.ranks)
        ]


def write_all(folder: Path, recordings: Sequence[Recording]) -> None:
    """To files, as the ranks would."""
    folder.mkdir(exist_ok=True)
    for each in recordings:
        write_lines(folder / file_name(each.header.rank, each.header.model), lines_of(each))
