"""The measure that counts: seconds until the loss is as low as after a given number of exact steps, over a slow link.

This is real training over a link that is really limited: the small GPT of ``gradsync train``, on Python's standard
library. Fewer bytes make steps shorter, and may make more of them necessary; this shows both at once. Every way of
synchronizing starts from the same weights and reads the same text. Rounds alternate between all of them, because
machine speed drifts; a round is some steps and, outside the times, the loss on text that no rank trains on. What
gradsync does in the first windows to find its settings is inside the times.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gradsync.observe.charts.canvas import INK, canvas, colour, legend
from gradsync.observe.charts.kinds import Series, draw_curves
from gradsync.tools.bench.measure import Parts, Rounds, Step
from gradsync.tools.bench.measured import MeasuredScenario
from gradsync.tools.bench.peers import OURS, Gradsync, GradsyncLocal, OuterSGD, Peer
from gradsync.tools.bench.record import Cell, CellRecord, Sample
from gradsync.tools.bench.scenario import Picture, Table, spread
from gradsync.tools.bench.text import SYMBOLS, read_symbols
from gradsync.tools.bench.torchft_peer import TorchFT
from gradsync.tools.bench.windows import optimizer_step
from gradsync.tools.llm.model import build_model

__all__ = ["TimeToLoss"]

LOCAL_STEPS = 16
EXACT, LOW_RANK, LOCAL = "float32", "low-rank:4", f"local:{LOCAL_STEPS}"
DILOCO, TORCHFT = f"DiLoCo:{LOCAL_STEPS}", f"torchft DiLoCo:{LOCAL_STEPS}"
COLOURS = {
    EXACT: INK,
    "bf16": colour("sky"),
    "int8": colour("blue"),
    "int4": colour("green"),
    LOW_RANK: colour("vermillion"),
    LOCAL: colour("pink"),
    DILOCO: colour("orange"),
    TORCHFT: colour("dark-grey"),
}
# What needs more steps than others, and takes less time for each, gets more of them in a round.
MORE_STEPS = dict.fromkeys((LOW_RANK, LOCAL, DILOCO, TORCHFT), 2)

MODEL, LENGTH = "tiny", 64
LEARNING_RATE = 2e-3
STEPS_A_ROUND = 25
# The steps that set the target, and how many more others may take for it.
TARGET_STEPS, MORE = 500, 1.2
# Points of a curve that count together.
SMOOTHED = 3
TEXT_BYTES, HELD_OUT_SEQUENCES = 1_000_000, 64


def variant_name(reduction: str, seed: int) -> str:
    return f"{reduction} · seed {seed}"


def steps_a_round(reduction: str) -> int:
    return STEPS_A_ROUND * MORE_STEPS.get(reduction, 1)


class TimeToLoss(MeasuredScenario):
    """Seconds and steps to the loss that exact steps reach, by what is sent."""

    name = "time-to-loss"
    title = "Time to a loss, over a slow link"
    source = "After Agarwal et al., On the Utility of Gradient Compression in Distributed Training Systems, MLSys 2022."
    question = "Does training get anywhere sooner if less is sent, and how much?"

    def cells(self, *, quick: bool) -> list[Cell]:
        target, seeds = (100, 1) if quick else (TARGET_STEPS, 3)
        rounds = round(target * MORE / STEPS_A_ROUND)
        return [
            Cell(
                name="small GPT, 2 hosts, 100 Mbit/s",
                hosts=2,
                rate="100mbit",
                warmup=0,
                rounds=rounds,
                seconds=rounds * seeds * STEPS_A_ROUND * len(COLOURS) * 0.09,
                emulated=False,
                options={"seeds": seeds, "target": target, "batch": 4},
            )
        ]

    def measure(self, rounds: Rounds) -> None:
        options = rounds.cell.options
        symbols = read_symbols(TEXT_BYTES)
        variants: dict[str, Step] = {}
        for reduction in COLOURS:
            peer = _peer(reduction)
            reason = peer.absent()
            for seed in range(options["seeds"]):
                if reason is not None:
                    rounds.absent(variant_name(reduction, seed), reason)
                    continue
                training = Training(peer, symbols, seed, options["batch"])
                variants[variant_name(reduction, seed)] = partial(training.run, steps_a_round(reduction))
                rounds.fact("gradient bytes", training.nbytes)
        rounds.run(variants)

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        return [_table(Curves(record)) for record in records]

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        return [_picture(Curves(record), place) for place, record in enumerate(records)]

    def reading(self, records: Sequence[CellRecord]) -> str:
        return " ".join(_sentence(Curves(record)) for record in records)


class Training:
    """One way of synchronizing, from one seed."""

    def __init__(self, peer: Peer, symbols: Tensor, seed: int, batch: int) -> None:
        cut = len(symbols) * 9 // 10
        self._symbols, self._batch = symbols[:cut], batch
        self._held_out = _sequences(symbols[cut:], HELD_OUT_SEQUENCES, torch.Generator().manual_seed(1234))
        self._generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self._model = build_model(MODEL, vocab_size=SYMBOLS, sequence_length=LENGTH)
        make = partial(torch.optim.AdamW, lr=LEARNING_RATE, foreach=True)
        self._wrapped = peer.wrap(self._model, make)

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def run(self, steps: int) -> Parts:
        """The steps of a round, and the loss they lead to on this rank."""
        began = time.perf_counter()
        for _ in range(steps):
            self._wrapped.backward(self._loss(self._own()))
            optimizer_step(self._wrapped)
        seconds = time.perf_counter() - began
        with torch.no_grad():
            return {"training": seconds, "loss": float(_loss_of(self._model(self._held_out[:, :-1]), self._held_out))}

    def _own(self) -> Tensor:
        """Everyone draws all sequences and takes its own, so that what is read depends on the seed alone."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return _sequences(self._symbols, self._batch * ranks, self._generator)[rank::ranks]

    def _loss(self, sequences: Tensor) -> Tensor:
        return _loss_of(self._wrapped.model(sequences[:, :-1]), sequences)


