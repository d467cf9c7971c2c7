"""Windows: `Σ w·∇loss / Σ w` over all micro-batches of all ranks, with one reduction's traffic (contract, point 4)."""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradsync import DistributedDataParallel, synchronize_gradients
from gradsync.communicator import Communicator, Handle, ReduceOp, choose_communicator
from gradsync.errors import ConfigurationError, MisuseError, PeerFailedError
from tests.core.common import filled
from tests.ranks import RankPool, Ranks, ThreadRanks, pool_of, run_once

pytestmark = pytest.mark.timeout(120)

WIDTH = 5
EXACT = 1e-12

# The weights of one rank's micro-batches in a window; None: no weight is given.
Shares = list[float | None]
Gradients = dict[str, torch.Tensor | None]


class Net(nn.Module):
    """Two layers that are always used, one that only some micro-batches use, and a table with sparse gradients."""

    def __init__(self, *, sparse: bool = False, buffers: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.odd = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(7, WIDTH, sparse=sparse)
        self.norm = nn.BatchNorm1d(WIDTH) if buffers else nn.Identity()
        self.last = nn.Linear(WIDTH, 2)
        filled(self.double(), seed=3)

    def forward(self, key: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(key) & 0xFFFF_FFFF)
        hidden = self.first(torch.randn(3, WIDTH, generator=generator, dtype=torch.float64))
        if sum(key) % 2:
            hidden = hidden + self.odd(hidden)
        hidden = hidden + self.table(torch.randint(7, (3,), generator=generator))
        return self.last(torch.tanh(self.norm(hidden)))


def loss_of(model: nn.Module, *key: int) -> torch.Tensor:
    return model(key).square().mean()


def gradients(model: nn.Module) -> Gradients:
    plain = getattr(model, "module", model)
    return {
        name: None if p.grad is None else (p.grad.to_dense() if p.grad.is_sparse else p.grad).clone()
        for name, p in plain.named_parameters()
    }


def alone(windows: Sequence[Sequence[Shares]], *, sparse: bool = False) -> list[Gradients]:
    """One process that runs all micro-batches of all ranks."""
    model, results = Net(sparse=sparse), []
    for number, window in enumerate(windows):
        total = sum(1.0 if w is None else w for shares in window for w in shares)
        for rank, shares in enumerate(window):
            for micro_batch, w in enumerate(shares):
                (loss_of(model, number, rank, micro_batch) * ((1.0 if w is None else w) / total)).backward()
        results.append(gradients(model))
        model.zero_grad()
    return results


def assert_equal(ours: Gradients, theirs: Gradients) -> None:
    for name, expected in theirs.items():
        got = ours[name]
        if expected is None:
            assert got is None or not got.any(), name
        else:
            assert got is not None, name
            torch.testing.assert_close(got, expected, rtol=EXACT, atol=EXACT, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_bits(results: Sequence[list[Gradients]]) -> None:
    for windows in zip(*results, strict=True):
        for name in windows[0]:
            versions = [gradients[name] for gradients in windows]
            assert all(
                (v is None) == (versions[0] is None) and (v is None or torch.equal(v, versions[0]))  # type: ignore[arg-type]
                for v in versions
            ), name


# -- the law ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """How a test's windows are run."""

    style: str = "iterator"
    attached: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    sparse: bool = False
    set_to_none: bool = True


def wrap(model: nn.Module, setting: Setting) -> tuple[nn.Module, Any]:
    if setting.attached:
        return model, synchronize_gradients(model, **setting.options)
    wrapped = DistributedDataParallel(model, **setting.options)
    return wrapped, wrapped


def run_windows(windows: Sequence[Sequence[Shares]], setting: Setting) -> list[Gradients]:
    rank = choose_communicator().rank
    model, handle = wrap(Net(sparse=setting.sparse), setting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    results = []
    for number, window in enumerate(windows):
        run_window(model, handle, number, rank, window[rank], setting.style)
        results.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=setting.set_to_none)
    return results


def run_window(model: nn.Module, handle: Any, number: int, rank: int, shares: Shares, style: str) -> None:
    def backward(micro_batch: int) -> None:
        weight = shares[micro_batch]
        loss = loss_of(model, number, rank, micro_batch)
        if weight is None:
            loss.backward()
        else:
            handle.backward(loss, weight=weight)

    if style == "iterator":
        for micro_batch in handle.accumulate(range(len(shares))):
            backward(micro_batch)
    elif style == "blocks":
        for micro_batch in range(len(shares)):
            with handle.accumulate(last=micro_batch == len(shares) - 1):
                backward(micro_batch)
        if not shares:
            with handle.accumulate(last=True):
                pass
    else:
        assert style == "no_sync"
        for micro_batch in range(len(shares)):
            with handle.no_sync() if micro_batch < len(shares) - 1 else contextlib.nullcontext():
                handle.backward(loss_of(model, number, rank, micro_batch), weight=shares[micro_batch])


def check(ranks: Ranks, windows: Sequence[Sequence[Shares]], setting: Setting) -> None:
    results = ranks.run(run_windows, windows, setting)
    assert_same_bits(results)
    for ours, theirs in zip(results[0], alone(windows, sparse=setting.sparse), strict=True):
        assert_equal(ours, theirs)


WEIGHT = st.one_of(st.integers(1, 5000).map(float), st.floats(0.01, 100.0))


def drawn_windows(world_size: int, *, fewest: int = 0) -> st.SearchStrategy[list[list[Shares]]]:
    def window(weighted: bool) -> st.SearchStrategy[list[Shares]]:
        weight: st.SearchStrategy[float | None] = WEIGHT if weighted else st.none()
        shares = st.lists(weight, min_size=fewest, max_size=4)
        return st.lists(shares, min_size=world_size, max_size=world_size)

    return st.booleans().flatmap(lambda weighted: st.lists(window(weighted), min_size=1, max_size=4))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@given(data=st.data())
def test_any_micro_batches_and_weights_equal_one_process(world_size: int, data: st.DataObject) -> None:
    """Numbers of micro-batches differ between ranks, down to none; so do token counts. In threads."""
    setting = Setting(
        style=data.draw(st.sampled_from(["iterator", "blocks"])),
        attached=data.draw(st.booleans()),
        options={"bucket_cap_mb": data.draw(st.sampled_from([1e-4, "auto"]))},
        sparse=data.draw(st.booleans()),
        set_to_none=data.draw(st.booleans()),
    )
    check(ThreadRanks(world_size), data.draw(drawn_windows(world_size)), setting)


@given(data=st.data())
def test_the_same_over_processes(process_ranks: RankPool, data: st.DataObject) -> None:
    setting = Setting(style=data.draw(st.sampled_from(["iterator", "blocks"])), attached=data.draw(st.booleans()))
    check(process_ranks, data.draw(drawn_windows(process_ranks.world_size)), setting)


@given(data=st.data())
def test_weights_with_no_sync(data: st.DataObject) -> None:
    """Without a frame: every rank has at least one backward, as nothing else could tell it of the window."""
    check(ThreadRanks(2), data.draw(drawn_windows(2, fewest=1)), Setting(style="no_sync"))


@pytest.mark.parametrize("schedule", ["overlapped", "bucketed", "naive"])
def test_schedules(schedule: str) -> None:
    windows: list[list[Shares]] = [[[3.0, 5.0], [7.0]], [[1.0], []], [[2.0, 2.0], [9.0]], [[4.0], [1.0, 1.0]]]
    check(ThreadRanks(2), windows, Setting(options={"schedule": schedule, "bucket_cap_mb": 1e-4}))


def test_a_short_last_window_divides_by_its_length(ranks: Ranks) -> None:
    n = ranks.world_size
    check(ranks, [[[None] * 3] * n, [[None] * 3] * n, [[None]] * n], Setting())


def test_a_window_in_which_nobody_has_anything(ranks: Ranks) -> None:
    n = ranks.world_size
    check(ranks, [[[2.0, 3.0]] * n, [[]] * n, [[1.0]] * n], Setting())


# -- traffic ------------------------------------------------------------------------------------------------------


class Counting:
    """A communicator that writes down what it is asked to send."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.sent: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        self.sent.append(tensor.numel())
        return self._inner.all_reduce(tensor, op)


def count_traffic(pattern: str, micro_batches: int) -> tuple[int, int]:
    """Collectives with gradients in them, and elements, of the second of two windows."""
    communicator = Counting(choose_communicator())
    model = DistributedDataParallel(Net(), communicator=communicator, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        communicator.sent.clear()
        batches = range(micro_batches)
        if pattern == "baseline":
            for batch in batches:
                loss_of(model, batch, 1).backward()
        elif pattern == "improper no_sync":
            for batch in batches[:-1]:
                loss = loss_of(model, batch, 1)
                with model.no_sync():
                    loss.backward()
            loss_of(model, micro_batches, 1).backward()
        elif pattern == "no_sync":
            for batch in batches[:-1]:
                with model.no_sync():
                    loss_of(model, batch, 1).backward()
            loss_of(model, micro_batches, 1).backward()
        else:
            for batch in model.accumulate(batches):
                model.backward(loss_of(model, batch, 1), weight=3 if pattern == "weighted" else None)
        counted = list(communicator.sent)
        optimizer.step()
        optimizer.zero_grad()
    # Four floats about the weights, or flags of the first windows, are no gradients.
    of_gradients = [numel for numel in counted if numel > len(list(model.parameters()))]
    return len(of_gradients), sum(of_gradients)


@pytest.mark.parametrize("pattern", ["improper no_sync", "no_sync", "accumulate", "weighted"])
def test_a_window_sends_what_one_backward_sends(ranks: Ranks, pattern: str) -> None:
    one = run_once(ranks, count_traffic, "baseline", 1)
    assert ranks.run(count_traffic, pattern, 8) == one
    assert run_once(ranks, count_traffic, "baseline", 8) == [(8 * count, 8 * numel) for count, numel in one]


def extra_collectives(weighted: bool) -> list[int]:
    communicator = Counting(choose_communicator())
    model = DistributedDataParallel(Net(), communicator=communicator)
    for window in range(11):
        communicator.sent.clear()
        for batch in model.accumulate(range(3)):
            model.backward(loss_of(model, batch, window), weight=7 if weighted else None)
        model.zero_grad()
    return communicator.sent


def test_weights_cost_one_small_collective() -> None:
    """After the windows in which the order of gradients is learned."""
    for sent in ThreadRanks(2).run(extra_collectives, True):
        assert len(sent) == 2
        assert min(sent) == 4


# -- several backwards in a micro-batch ---------------------------------------------------------------------------


def two_losses(weights: Sequence[float | None], scaled: bool) -> list[Gradients]:
    rank = choose_communicator().rank
    model = DistributedDataParallel(Net())
    results = []
    for window in range(3):
        for number, weight in enumerate(weights):
            with model.accumulate(last=number == len(weights) - 1):
                for part in range(2):
                    loss = loss_of(model, window, rank, number, part)
                    if weight is None:
                        loss.backward()
                    else:
                        model.backward(loss, weight=weight * (1 + window if scaled else 1))
        results.append(gradients(model))
        model.zero_grad()
    return results


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_two_backwards_in_the_last_micro_batch(world_size: int, weighted: bool) -> None:
    """Without weights a micro-batch counts once and its losses add up; with weights every backward counts."""
    weights: list[float | None] = [4.0, 1.0] if weighted else [None, None]
    results = ThreadRanks(world_size).run(two_losses, weights, weighted)
    assert_same_bits(results)
    for window, ours in enumerate(results[0]):
        model = Net()
        for rank in range(world_size):
            for number, weight in enumerate(weights):
                for part in range(2):
                    share = (weight or 1.0) / (sum(w or 1.0 for w in weights) * world_size * (2 if weighted else 1))
                    (loss_of(model, window, rank, number, part) * share).backward()
        assert_equal(ours, gradients(model))


# -- ranks without data, buffers ----------------------------------------------------------------------------------


def with_buffers() -> tuple[list[torch.Tensor], int]:
    rank = choose_communicator().rank
    model = DistributedDataParallel(Net(buffers=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in range(3):
        for batch in model.accumulate(range(2 if (rank + window) % 2 == 0 else 0)):
            loss_of(model, window, batch, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], model.synchronizer.synchronizations


def test_a_rank_without_micro_batches_takes_part_in_broadcasts(process_ranks: RankPool) -> None:
    results = process_ranks.run(with_buffers)
    for parameters, synchronizations in results:
        assert synchronizations == 3
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0][0], strict=True))


def skipped_micro_batches() -> list[Gradients]:
    rank = choose_communicator().rank
    model = DistributedDataParallel(Net())
    results = []
    for window in range(3):
        for batch in model.accumulate(range(3)):
            if (batch + rank) % 3 == window:
                continue
            loss_of(model, window, rank, batch).backward()
        results.append(gradients(model))
        model.zero_grad()
    return results


def test_a_skipped_micro_batch_counts_nothing() -> None:
    results = ThreadRanks(2).run(skipped_micro_batches)
    assert_same_bits(results)
    for window, ours in enumerate(results[0]):
        model = Net()
        for rank in range(2):
            for batch in range(3):
                if (batch + rank) % 3 != window:
                    (loss_of(model, window, rank, batch) / 4).backward()
        assert_equal(ours, gradients(model))


# -- low precision ------------------------------------------------------------------------------------------------


def large_weights_in_float16() -> list[bool]:
    model = DistributedDataParallel(nn.Linear(4, 4).half())
    finite = []
    for _ in range(3):
        for _ in model.accumulate(range(4)):
            model.backward(model(torch.full((2, 4), 100.0).half()).float().sum(), weight=8192)
        finite.append(all(bool(p.grad.isfinite().all()) for p in model.parameters()))
        model.zero_grad()
    return finite


def test_token_counts_do_not_overflow_float16() -> None:
    for finite in ThreadRanks(2).run(large_weights_in_float16):
        assert finite == [True] * 3


# -- misuse and bad input -----------------------------------------------------------------------------------------


def refuse(case: str) -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer_step = optimizer.step
    if case in ("zero", "zero in place", "clip"):
        with model.accumulate(last=False):
            loss_of(model, 1).backward()
        if case == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        else:
            optimizer.zero_grad(set_to_none=case == "zero")
        with model.accumulate(last=True):
            loss_of(model, 2).backward()
    elif case == "zero before leaving":
        with model.accumulate(last=False):
            loss_of(model, 1).backward()
        optimizer.zero_grad()
        with model.accumulate(last=True):
            pass
    elif case == "step":
        with model.accumulate(last=False):
            loss_of(model, 1).backward()
        optimizer_step()
    elif case == "leftover":
        for _ in range(2):
            for batch in model.accumulate(range(2)):
                loss_of(model, batch).backward()
            optimizer_step()
    elif case == "before the window":
        with model.no_sync():
            loss_of(model, 1).backward()
        for batch in model.accumulate(range(2)):
            loss_of(model, batch).backward()
    elif case == "mixture":
        with model.accumulate(last=False):
            model.backward(loss_of(model, 1), weight=3)
        with model.accumulate(last=True):
            loss_of(model, 2).backward()
    elif case == "mixture over ranks":
        weight = 3 if choose_communicator().rank == 0 else None
        for batch in model.accumulate(range(2)):
            model.backward(loss_of(model, batch), weight=weight)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("zero", "zeroed inside an unfinished window"),
        ("zero in place", "changed .* inside an unfinished window"),
        ("clip", "clipped or unscaled.* inside an unfinished window"),
        ("zero before leaving", "zeroed inside an unfinished window"),
        ("step", r"accumulate\(last=False\)"),
        ("leftover", "zero_grad\\(\\) between two windows"),
        ("before the window", "accumulated before it"),
        ("mixture", "some have none"),
        ("mixture over ranks", "some ranks gave weights"),
    ],
)
def test_misuse_raises_on_every_rank(ranks: Ranks, case: str, words: str) -> None:
    if case == "mixture over ranks" and ranks.world_size == 1:
        return
    for message in ranks.run(outcome, case):
        assert message.startswith("MisuseError"), message
        assert re.search(words, message), message


def outcome(case: str) -> str:
    try:
        refuse(case)
    except MisuseError as error:
        return f"MisuseError {error}"
    return "nothing"


@pytest.mark.parametrize("weight", [0, -1.5, float("nan"), float("inf"), "many", None.__class__])
@pytest.mark.parametrize("framed", [True, False])
def test_a_bad_weight_on_one_rank_is_heard_by_all(weight: Any, framed: bool) -> None:
    results = pool_of(2).run(bad_weight, weight, framed)
    assert results[1][0] == "ConfigurationError"
    assert "weight" in results[1][1]
    assert results[0][0] == "PeerFailedError"
    assert "rank 1" in results[0][1]
    assert all(after for _, _, after in results)


def bad_weight(weight: Any, framed: bool) -> tuple[str, str, bool]:
    rank = choose_communicator().rank
    model = DistributedDataParallel(Net())
    kind = text = ""
    for given_weight in (2.0, weight if rank == 1 else 2.0):
        try:
            with model.accumulate(last=True) if framed else contextlib.nullcontext():
                model.backward(loss_of(model, rank), weight=given_weight)
        except (ConfigurationError, PeerFailedError) as error:
            kind, text = type(error).__name__, str(error)
        model.zero_grad()
    # The next window is as if nothing had been.
    model.backward(loss_of(model, rank), weight=1 + rank)
    theirs = alone_two_ranks()
    assert_equal(gradients(model), theirs)
    return kind, text, True


def alone_two_ranks() -> Gradients:
    model = Net()
    ((loss_of(model, 0) + 2 * loss_of(model, 1)) / 3).backward()
    return gradients(model)


def fail_in_last_micro_batch() -> str:
    rank = choose_communicator().rank
    model = DistributedDataParallel(Net())
    try:
        for number in range(2):
            with model.accumulate(last=number == 1):
                if number == 1 and rank == 0:
                    raise RuntimeError("the data was bad")
                loss_of(model, number, rank).backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.cpu_ranks("on a GPU the others hear of it a window later: test_gpu.py")
def test_an_exception_in_the_last_micro_batch_is_heard_by_all(process_ranks: RankPool) -> None:
    first, *others = process_ranks.run(fail_in_last_micro_batch)
    assert first == "RuntimeError: the data was bad"
    for other in others:
        assert other.startswith("PeerFailedError: ")
        assert "rank 0" in other


def discard_and_go_on() -> Gradients:
    rank = choose_communicator().rank
    model = DistributedDataParallel(Net())
    with model.accumulate(last=False):
        model.backward(loss_of(model, 17), weight=5)
    model.discard()
    with model.accumulate(last=True):
        model.backward(loss_of(model, rank), weight=1 + rank)
    return gradients(model)


def test_discard_gives_a_window_up() -> None:
    for result in ThreadRanks(2).run(discard_and_go_on):
        assert_equal(result, alone_two_ranks())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(((), {}), "either the batches"), (((True,), {}), "got bool"), ((([1],), {"last": True}), "either")],
)
def test_accumulate_says_how_it_is_called(arguments: Any, words: str) -> None:
    def call() -> None:
        model = DistributedDataParallel(Net())
        with pytest.raises(ConfigurationError, match=words):
            model.accumulate(*arguments[0], **arguments[1])

    ThreadRanks(1).run(call)


def test_accumulate_restores_what_was_before() -> None:
    def nested() -> list[bool]:
        model = DistributedDataParallel(Net())
        seen = []
        with model.no_sync():
            with contextlib.suppress(ZeroDivisionError), model.accumulate(last=False):
                raise ZeroDivisionError
            seen.append(model.require_backward_grad_sync)
        seen.append(model.require_backward_grad_sync)
        return seen

    assert ThreadRanks(1).run(nested) == [[False, True]]


def force() -> tuple[int, int]:
    model = DistributedDataParallel(Net())
    with model.no_sync():
        losses = [loss_of(model, batch) for batch in range(3)]
    losses[0].backward()
    losses[1].backward()
    before = model.synchronizer.synchronizations
    with model.force_sync():
        losses[2].backward()
    return before, model.synchronizer.synchronizations


def test_force_sync_overrules_the_forward() -> None:
    assert ThreadRanks(2).run(force) == [(0, 1)] * 2


def many_small(accumulation_dtype: torch.dtype | None, steps: int, set_to_none: bool) -> tuple[float, str, str]:
    """The mean of gradients that are 1 in every micro-batch, and the dtypes in mid-window and after it."""
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False).bfloat16(), accumulation_dtype=accumulation_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weight = next(model.parameters())
    for _ in range(3):
        kinds = []
        for _ in model.accumulate(range(steps)):
            model(torch.ones(1, 3).bfloat16()).sum().backward()
            kinds.append(str(weight.grad.dtype))
        mean = float(weight.grad.max())
        after = str(weight.grad.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return mean, kinds[0], after


@pytest.mark.parametrize("set_to_none", [True, pytest.param(False, marks=pytest.mark.breadth)])
def test_bfloat16_gradients_accumulate_in_float32(set_to_none: bool) -> None:
    for mean, during, after in ThreadRanks(2).run(many_small, torch.float32, 300, set_to_none):
        assert (mean, during, after) == (1.0, "torch.float32", "torch.bfloat16")


def test_bfloat16_alone_loses_them() -> None:
    """The control: without the wider type the sum of 300 ones is 256."""
    for mean, during, after in ThreadRanks(2).run(many_small, None, 300, True):
        assert (mean, during, after) == (pytest.approx(256 / 300, rel=0.01), "torch.bfloat16", "torch.bfloat16")


def wide_in_mixed_model() -> tuple[list[str], list[bool]]:
    plain = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).half(), nn.Linear(4, 2))
    handle = synchronize_gradients(plain, accumulation_dtype=torch.float32)

    def forward() -> torch.Tensor:
        hidden = plain[0](torch.ones(2, 4).bfloat16())
        return plain[2](plain[1](hidden.half()).float())

    for _ in range(3):
        plain.zero_grad()
        for batch in handle.accumulate(range(3)):
            loss = forward().square().mean() * (batch + choose_communicator().rank)
            handle.backward(loss, weight=2)
        handle.clip_grad_norm_(1.0)
    kinds = [str(p.grad.dtype) for p in plain.parameters()]
    handle.detach()
    plain.zero_grad()
    forward().sum().backward()
    return kinds, [p.grad.dtype == p.dtype for p in plain.parameters()]


def test_several_dtypes_each_come_back_as_they_were(process_ranks: RankPool) -> None:
    for kinds, own in process_ranks.run(wide_in_mixed_model):
        assert kinds == ["torch.bfloat16"] * 2 + ["torch.float16"] * 2 + ["torch.float32"] * 2
        assert all(own)


def add_to_changed_means(change: str) -> tuple[float, float]:
    """Means are changed where torch does not see it, and a further backward adds to them."""
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False).bfloat16(), accumulation_dtype=torch.float32)
    weight = next(model.parameters())
    for _ in range(2):
        # A mean that is rounded for the optimizer.
        model(torch.full((1, 2), 1 + 2**-7).bfloat16()).sum().mul(1 + 2**-7).backward()
        if change == "zeroed":
            weight.grad.data.zero_()
        elif change == "moved":
            weight.grad.data = torch.zeros_like(weight)
        else:
            weight.grad.data[0, 0] = 0.0
        model(torch.ones(1, 2).bfloat16()).sum().backward()
        result = weight.grad[0].tolist()
        model.zero_grad()
    return (result[0], result[1])


@pytest.mark.parametrize("change", ["zeroed", "moved", "one"])
def test_a_further_backward_adds_to_what_was_made_of_wide_means(change: str) -> None:
    for first, second in ThreadRanks(2).run(add_to_changed_means, change):
        assert (first, second) == (1.0, pytest.approx(2.0, abs=0.02) if change == "one" else 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_accumulation_dtype_must_be_wide(dtype: torch.dtype) -> None:
    def build() -> None:
        with pytest.raises(ConfigurationError, match="accumulation_dtype"):
            DistributedDataParallel(nn.Linear(2, 2), accumulation_dtype=dtype)

    ThreadRanks(1).run(build)


def narrow_model() -> tuple[DistributedDataParallel, torch.nn.Parameter]:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).bfloat16(), accumulation_dtype=torch.float32)
    return model, next(model.parameters())


def forget_to_zero_narrow(kind: str) -> tuple[list[float], str]:
    """Windows of which one begins with the means of the one before. ``kind``: what happened to these meanwhile."""
    model, weight = narrow_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    for window in range(3):
        try:
            for _ in model.accumulate(range(2)):
                model(torch.ones(1, 1).bfloat16()).sum().backward()
        except MisuseError as error:
            return seen, str(error)
        seen.append(float(weight.grad))
        if kind == "clipped":
            model.clip_grad_norm_(0.5)
        if kind == "looked at":
            model(torch.ones(1, 1).bfloat16())
        optimizer.step()
        if window == 0:
            optimizer.zero_grad()
    return seen, ""


@pytest.mark.parametrize("kind", ["as they were", "clipped", "looked at"])
def test_means_that_were_not_zeroed_are_noticed_in_a_wider_type_too(kind: str) -> None:
    for seen, told in ThreadRanks(2).run(forget_to_zero_narrow, kind):
        assert seen == [1.0, 1.0]
        assert "zero_grad()" in told


def backward_twice_narrow(again: bool) -> list[float]:
    """Two backwards in the last micro-batch, of 1 and 2⁻⁹ times that: bfloat16 cannot hold the sum, nor half of it."""
    model, weight = narrow_model()
    seen = []
    for _ in range(3):
        for micro_batch in model.accumulate(range(2)):
            output = model(torch.ones(1, 1).bfloat16()).sum()
            output.backward(retain_graph=True)
            if micro_batch == 1:
                (model(torch.ones(1, 1).bfloat16()).sum() if again else output).mul(2**-9).backward()
        seen.append(float(model.synchronizer.buckets[0].payload[0]))
        assert weight.grad.dtype is torch.bfloat16
        model.zero_grad()
    return seen


@pytest.mark.parametrize("again", [False, True], ids=["the same forward", "another forward"])
def test_a_second_backward_adds_to_a_mean_that_was_narrowed(again: bool) -> None:
    for seen in ThreadRanks(2).run(backward_twice_narrow, again):
        assert seen == [1 + 2**-10] * 3


def forward_before_the_step() -> tuple[str, float]:
    model, weight = narrow_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kinds: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: kinds.append(str(weight.grad.dtype)))
    model(torch.ones(1, 1).bfloat16()).sum().backward()
    model(torch.ones(1, 1).bfloat16())
    optimizer.step()
    return kinds[0], float(weight.grad)


def test_a_forward_before_the_step_leaves_narrow_gradients() -> None:
    assert ThreadRanks(2).run(forward_before_the_step) == [("torch.bfloat16", 1.0)] * 2


# -- gradients that have no place in a bucket -----------------------------------------------------------------------


class Beside(nn.Module):
    """A sparse gradient, a dense one, and one of a parameter that may be frozen, all with the same mean."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(1, 1, sparse=True, dtype=torch.float64)
        self.dense, self.frozen = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
        self.frozen.requires_grad_(False)

    def forward(self, x: float) -> torch.Tensor:
        return (self.sparse(torch.tensor([0])).sum() + self.dense.sum() + self.frozen.sum()) * x

    def gradients(self) -> list[float]:
        return [0.0 if p.grad is None else float(p.grad.to_dense().sum()) for p in self.parameters()]


def add_to_the_last(before: int) -> tuple[list[float], float]:
    """A second backward in the last micro-batch of the window after ``before`` others, in which all are trained."""
    model, rank = DistributedDataParallel(Beside()), choose_communicator().rank
    for _ in range(before):
        with model.accumulate(last=True):
            model(1.0).backward()
        model.zero_grad()
    model.module.frozen.requires_grad_(True)
    losses = [[rank + 1.0], [rank + 1.0, 10.0 * (rank + 1)]]
    for number, row in enumerate(losses):
        with model.accumulate(last=number == 1):
            for value in row:
                model(value).backward()
    sums = [sum(rank + 1.0 for rank in range(choose_communicator().world_size)) * 12 / 2]
    return model.module.gradients(), sums[0] / choose_communicator().world_size


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_second_backward_adds_to_means_outside_of_buckets(thread_ranks: ThreadRanks, before: int) -> None:
    for gradients, mean in thread_ranks.run(add_to_the_last, before):
        assert gradients == [pytest.approx(mean)] * 3


def forget_to_zero(kind: str) -> str:
    model = DistributedDataParallel(nn.Embedding(1, 1, sparse=True))
    try:
        for _ in range(2):
            for last in (False, True):
                with model.accumulate(last=last):
                    model(torch.tensor([0])).sum().backward()
                    if kind == "in mid-window" and not last:
                        model.module.zero_grad()
    except MisuseError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("kind", "words"), [("never", "still there"), ("in mid-window", "were zeroed")])
def test_windows_of_sparse_gradients_are_watched_too(thread_ranks: ThreadRanks, kind: str, words: str) -> None:
    for said in thread_ranks.run(forget_to_zero, kind):
        assert words in said
