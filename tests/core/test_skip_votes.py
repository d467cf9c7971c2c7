"""A rank votes to skip the window: its gradients are not finite, it abstains, or its forward or backward fails.

All ranks come to the same end, whatever the policy: one error that names rank and parameter, a step that changes
nothing, or the mean over the others; and the next window is as if nothing had been.
"""

import contextlib
import copy
import logging
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradsync
from gradsync import (
    BadStepError,
    ConfigurationError,
    DistributedDataParallel,
    MismatchError,
    MisuseError,
    PeerFailedError,
    ShardedOptimizer,
    synchronize_gradients,
)
from gradsync.communicator import choose_communicator
from tests.core.common import TINY, Line, gradients, in_threads_and_processes, on
from tests.fuse import Explosion
from tests.laws import costly
from tests.on_gpu import computes_on_cpu
from tests.ranks import RankPool, Ranks, ThreadRanks, pool_of, seeded

pytestmark = pytest.mark.timeout(60)

POLICIES = ("raise", "skip", "drop-rank")
FAULTS = ("nan", "inf", "abstain", "forward", "backward")


class Journal(logging.Handler):
    """What gradsync warns of on this rank, where it trains: the watch has a thread of its own. Ranks may be threads."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self._rank = choose_communicator().rank

    def emit(self, record: logging.LogRecord) -> None:
        if record.threadName != "gradsync watch" and choose_communicator().rank == self._rank:
            self.lines.append(record.getMessage())


@contextlib.contextmanager
def journal() -> Iterator[list[str]]:
    handler = Journal()
    logger = logging.getLogger("gradsync")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def wrap(on_bad_step: Any, module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module or Line(), bucket_cap_mb=TINY, on_bad_step=on_bad_step, **options)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((list(model.parameters()), optimizer.state_dict()["state"]))


def same_bits(one: Any, other: Any) -> bool:
    (values, states), (others, other_states) = one, other
    return all(map(torch.equal, values, others)) and str(states) == str(other_states)


def work(model: DistributedDataParallel, x: float, fault: str) -> None:
    """A forward and a backward with a fault, as a loop that goes on after running out of memory has them."""
    try:
        if fault == "abstain":
            model.abstain("a bad batch")
        else:
            poison = {"nan": math.nan, "inf": math.inf}.get(fault, 0.0)
            model(x, poison, fails=fault == "forward", lit=fault == "backward").backward()
    except (torch.OutOfMemoryError, Explosion) as error:
        model.zero_grad()
        model.abstain(type(error).__name__)


def windows(on_bad_step: Any, fault: str, at: int, **options: Any) -> list[tuple[str, list[Any], bool, list[str]]]:
    """Six windows; in number ``at`` rank 1 has a fault. Each: the error, gradients before the step, whether the step
    changed nothing, what was warned of."""
    communicator = choose_communicator()
    model = wrap(on_bad_step, **options)
    optimizer = adam(model)
    seen = []
    for window in range(6):
        with journal() as lines:
            error, before = "", whole_state(model, optimizer)
            try:
                work(model, communicator.rank + 1.0, fault if window == at and communicator.rank == 1 else "")
            except PeerFailedError as raised:
                error = f"{type(raised).__name__}: {raised}"
                model.zero_grad()
            came = gradients(model)
            optimizer.step()
            unchanged = same_bits(before, whole_state(model, optimizer))
            raises = on_bad_step == "raise" or (on_bad_step is None and fault == "backward")
            assert model.step_was_skipped is (unchanged and not raises)
            model.zero_grad()
        seen.append((error, came, unchanged, list(lines)))
    return seen


def mean_over(ranks: list[int]) -> list[Any]:
    x = sum(rank + 1.0 for rank in ranks) / len(ranks)
    return [pytest.approx(x + number, rel=1e-12) for number in range(3)]


def names_it(text: str, fault: str) -> bool:
    if fault in ("nan", "inf"):
        return "parameter 'scales.1' on rank 1 is not finite" in text
    if fault == "abstain":
        return "rank 1 abstains (a bad batch)" in text
    return "rank 1 abstains (OutOfMemoryError)" in text if fault == "forward" else "backward of rank 1 failed" in text


def check(
    results: list[list[tuple[str, list[Any], bool, list[str]]]], on_bad_step: str | None, fault: str, at: int
) -> None:
    everybody = list(range(len(results)))
    drops = on_bad_step == "drop-rank" and fault != "backward"
    for rank, seen in enumerate(results):
        for window, (error, came, unchanged, lines) in enumerate(seen):
            if window != at:
                assert (error, came, unchanged, lines) == ("", mean_over(everybody), False, [])
                continue
            raises = on_bad_step == "raise" or (on_bad_step is None and fault == "backward")
            if raises:
                # On the rank whose backward failed its own error has been raised.
                assert names_it(error, fault) or (fault == "backward" and rank == 1 and not error)
                assert unchanged
            elif drops:
                assert came == mean_over([each for each in everybody if each != 1])
                assert not unchanged
            else:
                assert not error
                assert unchanged
            assert len(lines) == (rank == 0 and not raises)
            assert all(names_it(line, fault) for line in lines)


@in_threads_and_processes
@pytest.mark.parametrize("on_bad_step", POLICIES)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_policy_for_each_fault(ranks: Ranks, on_bad_step: str, fault: str) -> None:
    """In a window in which buckets overlap; and the windows after it are as ever."""
    check(ranks.run(windows, on_bad_step, fault, 3), on_bad_step, fault, 3)


@pytest.mark.breadth
@on(("threads", 3))
@pytest.mark.parametrize("on_bad_step", POLICIES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("options", [{"schedule": "bucketed"}, {"schedule": "naive"}, {}], ids=str)
def test_each_policy_in_the_first_windows(ranks: Ranks, on_bad_step: str, fault: str, at: int, options: Any) -> None:
    check(ranks.run(windows, on_bad_step, fault, at, **options), on_bad_step, fault, at)


@pytest.mark.parametrize("fault", ["abstain", "forward"])
def test_by_default_a_window_is_skipped_from_which_a_rank_abstains(fault: str) -> None:
    check(ThreadRanks(3).run(windows, None, fault, 2), None, fault, 2)


def test_by_default_a_failed_backward_raises_on_all_ranks() -> None:
    check(ThreadRanks(3).run(windows, None, "backward", 2), None, "backward", 2)


def poisoned_unseen() -> list[Any]:
    communicator = choose_communicator()
    model = wrap(None)
    model(1.0, math.nan if communicator.rank == 1 else 0.0).backward()
    return gradients(model)


def test_by_default_nobody_looks_and_nan_stays_visible() -> None:
    for first, second, third in ThreadRanks(2).run(poisoned_unseen):
        assert (first, math.isnan(second), third) == (1.0, True, 3.0)


# -- all ranks vote to skip, or one alone ------------------------------------------------------------------------------


def all_reject(on_bad_step: str) -> tuple[bool, list[str]]:
    model = wrap(on_bad_step)
    optimizer = adam(model)
    before = whole_state(model, optimizer)
    with journal() as lines:
        model(1.0, math.inf).backward()
        optimizer.step()
    return same_bits(before, whole_state(model, optimizer)), list(lines)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("on_bad_step", ["skip", "drop-rank"])
def test_if_all_reject_the_window_is_skipped(world_size: int, on_bad_step: str) -> None:
    for rank, (unchanged, lines) in enumerate(ThreadRanks(world_size).run(all_reject, on_bad_step)):
        assert unchanged
        assert len(lines) == (rank == 0)
        assert all(f"rank {each}" in line for line in lines for each in range(world_size))


# -- laws ------------------------------------------------------------------------------------------------------------


def weighted_window(weights: list[list[int]], votes: list[bool], known: bool) -> list[Any]:
    """One window after another one: micro-batches of these weights on each rank, some of which vote to skip."""
    communicator = choose_communicator()
    model = wrap("drop-rank")
    if known:
        model.backward(model(1.0), weight=3)
        model.zero_grad()
    else:
        model(1.0).backward()
        model.zero_grad()
    mine = weights[communicator.rank]
    for number, weight in enumerate(mine):
        with model.accumulate(last=number == len(mine) - 1):
            poison = math.nan if votes[communicator.rank] and number == len(mine) // 2 else 0.0
            model.backward(model(float(weight * (communicator.rank + 1)), poison), weight=weight)
    came = [gradients(model)]
    model.zero_grad()
    model.backward(model(communicator.rank + 1.0), weight=1)
    return [*came, gradients(model)]


@costly
@given(
    weights=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=3), min_size=3, max_size=3),
    votes=st.lists(st.booleans(), min_size=3, max_size=3).filter(lambda votes: not all(votes)),
    known=st.booleans(),
)
def test_the_mean_is_that_of_those_who_take_part(weights: list[list[int]], votes: list[bool], known: bool) -> None:
    pairs = [(rank, w) for rank, mine in enumerate(weights) if not votes[rank] for w in mine]
    total = sum(weight for _, weight in pairs)
    mean = sum(weight * (weight * (rank + 1.0)) for rank, weight in pairs) / total
    expected = [pytest.approx(mean + number, rel=1e-12) for number in range(3)]
    after = [pytest.approx(2.0 + number, rel=1e-12) for number in range(3)]
    assert ThreadRanks(3).run(weighted_window, weights, votes, known) == [[expected, after]] * 3


def plain_windows(votes: list[list[bool]]) -> list[list[Any]]:
    """Windows without weights, of two micro-batches that add up; some ranks vote to skip."""
    communicator = choose_communicator()
    model = wrap("drop-rank")
    seen = []
    for window in votes:
        with model.no_sync():
            model(communicator.rank + 1.0, math.inf if window[communicator.rank] else 0.0).backward()
        model(1.0).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


@costly
@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3).filter(lambda v: not all(v)), min_size=1, max_size=4))
def test_plain_means_are_divided_by_those_who_take_part(votes: list[list[bool]]) -> None:
    expected = []
    for window in votes:
        taking_part = [rank for rank in range(3) if not window[rank]]
        x = sum(rank + 2.0 for rank in taking_part) / len(taking_part)
        expected.append([pytest.approx(x + 2 * number, rel=1e-12) for number in range(3)])
    assert ThreadRanks(3).run(plain_windows, votes) == [expected] * 3


def any_windows(on_bad_step: str | None, faults: list[list[str]], framed: bool) -> list[list[float]]:
    """The parameters after each window; in each every rank has the fault that is drawn for it."""
    communicator = choose_communicator()
    model = wrap(on_bad_step)
    optimizer = adam(model)
    seen = []
    for window, drawn in enumerate(faults):
        try:
            with model.accumulate(last=False) if framed else model.no_sync():
                model(window + 1.0).backward()
            with model.accumulate(last=True) if framed else contextlib.nullcontext():
                work(model, communicator.rank + window + 1.0, drawn[communicator.rank])
                if framed:
                    optimizer.step()
        except PeerFailedError:
            model.zero_grad()
        if not framed:
            optimizer.step()
        optimizer.zero_grad()
        seen.append([float(parameter.detach()) for parameter in model.parameters()])
    return seen


@given(
    on_bad_step=st.sampled_from((None, *POLICIES)),
    faults=st.lists(st.lists(st.sampled_from(("", "", *FAULTS)), min_size=3, max_size=3), min_size=1, max_size=5),
    framed=st.booleans(),
)
def test_whatever_happens_replicas_stay_equal(on_bad_step: str | None, faults: list[list[str]], framed: bool) -> None:
    if on_bad_step is None:
        # Which nobody looks for then.
        faults = [["" if fault in ("nan", "inf") else fault for fault in drawn] for drawn in faults]
    first, *others = ThreadRanks(3).run(any_windows, on_bad_step, faults, framed)
    assert others == [first, first]
    assert not any(math.isnan(value) for values in first for value in values)
    for window, drawn in enumerate(faults):
        before = first[window - 1] if window else [1.0] * 3
        drops = on_bad_step == "drop-rank" and "backward" not in drawn and not all(drawn)
        assert (first[window] == before) is (any(drawn) and not drops)


# -- windows of several micro-batches ---------------------------------------------------------------------------------


def accumulate(on_bad_step: str, how: str) -> list[Any]:
    """Three micro-batches; on rank 1 the second has a fault. Then a good window."""
    communicator = choose_communicator()
    model = wrap(on_bad_step)
    optimizer = adam(model)
    seen: list[Any] = []
    for window in range(3):
        before, faulty = whole_state(model, optimizer), window == 1 and communicator.rank == 1
        for number in range(3):
            with model.accumulate(last=number == 2) if how != "no_sync" else contextlib.nullcontext():
                silent = model.no_sync() if how == "no_sync" and number < 2 else contextlib.nullcontext()
                with silent:
                    if faulty and number == 1 and how == "abstain":
                        model.abstain("a bad batch")
                    else:
                        model(communicator.rank + 1.0, math.nan if faulty and number == 1 else 0.0).backward()
        seen.append((gradients(model), communicator.rank, window))
        optimizer.step()
        seen[-1] = (seen[-1][0], same_bits(before, whole_state(model, optimizer)))
        optimizer.zero_grad()
    return seen


@in_threads_and_processes
@pytest.mark.parametrize("how", ["accumulate", "no_sync", "abstain"])
@pytest.mark.parametrize("on_bad_step", ["skip", "drop-rank"])
def test_a_fault_in_one_micro_batch_is_one_of_the_window(ranks: Ranks, on_bad_step: str, how: str) -> None:
    times = 3.0 if how == "no_sync" else 1.0
    for first, second, third in ranks.run(accumulate, on_bad_step, how):
        everybody = [times * mean.expected for mean in mean_over(list(range(ranks.world_size)))]
        assert first == (pytest.approx(everybody, rel=1e-12), False)
        assert third == (pytest.approx(everybody, rel=1e-12), False)
        assert second[1] is (on_bad_step == "skip")
        if on_bad_step == "drop-rank":
            others = [
                times * mean.expected for mean in mean_over([each for each in range(ranks.world_size) if each != 1])
            ]
            assert second[0] == pytest.approx(others, rel=1e-12)


def abstain_in_a_join(on_bad_step: str, how: str) -> tuple[list[float], list[bool]]:
    """Rank 0 has four batches and rank 1 has three; in the second one rank 0 abstains, before or after its forward."""
    communicator = choose_communicator()
    model = gradsync.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), on_bad_step=on_bad_step)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, skipped = torch.tensor([[1.0, 2.0], [0.0, 1.0]]) + communicator.rank, []
    with model.join():
        for number in range(4 - communicator.rank):
            silent = model.no_sync() if how == "no_sync" else contextlib.nullcontext()
            faulty = number == 1 and communicator.rank == 0
            with silent:
                if faulty and how != "after":
                    model.abstain("a bad batch")
                elif how == "no_sync":
                    model(batch).square().sum().backward()
            if how == "no_sync" or not faulty:
                model(batch).square().sum().backward()
            elif how == "after":
                model(batch)
                model.abstain("a bad batch")
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(model.step_was_skipped)
    return [parameter.detach().sum().item() for parameter in model.parameters()], skipped


@pytest.mark.parametrize("how", ["before", "after", "no_sync"])
@pytest.mark.parametrize("on_bad_step", ["skip", "drop-rank"])
def test_a_rank_may_abstain_in_a_join(on_bad_step: str, how: str) -> None:
    (first, skipped), (second, other) = pool_of(2).run(abstain_in_a_join, on_bad_step, how)
    assert first == second
    assert skipped[:3] == other == [False, on_bad_step == "skip", False]


def step_two_optimizers() -> list[tuple[bool, bool]]:
    """Whether steps were skipped, and parameters stayed; rank 1 abstains from the second of four windows."""
    communicator = choose_communicator()
    model = wrap("skip")
    parameters = list(model.parameters())
    optimizers = [torch.optim.Adam(parameters[:1]), torch.optim.SGD(parameters[1:], lr=0.1, momentum=0.9)]
    seen = []
    for window in range(4):
        before = [parameter.detach().clone() for parameter in parameters]
        if window == 1 and communicator.rank == 1:
            model.abstain("a bad batch")
        else:
            model(communicator.rank + 1.0, 0.0).backward()
        for optimizer in optimizers:
            optimizer.step()
        same = all(torch.equal(*each) for each in zip(before, parameters, strict=True))
        seen.append((model.step_was_skipped, same))
        for optimizer in optimizers:
            optimizer.zero_grad()
    return seen


@in_threads_and_processes
def test_a_window_is_skipped_by_all_optimizers(ranks: Ranks) -> None:
    expected = [(False, False), (True, True), (False, False), (False, False)]
    assert ranks.run(step_two_optimizers) == [expected] * ranks.world_size


def two_backwards() -> tuple[bool, bool, list[str]]:
    """A step after two synchronized backwards, of which the first fails on rank 1 and is rejected by that."""
    communicator = choose_communicator()
    model = wrap("skip")
    optimizer = adam(model)
    before = whole_state(model, optimizer)
    with journal() as lines:
        with contextlib.suppress(Explosion):
            model(1.0, lit=communicator.rank == 1).backward()
        if communicator.rank == 1:
            model.zero_grad()
        model(2.0).backward()
        optimizer.step()
    unchanged = same_bits(before, whole_state(model, optimizer))
    model.zero_grad()
    model(2.0).backward()
    optimizer.step()
    return unchanged, same_bits(before, whole_state(model, optimizer)), list(lines)


def test_a_window_stays_rejected_until_its_gradients_go() -> None:
    """Also on a rank that has zeroed them and has nothing but the second backward: nobody steps alone."""
    for rank, (unchanged, unchanged_after, lines) in enumerate(ThreadRanks(3).run(two_backwards)):
        assert unchanged
        assert not unchanged_after
        assert len(lines) == (rank == 0), "it is told once"


def skipped_then_failed() -> list[bool]:
    """A window that is skipped, and one whose backward fails on rank 1, which all zero."""
    communicator = choose_communicator()
    model = wrap(None)
    optimizer = adam(model)
    seen = []
    for window in range(3):
        try:
            if window == 0 and communicator.rank == 1:
                model.abstain()
            else:
                model(1.0, lit=window == 1 and communicator.rank == 1).backward()
        except (Explosion, PeerFailedError):
            model.zero_grad()
        optimizer.step()
        seen.append(model.step_was_skipped)
        model.zero_grad()
    return seen


def test_a_skipped_step_is_not_told_of_twice() -> None:
    assert ThreadRanks(2).run(skipped_then_failed) == [[True, False, False]] * 2


# -- what is looked at ------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """All kinds of gradients: of few numbers or many, complex, sparse, narrow; and one parameter that is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(300, 7))
        self.narrow = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.complex = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.table = nn.Embedding(4, 2, sparse=True)
        self.empty = nn.Parameter(torch.ones(0))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, **poison: float) -> torch.Tensor:
        words = self.table(torch.tensor([1, 3]))
        terms = {"wide": self.wide[-1, -1], "narrow": self.narrow[2].float(), "table": words[1, 1]}
        terms["complex"] = self.complex[1].imag
        whole = self.wide.sum() + self.narrow.float().sum() + self.complex.real.sum() + words.sum() + self.empty.sum()
        return whole + sum(term * poison.get(name, 0.0) for name, term in terms.items())