def _peer(reduction: str) -> Peer:
    if reduction == LOCAL:
        return GradsyncLocal(every=LOCAL_STEPS)
    if reduction == DILOCO:
        return GradsyncLocal(every=LOCAL_STEPS, outer=OuterSGD)
    if reduction == TORCHFT:
        return TorchFT(every=LOCAL_STEPS)
    return Gradsync(name=f"{OURS} {reduction}", reduction=None if reduction == EXACT else reduction)


def _sequences(symbols: Tensor, count: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(symbols) - LENGTH, (count, 1), generator=generator)
    return symbols[starts + torch.arange(LENGTH + 1)]


def _loss_of(logits: Tensor, sequences: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


# -- what came of it --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reached:
    """The target, by one way and seed: after so many steps and seconds."""

    steps: float
    seconds: float


class Curves:
    """A cell by reduction and seed: the losses, and the seconds, after every round."""

    def __init__(self, record: CellRecord) -> None:
        self.record = record
        self.target_steps = int(record.cell.options["target"])
        self.seeds = range(int(record.cell.options["seeds"]))

    @cached_property
    def reductions(self) -> list[str]:
        """Those that have run with every seed."""
        samples = self.record.samples
        return [name for name in COLOURS if all(variant_name(name, seed) in samples for seed in self.seeds)]

    def losses(self, reduction: str, seed: int) -> list[float]:
        """After every round, the mean of the last few: single ones go up and down by as much as they fall in one."""
        losses = [sample.parts["loss"] for sample in self._samples(reduction, seed)]
        return [statistics.fmean(losses[max(0, end - SMOOTHED) : end]) for end in range(1, len(losses) + 1)]

    def seconds(self, reduction: str, seed: int) -> list[float]:
        """Since the beginning."""
        return list(accumulate(sample.parts["training"] for sample in self._samples(reduction, seed)))

    def step(self, reduction: str) -> float:
        """The median seconds of a step."""
        rounds = [sample.parts["training"] for seed in self.seeds for sample in self._samples(reduction, seed)]
        return statistics.median(rounds) / steps_a_round(reduction)

    def sent(self, reduction: str) -> float:
        """The mean of the bytes of a step: not all of them send."""
        rounds = [sample.sent for seed in self.seeds for sample in self._samples(reduction, seed)]
        return statistics.fmean(rounds) / steps_a_round(reduction)

    def at_target(self, reduction: str) -> list[float]:
        """The losses after as many steps as set the target, seed by seed; fewer than seeds where that was not run."""
        place = self.target_steps // steps_a_round(reduction) - 1
        curves = (self.losses(reduction, seed) for seed in self.seeds)
        return [losses[place] for losses in curves if len(losses) > place]

    def reached(self, reduction: str, seed: int) -> Reached | None:
        """When the loss was first as low as that of the exact steps; None if it never was."""
        targets = self.at_target(EXACT) if EXACT in self.reductions else []
        if seed >= len(targets):
            return None
        seconds, losses = self.seconds(reduction, seed), self.losses(reduction, seed)
        each = steps_a_round(reduction)
        points = [(number * each, *both) for number, both in enumerate(zip(seconds, losses, strict=True), 1)]
        if points and points[0][2] <= targets[seed]:
            return Reached(steps=points[0][0], seconds=points[0][1])
        for before, after in pairwise(points):
            if after[2] <= targets[seed]:
                share = (before[2] - targets[seed]) / (before[2] - after[2])
                between = [first + share * (second - first) for first, second in zip(before, after, strict=True)]
                return Reached(steps=between[0], seconds=between[1])
        return None

    def gains(self, reduction: str) -> list[float]:
        """How many times as soon as with exact means, by the seeds that reached the target."""
        pairs = [(self.reached(EXACT, seed), self.reached(reduction, seed)) for seed in self.seeds]
        return [exact.seconds / other.seconds for exact, other in pairs if exact is not None and other is not None]

    def _samples(self, reduction: str, seed: int) -> list[Sample]:
        samples = self.record.samples[variant_name(reduction, seed)]
        return [samples[number] for number in sorted(samples)]


def _table(curves: Curves) -> Table:
    rows = []
    for name in curves.reductions:
        reached = [arrival for seed in curves.seeds if (arrival := curves.reached(name, seed)) is not None]
        rows.append(
            [
                name,
                f"{curves.step(name) * 1e3:.1f}",
                f"{curves.sent(name) / 1e6:.3f}",
                spread(curves.at_target(name), ".3f"),
                f"{len(reached)} of {len(curves.seeds)}",
                spread([arrival.steps for arrival in reached], ".0f"),
                spread([arrival.seconds for arrival in reached], ".1f"),
                spread(curves.gains(name), ".2f"),
            ]
        )
    return Table(
        title=f"{curves.record.cell.name}: to the loss of {curves.target_steps} exact steps",
        columns=[
            "sent", "ms a step", "MB a step", f"loss after {curves.target_steps} steps", "seeds that got there",
            "steps", "seconds", "times as soon",
        ],
        rows=rows,
        note=(
            f"{len(curves.seeds)} seed{'s: mean, lowest and highest' if len(curves.seeds) > 1 else ''}. The loss is "
            f"that of held-out text, mean of {SMOOTHED} points; the target of a seed is the one that its exact steps "
            "reach. Seconds are those of training, with compression and the search for settings, without evaluation."
        ),
    )  # fmt: skip


def _picture(curves: Curves, place: int) -> Picture:
    title = _sentence(curves)
    figure, axes = canvas(title, panels=["over seconds", "over steps"], height=4.4)
    for panel, by_steps in zip(axes, (False, True), strict=True):
        draw_curves(panel, [_curve(curves, name, by_steps=by_steps) for name in curves.reductions])
        panel.set_xlabel("steps" if by_steps else "seconds of training")
        panel.set_xlim(left=0)
    axes[0].set_ylabel("loss on held-out text")
    legend(axes)
    return Picture(slug=f"loss-{place}", title=title, figure=figure, reading=title)


def _curve(curves: Curves, name: str, *, by_steps: bool) -> Series:
    """The mean over seeds of the loss, and of the seconds it took."""
    losses = list(zip(*(curves.losses(name, seed) for seed in curves.seeds), strict=False))
    seconds = list(zip(*(curves.seconds(name, seed) for seed in curves.seeds), strict=False))
    count = steps_a_round(name)
    places = [number * count if by_steps else statistics.fmean(each) for number, each in enumerate(seconds, 1)]
    return Series(
        label=name,
        points=[(place, statistics.fmean(each)) for place, each in zip(places, losses, strict=True)],
        spans=[(min(each), max(each)) for each in losses if len(each) > 1],
        colour=COLOURS[name],
    )


def _sentence(curves: Curves) -> str:
    others = [name for name in curves.reductions if name != EXACT]
    gains = {name: statistics.fmean(each) for name in others if (each := curves.gains(name))}
    if not gains:
        return f"{curves.record.cell.name}: nothing has reached the loss of {curves.target_steps} exact steps."
    best = max(gains, key=lambda name: gains[name])
    return f"With {best} the loss of {curves.target_steps} exact steps is reached {gains[best]:.1f} times as soon."
