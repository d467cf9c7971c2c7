"""Inside a rank: times variants of a step in interleaved rounds, with their bytes.

Every round runs each variant once, in an order that changes from round to round and is the same on all ranks. A step is
timed between two points at which all ranks synchronize, on a separate group: what the variants send does not interfere
with it. A step ends when the device has finished it. A cell may time blocks of several steps together, as on GPUs:
nothing is waited for between the steps of a block. The slowest rank's time counts. The bytes are those of the
interface's counters between the two points; the second synchronization itself is among them (some hundred bytes), and
nothing is subtracted.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator, InProcessWorld, ProcessGroupCommunicator
from gradsync.communicator.agreement import gather_bytes
from gradsync.tools.bench.device import CPU, Device
from gradsync.tools.bench.record import LIMITS, Cell, RowFile, Sample

__all__ = ["CellRounds", "LateParts", "Parts", "Progress", "Steady", "Step"]

Parts = Mapping[str, float]
# Tells the seconds of parts of a step, once the device is done with it.
LateParts = Callable[[], Parts]
# Runs one step, and may return the seconds of parts of it.
Step = Callable[[], Parts | LateParts | None]


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Several steps in a row as one :data:`Step`, for what goes on from one into the next.

    ``step`` is run once before the clock starts, and ``flush`` after it has stopped; the time is that of one step.
    """

    step: Step
    flush: Callable[[], object]
    times: int

    def __call__(self) -> None:
        for _ in range(self.times):
            self.step()


# Reads how many bytes have left the interface.
Meter = Callable[[], int]
# Is returned on rank 0, between rounds, how many of how many are done.
Progress = Callable[[int, int], object]

ORDER_SEED = 0
# How many of several settings are tried again before one is called the best.
FINALISTS = 2


class CellRounds:
    """What a scenario measures with, inside every rank of a cell."""

    def __init__(
        self,
        cell: Cell,
        rows: RowFile,
        *,
        progress: Progress = lambda done, total: None,
        meter: Meter = lambda: 0,
        device: Device = CPU,
    ) -> None:
        self.cell = cell
        self.device = device
        # A process may measure alone, without any group.
        self._control: Communicator = InProcessWorld(1).communicator(0)
        if dist.is_initialized():
            self._control = ProcessGroupCommunicator(dist.new_group(backend="gloo"))
        self.rank, self.world_size = self._control.rank, self._control.world_size
        self._rows = rows
        self._progress = progress
        self._meter = meter
        self._order = random.Random(ORDER_SEED)

    def fact(self, name: str, value: object) -> None:
        """Note something that a reader of the results has to know, as rank 0 sees it."""
        if self.rank == 0:
            self._rows.fact(name, value)

    def limits(self, *, compute: str, communication: Mapping[str, float]) -> None:
        """What bounds the variants: the one that only computes, and seconds of sending by variant, or as ``*``."""
        self.fact(LIMITS, {"compute": compute, "wire": dict(communication)})

    def absent(self, variant: str, reason: str) -> None:
        """A variant that does not run here."""
        if self.rank == 0:
            self._rows.write("absent", variant=variant, reason=reason)

    def run(self, variants: Mapping[str, Step]) -> None:
        """Run all rounds of the cell; the samples go to the raw file after each."""
        total = self.cell.warmup + self.cell.rounds
        for number in range(total):
            timings = self._round(variants)
            if self.rank == 0:
                if number >= self.cell.warmup:
                    self._write(number - self.cell.warmup, timings)
                self._progress(number + 1, total)

    def best(self, variants: Mapping[str, Step], *, warmup: int = 3, rounds: int = 5) -> str:
        """The fastest of some settings, from rounds that are not recorded; the same answer on all ranks.

        A few rounds with all of them tell the two fastest, and twice as many tell which of these it is.
        """
        if not variants:
            raise ConfigurationError("the best of no variants was asked for; give at least one")
        # A block has several steps.
        warmup, rounds = (-(-count // self.cell.block) for count in (warmup, rounds))
        for _ in range(warmup):
            self._round(variants)
        seconds: dict[str, list[float]] = {name: [] for name in variants}

        def fastest_first(names: Iterable[str], rounds: int) -> list[str]:
            tried = {name: variants[name] for name in names}
            for _ in range(rounds):
                for name, ranks in self._round(tried).items():
                    seconds[name].append(max(timing.seconds for timing in ranks))
            return sorted(tried, key=lambda name: statistics.median(seconds[name]))

        finalists = fastest_first(variants, rounds)[:FINALISTS]
        return fastest_first(finalists, 2 * rounds)[0] if len(finalists) > 1 else finalists[0]

    def _round(self, variants: Mapping[str, Step]) -> dict[str, list[Sample]]:
        own = {name: self._time(variants[name]) for name in self._order.sample(list(variants), len(variants))}
        return self._share({name: own[name] for name in variants})

    def mean(self, value: float) -> float:
        """The mean of the values of all ranks. Collective."""
        return statistics.fmean(json.loads(each) for each in gather_bytes(self._control, json.dumps(value).encode()))

    def _time(self, step: Step) -> Sample:
        self.device.finish()
        self.meet()
        steady = step if isinstance(step, Steady) else None
        before = self._meter()
        if steady is not None:
            steady.step()
        began = time.perf_counter()
        returned = [step() for _ in range(self.cell.block)]
        self.device.finish()
        seconds = time.perf_counter() - began
        if steady is not None:
            steady.flush()
        # A rank that is done first would otherwise miss what still passes through its interface.
        self.meet()
        times = self.cell.block * (1 if steady is None else steady.times)
        # Bytes of all steps: what the one before the clock left under way is among them.
        steps = times if steady is None else times + 1
        return Sample(seconds=seconds / times, sent=(self._meter() - before) // steps, parts=_mean_parts(returned))

    def meet(self) -> None:
        """Wait for all ranks, on a group that no variant uses."""
        if isinstance(self._control, ProcessGroupCommunicator):
            dist.barrier(group=self._control.group)

    def _share(self, own: Mapping[str, Sample]) -> dict[str, list[Sample]]:
        """Every rank's timings of a round, by variant."""
        text = json.dumps({name: asdict(timing) for name, timing in own.items()})
        everybody = [json.loads(answer) for answer in gather_bytes(self._control, text.encode())]
        return {name: [Sample(**rank[name]) for rank in everybody] for name in own}

    def _write(self, number: int, timings: Mapping[str, Sequence[Sample]]) -> None:
        for name, ranks in timings.items():
            slowest = max(ranks, key=lambda timing: timing.seconds)
            everyone = {"ranks": [timing.seconds for timing in ranks], "sent": max(timing.sent for timing in ranks)}
            self._rows.write("sample", variant=name, round=number, **asdict(slowest) | everyone)


def _mean_parts(returned: Sequence[Parts | LateParts | None]) -> Parts:
    """The mean of the parts over the steps of a block."""
    known = [each() if callable(each) else each for each in returned if each is not None]
    return {name: statistics.fmean(each[name] for each in known) for name in (known[0] if known else {})}