def look(poisoned: str, value: float, on_bad_step: str) -> str:
    communicator = choose_communicator()
    model = wrap(on_bad_step, Mixed())
    for _ in range(3):
        model().backward()
        model.zero_grad()
    with journal() as lines:
        model(**{poisoned: value if communicator.rank == 1 else 1.0}).backward()
        assert model.module.unused.grad is None
    return "\n".join(lines)


@pytest.mark.parametrize("on_bad_step", ["skip", "drop-rank"])
@pytest.mark.parametrize("value", [math.nan, -math.inf], ids=str)
@pytest.mark.parametrize("poisoned", ["wide", "narrow", "complex", "table"])
def test_every_kind_of_gradient_is_looked_at(poisoned: str, value: float, on_bad_step: str) -> None:
    name = "table.weight" if poisoned == "table" else poisoned
    assert f"parameter '{name}' on rank 1 is not finite" in ThreadRanks(2).run(look, poisoned, value, on_bad_step)[0]


def overflow() -> tuple[list[str], list[float]]:
    """Numbers that are finite, and whose sum is not."""
    model = wrap("skip", nn.Linear(64, 64, bias=False).half())
    with journal() as lines:
        (model(torch.ones(1, 64, dtype=torch.float16)).sum() * 30000).backward()
    return list(lines), model.module.weight.grad.unique().tolist()


