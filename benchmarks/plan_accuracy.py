"""How well a plan that is calibrated on two ranks foretells three to eight, in a lab of hosts with shaped links.

    python benchmarks/plan_accuracy.py --out /tmp/plan_accuracy.jsonl
    python benchmarks/plan_accuracy.py --quick --minutes 5
    python benchmarks/plan_accuracy.py --scale 0.5 --rounds 2 --minutes 9 --out /tmp/plan_accuracy.jsonl

Layers are emulated: they sleep, so that a few cores hold eight ranks. Two ranks are measured at one rate; then 3, 4, 6
and 8 ranks at three rates, with two bucket sizes, each plain, with int8 and behind the next forward. Every case is
written down when it has been measured, and a run that is started again with the same --out goes on where it ended. A
block of cases that hangs or fails is given up after a bounded time, and the others go on. All of it takes 20 minutes;
with --scale 0.5 model, buckets and times are half as large, for cores that are calm. Needs root, for the lab.
"""

import argparse
import itertools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist
from interleave import interleave

from gradsync.errors import GradsyncError
from gradsync.lab import Lab, LabPlan, Rate
from gradsync.observe.plan.calibration import Calibration
from gradsync.observe.plan.planner import Setting, fit_own_seconds, predict
from gradsync.tools.bench.measure import Steady
from gradsync.tools.bench.peers import Gradsync
from gradsync.tools.bench.workload import EmulatedWorkload, optimizer_step
from gradsync.tools.calibration import CalibrationPlan, run_calibration
from gradsync.tools.lab.emulated import transformer
from gradsync.tools.lab.lab import fork_ranks

RANKS, RATES, BUCKETS_MB = (3, 4, 6, 8), ("50mbit", "100mbit", "200mbit"), (0.25, 1.0)
CALIBRATED_AT = "100mbit"
MODES = ("plain", "int8", "next-forward")
PARAMETERS, LAYERS, SECONDS = 1_200_000, 12, 0.4
# Steps in a row that are one sample, after one that is not counted; and how many samples.
IN_A_ROW, ROUNDS, QUICK_ROUNDS = 4, 4, 2
WARM_UP = 3
# A block of cases may take this many times as long as foretold, and some more.
PATIENCE, GRACE = 4.0, 60.0
LAB_NAME = "planacc"
MEDIAN_WANTED, P95_WANTED = 0.05, 0.10


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of the table."""

    ranks: int
    rate: str
    bucket_mb: float
    mode: str
    scale: float = 1.0

    @property
    def workload(self) -> EmulatedWorkload:
        """The same number of layers, with parameters and seconds scaled."""
        options = {"parameters": int(PARAMETERS * self.scale), "layers": LAYERS, "seconds": SECONDS * self.scale}
        return EmulatedWorkload(profile=transformer(**options))

    @property
    def setting(self) -> Setting:
        return Setting(
            ranks=self.ranks,
            bucket_mb=self.bucket_mb,
            overlap="next-forward" if self.mode == "next-forward" else "backward",
            reduction="int8" if self.mode == "int8" else "mean",
            rate=Rate.parse(self.rate).bytes_per_second,
        )

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.rate}, {self.bucket_mb:g} MB, {self.mode}"


# -- inside a rank ----------------------------------------------------------------------------------------------------


def variant(case: Case) -> Steady:
    workload = case.workload
    reduction = "int8" if case.mode == "int8" else None
    gathers = "next-forward" if case.mode == "next-forward" else None
    wrapped = workload.wrap(Gradsync(bucket_mb=case.bucket_mb, reduction=reduction, gathers=gathers))

    def step() -> None:
        wrapped.backward(workload.forward(wrapped.model))
        optimizer_step(wrapped)

    return Steady(step=step, flush=wrapped.flush, times=IN_A_ROW)


def measure_block(cases: Sequence[Case], rounds: int, path: Path) -> None:
    """The life of a rank: all cases in turns, over and over; rank 0 leaves the medians."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["GRADSYNC_TRANSPORT"] = "group"
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    variants = {str(case): variant(case) for case in cases}
    for each in variants.values():
        for _ in range(WARM_UP):
            each.step()
        each.flush()
    record = interleave(variants, warmup=0, rounds=rounds)
    if dist.get_rank() == 0:
        samples = {case: list(record.seconds(str(case)).values()) for case in cases}
        rows = [
            {**asdict(case), "seconds": statistics.median(taken), "samples": taken} for case, taken in samples.items()
        ]
        path.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


# -- outside ----------------------------------------------------------------------------------------------------------


def run_block(cases: Sequence[Case], rounds: int, timeout: float) -> list[dict[str, object]]:
    ranks, rate = cases[0].ranks, Rate.parse(cases[0].rate)
    with (
        tempfile.TemporaryDirectory(prefix="plan-accuracy-") as folder,
        Lab(LabPlan(name=LAB_NAME, hosts=ranks, rate=rate)) as lab,
    ):
        path = Path(folder) / "rows.json"
        fork_ranks(lab, partial(measure_block, cases, rounds, path), timeout=timeout)
        rows: list[dict[str, object]] = json.loads(path.read_text())
        return rows


