"""The folder a benchmark leaves behind: the request, the raw lines in their order, and the results.

========================  ==========================================================================================
``config.json``           command, seeds, machine, versions, commit
``SCENARIO.jsonl``        raw lines, appended while the ranks run: a run that is killed keeps what it measured
``SCENARIO.json``         tables and sentences computed from the raw lines
``figures/``              the pictures, as SVG and PNG
``report.html``           all of it on one page
========================  ==========================================================================================

Every raw line is a JSON object with a ``kind``:

- ``cell``: a run of ranks begins; the fields of :class:`Cell`. In the place of an earlier one with its name, if any
- ``resumed``: the cell with this ``name`` goes on
- ``sample``: one variant in one round: ``seconds`` (the slowest rank's), ``ranks`` (everyone's), ``sent`` (bytes that
  left the busiest interface; on loopback those of all ranks together), ``parts`` (seconds of parts of the step)
- ``fact``: something known of the cell: ``name`` and ``value``
- ``absent``: a ``variant`` that could not run, and the ``reason``
- ``done``, ``failed``, ``skipped``: how the cell ended, and the ``reason``

Everything else belongs to the cell before it.

Samples of variants that ran in the same rounds are compared round by round: whatever disturbed the machine in a round
disturbed both.
"""

import dataclasses
import json
import os
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from gradsync.base.errors import ConfigurationError, GradsyncError
from gradsync.base.files import whole_file
from gradsync.tools.lab.lab import Rate

__all__ = [
    "DONE",
    "EVERY",
    "INTERRUPTED",
    "LIMITS",
    "RESAMPLING_SEED",
    "Cell",
    "CellRecord",
    "ResultFolder",
    "RowFile",
    "Sample",
    "percent",
    "quantiles",
    "ratio",
    "read_records",
    "ring_bytes",
    "summarize",
]

RESAMPLES = 1000
RESAMPLING_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The samples of one variant: the median, and the range of nine in ten of them."""

    median: float
    p5: float
    p95: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median of per-round ratios, with the 95 % interval of that median under resampling of the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def quantiles(values: Sequence[float], *shares: float) -> list[float]:
    """The values below which these shares of the values lie, interpolated between neighbours."""
    places = torch.tensor(shares, dtype=torch.float64)
    found: list[float] = torch.quantile(torch.tensor(values, dtype=torch.float64), places).tolist()
    return found


def summarize(values: Sequence[float]) -> Summary:
    p5, p95 = quantiles(values, 0.05, 0.95)
    return Summary(median=statistics.median(values), p5=p5, p95=p95, count=len(values))


def ratio(times: Mapping[int, float], baseline: Mapping[int, float]) -> Ratio:
    """``times`` over ``baseline`` in the rounds that have both; keys are the numbers of the rounds."""
    common = sorted(times.keys() & baseline.keys())
    if not common:
        raise ConfigurationError("a ratio needs at least one round in which both variants ran, got none")
    ratios = [times[number] / baseline[number] for number in common]
    draw = random.Random(RESAMPLING_SEED)
    medians = [statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)]
    middle = statistics.median(ratios)
    low, high = quantiles(medians, 0.025, 0.975)
    # With few rounds the resampled medians may all lie on one side.
    return Ratio(median=middle, low=min(low, middle), high=max(high, middle))


def ring_bytes(size: int, ranks: int) -> float:
    """Bytes every rank must send, at least, to all-reduce ``size`` bytes."""
    return 2 * (ranks - 1) / ranks * size


# A fact: the variant that only computes, and the seconds of communication by variant.
LIMITS, EVERY = "limits", "*"
DONE, INTERRUPTED = "done", "interrupted"
CONFIG, FIGURES, RAW, RESULT = "config.json", "figures", ".jsonl", ".json"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of ranks: where they run, how often, and what the scenario needs to know besides.

    Without ``hosts`` the ranks talk over loopback. ``seconds`` is about how long it takes, for the time left on the
    screen. ``options`` hold only what JSON can. A sample is the mean of ``block`` steps in a row. ``sharing`` says how
    ranks on the ``device`` "cuda" have their GPUs.
    """

    name: str
    ranks: int = 2
    hosts: int | None = None
    rate: str | None = None
    # Seconds from one host to another.
    delay: float = 0.0
    warmup: int = 5
    rounds: int = 30
    seconds: float = 60.0
    emulated: bool = True
    device: str = "cpu"
    sharing: str = ""
    block: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def transport(self) -> str:
        """What carries gradients between the ranks, where gradsync does not choose by itself."""
        return "Gloo" if self.device == "cpu" else "NCCL"

    @property
    def ranks_per_host(self) -> int:
        return self.ranks // (self.hosts or 1)

    @property
    def bytes_per_second(self) -> float | None:
        """The bytes per second of a link; None if nothing limits it."""
        return None if self.rate is None else Rate.parse(self.rate).bytes_per_second

    def transfer_seconds(self, nbytes: int, *, senders: int | None = None) -> float:
        """What averaging these bytes takes on links that are always full, between all ranks or ``senders`` of them.

        Without a rate the links are no limit.
        """
        rate = self.bytes_per_second
        return 0.0 if rate is None else ring_bytes(nbytes, senders or self.ranks) / rate


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One variant in one round; in a rank, or as all ranks took it."""

    seconds: float
    sent: int
    parts: Mapping[str, float]


@dataclass(kw_only=True)
class CellRecord:
    """The record of a cell: its samples by variant and round, in the order in which variants arrived."""

    cell: Cell
    samples: dict[str, dict[int, Sample]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    outcome: str = INTERRUPTED
    reason: str = ""

    @property
    def rounds(self) -> int:
        return max((len(samples) for samples in self.samples.values()), default=0)

    def seconds(self, variant: str) -> dict[int, float]:
        return {number: sample.seconds for number, sample in self.samples[variant].items()}

    def summary(self, variant: str) -> Summary:
        return summarize(list(self.seconds(variant).values()))

    def ms(self, variant: str) -> float:
        """The median in milliseconds."""
        return self.summary(variant).median * 1e3

    def ratio(self, variant: str, baseline: str) -> Ratio:
        return ratio(self.seconds(variant), self.seconds(baseline))

    def times(self, variant: str, baseline: str) -> float | None:
        """How many times as long as the baseline it takes; None where one of them did not run."""
        known = variant in self.samples and baseline in self.samples
        return self.ratio(variant, baseline).median if known else None

    def sent(self, variant: str) -> float:
        """The median of the bytes that a step sent."""
        return statistics.median(sample.sent for sample in self.samples[variant].values())

    def part(self, variant: str, name: str) -> float:
        """Median seconds of a part of the step; 0 where it was not recorded."""
        return statistics.median(sample.parts.get(name, 0.0) for sample in self.samples[variant].values())

    def limit(self, variant: str) -> float | None:
        """What no step of this variant can beat: its computation, or its bytes over the rate, whichever is longer.

        None where the scenario has not said what computes and what is sent.
        """
        bounds = self.facts.get(LIMITS)
        if bounds is None or bounds["compute"] not in self.samples:
            return None
        sent = {} if variant == bounds["compute"] else bounds["wire"]
        return max(self.summary(bounds["compute"]).median, float(sent.get(variant, sent.get(EVERY, 0.0))))


class RowFile:
    """Raw lines of one scenario. Opened once, written to by each process that inherits it: lines are appended whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._drop_half_a_line()

    def _drop_half_a_line(self) -> None:
        """Drop half a line that a full disk or a stopped machine has left: what follows would be one line with it."""
        written = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        os.truncate(self._descriptor, written.rfind(b"\n") + 1)

    def write(self, kind: str, **content: Any) -> None:
        line = json.dumps({"kind": kind, **content}, allow_nan=False) + "\n"
        os.write(self._descriptor, line.encode())

    def cell(self, cell: Cell) -> None:
        self.write("cell", **dataclasses.asdict(cell))

    def resume(self, cell: Cell) -> None:
        self.write("resumed", name=cell.name)

    def known(self, cell: Cell) -> CellRecord:
        """What was written of the cell up to now."""
        return next(record for record in read_records(self.path) if record.cell.name == cell.name)

    def fact(self, name: str, value: Any) -> None:
        self.write("fact", name=name, value=value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._descriptor)