def test_a_sum_that_overflows_is_no_skip_vote() -> None:
    assert ThreadRanks(2).run(overflow) == [([], [30000.0])] * 2


def first_of_two() -> str:
    communicator = choose_communicator()
    model = wrap("raise", nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    try:
        model(torch.full((1, 4), math.nan if communicator.rank else 1.0)).sum().backward()
    except BadStepError as error:
        return str(error)
    return ""


def test_the_first_parameter_of_the_model_is_named(process_ranks: RankPool) -> None:
    for told in process_ranks.run(first_of_two):
        assert "parameter '0.weight' on rank 1 is not finite" in told
        assert "zero_grad()" in told


# -- together with other things ---------------------------------------------------------------------------------------


def clip() -> list[Any]:
    communicator = choose_communicator()
    model = wrap("skip")
    optimizer = adam(model)
    seen: list[Any] = []
    for window in range(4):
        before = whole_state(model, optimizer)
        if window == 2 and communicator.rank == 0:
            model.abstain()
        else:
            model(communicator.rank + 1.0).backward()
        norm = float(model.clip_grad_norm_(1.0))
        optimizer.step()
        seen.append((norm, same_bits(before, whole_state(model, optimizer))))
        optimizer.zero_grad()
    return seen


def test_clipping_finds_zeros() -> None:
    for seen in ThreadRanks(2).run(clip):
        assert [unchanged for _, unchanged in seen] == [False, False, True, False]
        assert seen[2][0] == 0.0
        assert seen[1][0] == seen[3][0] == pytest.approx(math.sqrt(1.5**2 + 2.5**2 + 3.5**2))


def by_closure(kind: str) -> list[bool]:
    communicator = choose_communicator()
    model = wrap("skip", nn.Linear(3, 1).double())
    parameters = list(model.parameters())
    for parameter in parameters:
        torch.nn.init.constant_(parameter, 0.5)
    optimizer = {
        "adam": lambda: torch.optim.AdamW(parameters, lr=0.1),
        # With small steps: where it has converged, nothing changes either.
        "lbfgs": lambda: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
        "sharded": lambda: ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model),
    }[kind]()
    seen = []
    for window in range(4):
        before = [parameter.detach().clone() for parameter in parameters]

        def closure(faulty: bool = window == 2 and communicator.rank == 1) -> Any:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 3).double() * (communicator.rank + 1)).square().sum()
            (loss * (math.nan if faulty else 1.0)).backward()
            return loss

        optimizer.step(closure)
        seen.append(all(map(torch.equal, before, parameters)))
        assert model.step_was_skipped is seen[-1]
    return seen


