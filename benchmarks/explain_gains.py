"""Trainings with something wrong: does `explain` name it first, and gain what it predicts when it is put right?

    python benchmarks/explain_gains.py                  # needs root, for a lab of two hosts
    python benchmarks/explain_gains.py --case sleep --rounds 6
    python benchmarks/explain_gains.py --case buckets   # all that begin so: other sizes, rates, models

In every case the faulty training and those that follow its advice run in turns, in the same processes, a few steps at a
time, and the gain is predicted from the faulty one's steps among them. Models are emulated: they take time, and no
cores, so that a busy machine disturbs them less. The gain is the share of a step (of a micro-batch, where there are
several in a step) that is saved. Where buckets cost little enough that nothing is said, others are tried all the same.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from interleave import interleave, parser_of
from torch.utils.data import DataLoader, Dataset

from gradsync import DistributedDataParallel, ShardedOptimizer
from gradsync.lab import EmulatedModel, Lab, LabPlan, Rate, fork_ranks, transformer
from gradsync.observe.explain import Advice, Explanation
from gradsync.tools.bench.measure import Steady

STEPS = 11
NOTHING_SAID = "nothing is said; tried all the same"


class Inputs(Dataset[torch.Tensor]):
    """Batches that take ``seconds`` to make."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.tensor([1.0 + index % 7])


class Spread(torch.nn.Module):
    """One number as a batch."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self._shape = shape

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.expand(self._shape)


class Mean(torch.nn.Module):
    """A loss."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mean()