def calibrate(path: Path, rounds: int, scale: float) -> Calibration:
    """On two ranks at one rate: transport, model and codings by themselves, then whole steps for what is between."""
    if path.exists():
        return Calibration.load(path)
    os.environ["GRADSYNC_TRANSPORT"] = "group"
    (cases,) = blocks([2], [CALIBRATED_AT], scale)
    calibration = run_calibration(CalibrationPlan(workload=cases[0].workload, rate=Rate.parse(CALIBRATED_AT), steps=15))
    rows = run_block(cases, rounds, timeout=300.0)
    whole = [(case_of(row).setting, float(str(row["seconds"]))) for row in rows]
    calibration = fit_own_seconds(calibration, whole)
    for row, (setting, seconds) in zip(rows, whole, strict=True):
        error = predict(calibration, setting).step / seconds - 1
        print(f"  {case_of(row)}: measured {seconds * 1e3:.1f} ms, foretold {error:+.1%}", flush=True)
    calibration.save(path)
    return calibration


def case_of(row: dict[str, object]) -> Case:
    return Case(
        ranks=int(str(row["ranks"])),
        rate=str(row["rate"]),
        bucket_mb=float(str(row["bucket_mb"])),
        mode=str(row["mode"]),
        scale=float(str(row["scale"])),
    )


def blocks(ranks: Sequence[int], rates: Sequence[str], scale: float) -> Iterator[list[Case]]:
    """Cases that are measured in turns, by the same ranks over the same links."""
    for number, rate in itertools.product(ranks, rates):
        yield [
            Case(ranks=number, rate=rate, bucket_mb=size * scale, mode=mode, scale=scale)
            for size in BUCKETS_MB
            for mode in MODES
        ]


def expected_seconds(calibration: Calibration, cases: Sequence[Case], rounds: int) -> float:
    return sum(predict(calibration, case.setting).step * (WARM_UP + rounds * (IN_A_ROW + 1)) for case in cases)


def show(calibration: Calibration, rows: Sequence[dict[str, object]]) -> int:
    """The table, and whether it is as good as wanted."""
    errors = []
    print(f"\n{'case':<42} {'measured':>10} {'foretold':>10} {'error':>8}")
    for row in rows:
        case, measured = case_of(row), float(str(row["seconds"]))
        foretold = predict(calibration, case.setting).step
        errors.append(abs(foretold / measured - 1))
        print(f"{case!s:<42} {measured * 1e3:>7.1f} ms {foretold * 1e3:>7.1f} ms {foretold / measured - 1:>+8.1%}")
    if not errors:
        print("no case was measured")
        return 1
    ordered = sorted(errors)
    median, high = statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    print(
        f"\n{len(errors)} cases: median error {median:.1%} (wanted {MEDIAN_WANTED:.0%}), 95th percentile {high:.1%} "
        f"(wanted {P95_WANTED:.0%})"
    )
    for mode in MODES:
        own = [error for row, error in zip(rows, errors, strict=True) if row["mode"] == mode]
        if own:
            print(f"  {mode:<14} median {statistics.median(own):.1%}, worst {max(own):.1%}")
    return 0 if median <= MEDIAN_WANTED and high <= P95_WANTED else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where cases are kept; a second run goes on from there")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no further block after so many")
    parser.add_argument("--quick", action="store_true", help="3 and 4 ranks, one rate, fewer rounds")
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--rates", nargs="+")
    parser.add_argument("--rounds", type=int, help="samples of each case")
    parser.add_argument("--scale", type=float, default=1.0, help="of the model, its buckets and its times")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plan-accuracy-") as folder:
        out = given.out or Path(folder) / "cases.jsonl"
        rounds = given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS)
        ranks = given.ranks or (RANKS[:2] if given.quick else RANKS)
        rates = given.rates or (RATES[1:2] if given.quick else RATES)
        return run(out, rounds, list(blocks(ranks, rates, given.scale)), time.monotonic() + 60 * given.minutes)


def warn_if_busy(most_ranks: int) -> None:
    """What shares cores with others, or with more ranks than there are, waits for them, and no plan foretells that."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if cores < most_ranks or load > cores / 2:
        words = f"{cores} cores for up to {most_ranks} ranks, at a load of {load:.1f}: what follows is wrong by what"
        print(f"{words} ranks wait for cores; that is most with int8, which needs them", file=sys.stderr)


def run(out: Path, rounds: int, wanted: Sequence[list[Case]], deadline: float) -> int:
    warn_if_busy(max((case.ranks for cases in wanted for case in cases), default=0))
    calibration = calibrate(out.with_suffix(".calibration.json"), rounds, wanted[0][0].scale)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {case_of(row) for row in rows}
    for cases in wanted:
        left = [case for case in cases if case not in known]
        if not left:
            continue
        expected = expected_seconds(calibration, left, rounds)
        if time.monotonic() + expected > deadline:
            print(f"no time is left for {left[0].ranks} ranks at {left[0].rate}, which take about {expected:.0f} s")
            continue
        print(f"{left[0].ranks} ranks, {left[0].rate}: about {expected:.0f} s", flush=True)
        try:
            measured = run_block(left, rounds, expected * PATIENCE + GRACE)
        except GradsyncError as error:
            print(f"  failed: {error}", file=sys.stderr)
            continue
        rows += measured
        with out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in measured)
    return show(calibration, rows)


if __name__ == "__main__":
    sys.exit(main())