@pytest.mark.parametrize("kind", ["adam", "lbfgs", "sharded"])
def test_a_closure_is_skipped_too(kind: str) -> None:
    assert ThreadRanks(2).run(by_closure, kind) == [[False, False, True, False]] * 2


def scaled(on_bad_step: str | None, fault: str, kind: str = "plain") -> list[Any]:
    communicator = choose_communicator()
    model = wrap(on_bad_step, Line(dtype=torch.float32))
    optimizer = (
        adam(model) if kind == "plain" else ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    seen = []
    for window in range(5):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if window == 2 and communicator.rank == 1 and fault == "abstain":
            model.abstain()
        else:
            poison = math.inf if window == 2 and communicator.rank == 1 else 0.0
            scaler.scale(model(1.0, poison)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((all(map(torch.equal, before, model.parameters())), scaler.get_scale()))
        optimizer.zero_grad(set_to_none=kind == "plain")
    return seen


@pytest.mark.parametrize("kind", ["plain", "sharded"])
@pytest.mark.parametrize("on_bad_step", ["skip", None])
def test_a_scaler_lowers_its_scale_by_what_is_not_finite(on_bad_step: str | None, kind: str) -> None:
    """It leaves the step out itself, so that only zeroed gradients tell that another window has begun."""
    skipped = [(False, 8.0), (False, 8.0), (True, 4.0), (False, 4.0), (False, 4.0)]
    assert ThreadRanks(2).run(scaled, on_bad_step, "inf", kind) == [skipped] * 2


@pytest.mark.parametrize("on_bad_step", ["skip", None])
def test_a_scaler_does_not_by_a_rank_that_abstains(on_bad_step: str | None) -> None:
    skipped = [(False, 8.0), (False, 8.0), (True, 16.0), (False, 16.0), (False, 16.0)]
    assert ThreadRanks(2).run(scaled, on_bad_step, "abstain") == [skipped] * 2


def alike(kind: str, on_bad_step: str, dtype: torch.dtype, set_to_none: bool) -> list[list[torch.Tensor]]:
    """Six windows: rank 1 abstains from the third, and has gradients that are not finite in the fourth."""
    communicator = choose_communicator()
    with seeded(2):
        module = nn.Linear(6, 5).to(dtype)
    wide = torch.float32 if dtype is torch.bfloat16 else None
    model = wrap(on_bad_step, module, accumulation_dtype=None if kind == "sharded" else wide)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    if kind == "sharded":
        optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    seen = []
    for window in range(6):
        x = torch.full((2, 6), communicator.rank + window + 1.0, dtype=dtype)
        if window == 2 and communicator.rank == 1:
            model.abstain()
        else:
            poison = math.nan if window == 3 and communicator.rank == 1 else 1.0
            (model(x).square().mean() * poison).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
    return seen


@pytest.mark.parametrize(
    ("dtype", "set_to_none"), [(torch.float64, True), (torch.float64, False), (torch.bfloat16, True)], ids=str
)
@pytest.mark.parametrize("on_bad_step", ["skip", "drop-rank"])
def test_a_sharded_optimizer_does_what_a_plain_one_does(
    on_bad_step: str, dtype: torch.dtype, set_to_none: bool
) -> None:
    """Narrow gradients are rejected on all ranks alike."""
    first, *others = ThreadRanks(3).run(alike, "plain", on_bad_step, dtype, set_to_none)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
    for shared in ThreadRanks(3).run(alike, "sharded", on_bad_step, dtype, set_to_none) if dtype.itemsize > 2 else ():
        torch.testing.assert_close(shared, first, rtol=1e-12, atol=1e-15)
    same = [all(map(torch.equal, *pair)) for pair in pairwise(first)]
    assert same == [False, *([on_bad_step == "skip"] * 2), False, False]


def zeroed(kind: str, set_to_none: bool) -> list[bool]:
    """The second window is rejected, and zeroed on all ranks without a step."""
    communicator = choose_communicator()
    model = wrap("skip", nn.Linear(6, 5))
    optimizer = (
        adam(model) if kind == "plain" else ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    )
    seen = []
    for window in range(4):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if window == 1 and communicator.rank == 1:
            model.abstain()
        else:
            model(torch.ones(2, 6)).square().mean().backward()
        if window != 1:
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        seen.append(all(map(torch.equal, before, model.parameters())))
    return seen


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_zeroing_ends_a_rejected_window_as_a_step_does(kind: str, set_to_none: bool) -> None:
    assert ThreadRanks(2).run(zeroed, kind, set_to_none) == [[False, True, False, False]] * 2


def prepared() -> list[Any]:
    communicator = choose_communicator()
    policy = gradsync.SyncPolicy(on_bad_step="skip")
    accelerator = gradsync.Accelerator(
        cpu=computes_on_cpu(),
        kwargs_handlers=[gradsync.accelerator.settings.DistributedDataParallelKwargs(policy=policy)],
    )
    module = Line()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(module, optimizer, scheduler)
    seen = []
    for window in range(3):
        accelerator.backward(model(1.0, math.nan if window == 1 and communicator.rank == 1 else 0.0))
        optimizer.step()
        scheduler.step()
        seen.append((accelerator.optimizer_step_was_skipped, optimizer.param_groups[0]["lr"]))
        optimizer.zero_grad()
    return seen


def test_an_accelerator_tells_and_its_scheduler_waits() -> None:
    for seen in ThreadRanks(2).run(prepared):
        assert [skipped for skipped, _ in seen] == [False, True, False]
        assert seen[0][1] == seen[1][1] > seen[2][1]


def compressed(reduction: str, fault: str) -> list[list[float]]:
    """A window more in the middle, which is rejected, changes nothing of what is held back for later."""
    communicator = choose_communicator()
    with seeded(0):
        module = nn.Linear(40, 40, bias=False)
    model = DistributedDataParallel(module, on_bad_step="skip", reduction=reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in range(7):
        if window == 4 and not fault:
            continue
        optimizer.zero_grad()
        x = torch.sin(torch.arange(40.0) * (communicator.rank + window + 1))
        if window == 4 and communicator.rank and fault == "abstain":
            model.abstain()
        else:
            (model(x).square().sum() * (math.nan if window == 4 and communicator.rank else 1.0)).backward()
        optimizer.step()
    return model.module.weight.tolist()


@pytest.mark.parametrize("fault", ["nan", "abstain"])
@pytest.mark.parametrize("reduction", ["int8", "top-k:0.1", "low-rank:2"])
def test_what_a_compression_holds_back_is_not_spoiled(reduction: str, fault: str) -> None:
    spoiled = ThreadRanks(2).run(compressed, reduction, fault)
    assert spoiled == ThreadRanks(2).run(compressed, reduction, "")


# -- misuse, and what the next call does ------------------------------------------------------------------------------


def after_raise() -> tuple[str, list[Any]]:
    communicator = choose_communicator()
    model = wrap("raise")
    optimizer = adam(model)
    with pytest.raises(BadStepError, match="on rank 1 is not finite"):
        model(1.0, math.nan if communicator.rank == 1 else 0.0).backward()
    with pytest.raises(MisuseError) as refused:
        optimizer.step()
    optimizer.zero_grad()
    model(communicator.rank + 1.0).backward()
    return str(refused.value), gradients(model)


def test_after_a_skip_vote_error_gradients_must_be_zeroed(process_ranks: RankPool) -> None:
    for refused, came in process_ranks.run(after_raise):
        assert "Call zero_grad()" in refused
        assert came == mean_over(list(range(process_ranks.world_size)))


def abstain_late() -> str:
    model = wrap(None)
    model(1.0).backward()
    with pytest.raises(MisuseError) as refused:
        model.abstain()
    model.zero_grad()
    model(2.0).backward()
    assert gradients(model) == [2.0, 3.0, 4.0]
    return str(refused.value)


def test_it_is_too_late_to_abstain_after_the_backward() -> None:
    assert all("in the place of that backward" in told for told in ThreadRanks(2).run(abstain_late))


def attached() -> bool:
    communicator = choose_communicator()
    module = Line()
    attachment = synchronize_gradients(module, on_bad_step="skip")
    optimizer = adam(module)
    if communicator.rank:
        attachment.abstain("nothing to learn from")
    else:
        module(1.0).backward()
    optimizer.step()
    return attachment.step_was_skipped


def test_an_attachment_abstains_too() -> None:
    assert ThreadRanks(2).run(attached) == [True, True]


def differ() -> str:
    try:
        wrap("raise" if choose_communicator().rank else "drop-rank")
    except MismatchError as error:
        return str(error)
    return ""


def test_ranks_have_one_policy() -> None:
    assert all("setting on_bad_step" in told for told in ThreadRanks(2).run(differ))
    with pytest.raises(ConfigurationError, match="on_bad_step must be one of raise, skip, drop-rank"):
        gradsync.SyncPolicy(on_bad_step="ignore")  # type: ignore[arg-type]