@dataclass(kw_only=True)
class Training:
    """One variant, with a model of its own. ``micro_batches`` of them make a step; ``accumulates`` says how."""

    parameters: int = 1_000_000
    layers: int = 4
    seconds: float = 0.2
    sleeps: float = 0.0
    data_seconds: float = 0.0
    workers: int = 0
    bucket_cap_mb: float | None = None
    reduction: str = "mean"
    micro_batches: int = 1
    accumulates: bool = True
    shards: bool = False
    # Layers that are computed on these cores, instead of an emulated model.
    computed: int = 0

    def start(self) -> None:
        torch.manual_seed(0)
        inner = self._model()
        if dist.get_rank() == 1 and self.sleeps:
            layer = inner.get_submodule("blocks.1.mlp.up")
            layer.register_forward_pre_hook(lambda *_: time.sleep(self.sleeps))
        self.model = DistributedDataParallel(inner, bucket_cap_mb=self.bucket_cap_mb, reduction=self.reduction)
        plain = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.optimizer = ShardedOptimizer(plain, self.model) if self.shards else plain
        keep = {"persistent_workers": True, "prefetch_factor": 4} if self.workers else {}
        loader = DataLoader(Inputs(self.data_seconds), num_workers=self.workers, **keep)
        self._batches: Iterator[torch.Tensor] = iter(loader)

    def _model(self) -> torch.nn.Module:
        if not self.computed:
            return EmulatedModel(transformer(parameters=self.parameters, layers=self.layers, seconds=self.seconds))
        width = round((self.parameters / self.computed) ** 0.5)
        layers = [torch.nn.Linear(width, width) for _ in range(self.computed)]
        return torch.nn.Sequential(Spread(64, width), *layers, Mean())

    def step(self) -> None:
        batches = itertools.islice(self._batches, self.micro_batches)
        for batch in self.model.accumulate(batches) if self.accumulates else batches:
            self.model(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is wrong, and what would be right: ``remedies`` by a word of the advice that asks for it; ``otherwise`` is
    tried where nothing is said, which is right where it gains little."""

    kind: str
    rate: str
    faulty: Training
    remedies: Callable[[Advice], Training | None]
    otherwise: Training | None = None


def replaced(case: Training, **changes: object) -> Training:
    fields = {name: getattr(case, name) for name in Training.__dataclass_fields__}
    return Training(**{**fields, **changes})  # type: ignore[arg-type]


SLEEPY = Training(sleeps=0.1)
STARVED = Training(data_seconds=0.1)
FORGETFUL = Training(micro_batches=3, accumulates=False)
SLOW = Training()


def on_a_slow_link(advice: Advice) -> Training | None:
    if "int8" in advice.change:
        return replaced(SLOW, reduction="int8")
    if "accumulate" in advice.change:
        return replaced(SLOW, micro_batches=4)
    return replaced(SLOW, shards=True) if "ShardedOptimizer" in advice.change else None


def with_workers(advice: Advice) -> Training:
    workers = int(advice.change.partition("num_workers=")[2].partition(",")[0])
    return replaced(STARVED, workers=workers)


def buckets(rate: str = "1gbit", **training: object) -> Case:
    """Buckets that are too small, and what makes them so: one a parameter by default."""
    faulty = replaced(Training(layers=48, parameters=400_000, seconds=0.1, bucket_cap_mb=0.001), **training)

    def with_cap(advice: Advice) -> Training:
        return replaced(faulty, bucket_cap_mb=float(advice.change.partition("=")[2].split()[0]))

    otherwise = replaced(faulty, bucket_cap_mb=0.2)
    return Case(kind="bucket size", rate=rate, faulty=faulty, remedies=with_cap, otherwise=otherwise)


CASES = {
    "sleep": Case(kind="slow rank", rate="1gbit", faulty=SLEEPY, remedies=lambda _: replaced(SLEEPY, sleeps=0.0)),
    "link": Case(kind="slow link", rate="100mbit", faulty=SLOW, remedies=on_a_slow_link),
    "buckets": buckets(),
    "no_sync": Case(
        kind="forgotten no_sync",
        rate="100mbit",
        faulty=FORGETFUL,
        remedies=lambda _: replaced(FORGETFUL, accumulates=True),
    ),
    "data": Case(kind="slow data", rate="1gbit", faulty=STARVED, remedies=with_workers),
}
VARIANTS = {
    "buckets-few": buckets(layers=12, seconds=0.2),
    "buckets-0.01": buckets(bucket_cap_mb=0.01, seconds=0.05),
    "buckets-0.05": buckets(bucket_cap_mb=0.05, seconds=0.05, parameters=4_000_000),
    "buckets-slow-link": buckets("100mbit"),
    "buckets-slow-few": buckets("100mbit", layers=12, seconds=0.2),
    "buckets-fast-link": buckets("10gbit"),
    "buckets-computed": buckets(computed=60, parameters=1_000_000),
    "buckets-computed-0.05": buckets("10gbit", computed=200, parameters=1_000_000, bucket_cap_mb=0.05),
}


def block(training: Training) -> Steady:
    return Steady(step=training.step, flush=lambda: None, times=STEPS - 1)


def measure(case: Case, rounds: int) -> None:
    dist.init_process_group("gloo")
    case.faulty.start()
    for _ in range(4 * STEPS):
        case.faulty.step()
    explanation: Explanation = case.faulty.model.explain(all_ranks=True)
    remedies = [
        (advice, remedy)
        for advice in explanation.advice
        if advice.kind == case.kind and (remedy := case.remedies(advice)) is not None
    ]
    if not remedies and case.otherwise is not None:
        remedies = [(Advice(kind=case.kind, cause="", change=NOTHING_SAID, before=1.0, after=1.0), case.otherwise)]
    for _, remedy in remedies:
        remedy.start()
        # The sizes of buckets are tried out in the first 36.
        for _ in range(4 * STEPS):
            remedy.step()
    # From here on ranks keep steps of the rounds, and forget those before.
    trainings = [case.faulty, *(remedy for _, remedy in remedies)]
    record = interleave({str(number): block(each) for number, each in enumerate(trainings)}, warmup=0, rounds=rounds)
    again = case.faulty.model.explain(all_ranks=True).advice
    if dist.get_rank() == 0:
        first = explanation.advice[0].kind if explanation.advice else "nothing"
        expected = "as it should be" if first == case.kind else f"planted was {case.kind}"
        print(f"  first advice: {first} ({expected}); a step takes {record.ms('0'):.0f} ms")
        seconds = {number: record.seconds(str(number)) for number in range(len(trainings))}
        for place, (advice, remedy) in enumerate(remedies, 1):
            # Of a micro-batch.
            share = case.faulty.micro_batches / remedy.micro_batches
            gains = [1 - share * seconds[place][number] / before for number, before in seconds[0].items()]
            gain = statistics.median(gains)
            # The same advice, by what happened while both ran.
            predicted = next((each.gain for each in again if _same(each, advice)), advice.gain)
            print(
                f"  {advice.change.partition(':')[0].partition('(')[0]:44.44} predicted {predicted:6.1%}  measured "
                f"{gain:6.1%} ({min(gains):.1%}–{max(gains):.1%})  ratio {predicted / gain if gain else 0:5.2f}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def _same(one: Advice, other: Advice) -> bool:
    return one.kind == other.kind and one.change[:12] == other.change[:12]


def main() -> None:
    parser = parser_of(__doc__, rounds=6)
    every = {**CASES, **VARIANTS}
    parser.add_argument(
        "--case", action="append", help=f"only this one, or all that begin so; may be given several times: {[*every]}"
    )
    options = parser.parse_args()
    chosen = [name for name in every if any(name.startswith(each) for each in options.case or ())]
    for name in chosen or CASES:
        case = every[name]
        print(f"{name}: two hosts, {case.rate}", flush=True)
        with Lab(LabPlan(name="explain", hosts=2, rate=Rate.parse(case.rate))) as lab:
            fork_ranks(lab, lambda case=case: measure(case, options.rounds))


if __name__ == "__main__":
    main()