def read_records(path: Path) -> list[CellRecord]:
    """The cells of a raw file. A line that was cut off by the end of the run is left out."""
    records: dict[str, CellRecord] = {}
    current: CellRecord | None = None
    for row in _rows(path):
        kind = row.pop("kind")
        if kind == "cell":
            current = records[row["name"]] = CellRecord(cell=Cell(**row))
        elif kind == "resumed":
            current = records[row["name"]]
            current.outcome = INTERRUPTED
        elif current is not None:
            _add(current, kind, row)
    return list(records.values())


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise ConfigurationError(
                f"line {number} of {path} is no JSON, though lines follow it. Restore the file, or delete the line"
            ) from error


def _add(record: CellRecord, kind: str, row: dict[str, Any]) -> None:
    if kind == "sample":
        sample = Sample(seconds=row["seconds"], sent=row["sent"], parts=row.get("parts", {}))
        record.samples.setdefault(row["variant"], {})[row["round"]] = sample
    elif kind == "fact":
        record.facts[row["name"]] = row["value"]
    elif kind == "absent":
        record.absent[row["variant"]] = row["reason"]
    else:
        record.outcome, record.reason = kind, row.get("reason", "")


class ResultFolder:
    """The files of one benchmark. ``create`` makes it, ``open`` finds it again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> "ResultFolder":
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise ConfigurationError(
                    f"results need a folder that is new or empty, but {path} holds something. Choose another --out"
                )
            (path / FIGURES).mkdir()
        except OSError as error:
            raise ConfigurationError(f"results cannot be written to {path}: {error.strerror}. Choose --out") from error
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "ResultFolder":
        if not (path / CONFIG).is_file():
            raise ConfigurationError(f"expected the folder of a benchmark, with a {CONFIG}, but {path} has none")
        return cls(path)

    @property
    def figures(self) -> Path:
        folder = self.path / FIGURES
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.path / CONFIG).read_text())
        return config

    def write_config(self, config: Mapping[str, Any]) -> None:
        self._write(self.path / CONFIG, config)

    def rows(self, scenario: str) -> RowFile:
        return RowFile(self.path / f"{scenario}{RAW}")

    def records(self, scenario: str) -> list[CellRecord]:
        path = self.path / f"{scenario}{RAW}"
        return read_records(path) if path.exists() else []

    def write_result(self, scenario: str, result: Mapping[str, Any]) -> None:
        self._write(self.path / f"{scenario}{RESULT}", result)

    def _write(self, path: Path, content: Mapping[str, Any]) -> None:
        try:
            with whole_file(path) as file:
                file.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
        except OSError as error:
            raise GradsyncError(
                f"{path.name} cannot be written: {error.strerror}. Make room, or choose --out"
            ) from error
