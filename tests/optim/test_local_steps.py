"""Local steps: what ranks agree on is what one process computes from all their trainings, whatever they have sent."""

import copy
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradsync
from gradsync import ConfigurationError, LocalSteps, MismatchError, MisuseError, PeerFailedError
from gradsync.communicator import Communicator, Handle, choose_communicator
from gradsync.core.bucket import Bucket
from gradsync.optim.local_steps import tensor_exchange
from gradsync.optim.local_steps.arguments import Settings, cut
from gradsync.optim.local_steps.recipes import OUTER
from gradsync.reduction import ErrorFeedback, Mean, Quantize, ScatteredMean, TopK
from gradsync.testing import run_ranks
from tests.on_gpu import computes_on_cpu
from tests.ranks import RankPool, ThreadRanks

pytestmark = pytest.mark.timeout(60)

NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
Parameters = list[torch.Tensor]


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def made(*, by_rank: bool = False) -> tuple[int, nn.Sequential, torch.optim.Optimizer]:
    """This rank, and its model with an optimizer."""
    rank = choose_communicator().rank
    model = make_model(seed=rank if by_rank else 0)
    return rank, model, make_optimizer(model)


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    model(batch_of(rank, step).to(dtype)).square().sum().backward()
    optimizer.step()


def values_of(model: nn.Module) -> Parameters:
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(steps: int | Sequence[int], **settings: Any) -> tuple[Parameters, int]:
    """On each rank: its parameters after so many steps and finish(), and how many synchronizations there were."""
    rank, model, optimizer = made(by_rank=True)
    local = LocalSteps(model, optimizer, **settings)
    for step in range(steps if isinstance(steps, int) else steps[rank]):
        take_step(model, optimizer, rank, step)
    local.finish()
    return values_of(model), local.synchronizations


def assert_equal(results: Sequence[Parameters]) -> None:
    for ours in results[1:]:
        assert all(map(torch.equal, results[0], ours))


# -- the reference: all ranks in one process --------------------------------------------------------------------------


class Simulation:
    """What ranks do, said once more and plainly: means over a list of models."""

    def __init__(self, ranks: int, settings: Settings, outer: Callable[..., torch.optim.Optimizer] | None) -> None:
        self.models = [make_model() for _ in range(ranks)]
        self.optimizers = [make_optimizer(model) for model in self.models]
        self.anchors = [nn.Parameter(value) for value in values_of(self.models[0])]
        self.outer = (outer or functools.partial(torch.optim.SGD, lr=1.0))(self.anchors)
        self.settings = settings
        self.runs = cut([anchor.nbytes for anchor in self.anchors], settings.fragments)
        self.changed = set[int]()
        self.pending: dict[int, tuple[int, dict[int, torch.Tensor], list[Parameters]]] = {}

    def run(self, steps: int) -> Parameters:
        for step in range(steps):
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                take_step(model, optimizer, rank, step)
            self.changed = set(range(self.settings.fragments))
            self._merge(step)
            for fragment in range(self.settings.fragments):
                if (step % self.settings.every) + 1 == (fragment + 1) * self.settings.every // self.settings.fragments:
                    self._send(fragment, step + self.settings.delay)
            self._merge(step)
        self._merge(steps + self.settings.every)
        for fragment in sorted(self.changed):
            self._send(fragment, 0)
        self._merge(0)
        return values_of(self.models[0])

    def _send(self, fragment: int, due: int) -> None:
        sent = [values_of(model) for model in self.models]
        gradients = {
            index: self.anchors[index].detach() - torch.stack([values[index] for values in sent]).mean(0)
            for index in self.runs[fragment]
        }
        self.pending[fragment] = (due, gradients, sent)
        self.changed.discard(fragment)

    @torch.no_grad()
    def _merge(self, step: int) -> None:
        for fragment in [number for number, (due, _, _) in self.pending.items() if due <= step]:
            _, gradients, sent = self.pending.pop(fragment)
            for index, gradient in gradients.items():
                self.anchors[index].grad = gradient
            self.outer.step()
            self.outer.zero_grad()
            for model, values in zip(self.models, sent, strict=True):
                parameters = list(model.parameters())
                for index in gradients:
                    parameters[index].add_(self.anchors[index] - values[index])


@pytest.mark.parametrize("outer", [None, NESTEROV], ids=["mean", "nesterov"])
@pytest.mark.parametrize(
    ("every", "fragments", "delay", "steps"), [(4, 1, 0, 10), (4, 1, 3, 10), (6, 3, 0, 14), (7, 2, 2, 16)]
)
def test_ranks_compute_what_one_process_does(
    thread_ranks: ThreadRanks, every: int, fragments: int, delay: int, steps: int, outer: Any
) -> None:
    settings = Settings(every=every, fragments=fragments, delay=delay)
    expected = Simulation(thread_ranks.world_size, settings, outer).run(steps)
    results = thread_ranks.run(train, steps, every=every, fragments=fragments, delay=delay, outer=outer)
    assert_equal([values for values, _ in results])
    for ours, theirs in zip(results[0][0], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def average_after_each_step(steps: int) -> Parameters:
    communicator = choose_communicator()
    _, model, optimizer = made()
    for step in range(steps):
        take_step(model, optimizer, communicator.rank, step)
        for parameter in model.parameters():
            mean = parameter.detach().mul(1.0 / communicator.world_size)
            communicator.all_reduce(mean).wait()
            parameter.data.copy_(mean)
    return values_of(model)


@pytest.mark.parametrize("outer", [None, functools.partial(torch.optim.SGD, lr=1.0)], ids=["none", "one whole step"])
@pytest.mark.cpu_ranks("needs sums in the order of ranks")
def test_after_every_step_it_is_the_mean_of_parameters_bit_for_bit(thread_ranks: ThreadRanks, outer: Any) -> None:
    """On a communicator that adds up in the order of ranks, wherever numbers lie."""
    expected = thread_ranks.run(average_after_each_step, 5)
    results = thread_ranks.run(train, 5, every=1, outer=outer)
    for (values, synchronizations), theirs in zip(results, expected, strict=True):
        assert all(map(torch.equal, values, theirs))
        assert synchronizations == 5, "finish() finds nothing to send"


@given(
    data=st.data(),
    fragments=st.integers(1, 4),
    reduction=st.sampled_from([None, "int8", "int4", "bf16"]),
    outer=st.sampled_from([None, NESTEROV]),
)
def test_whatever_steps_ranks_take_they_end_with_the_same_bits(
    data: st.DataObject, fragments: int, reduction: str | None, outer: Any
) -> None:
    """Also if they take different numbers of them, or none."""
    every = data.draw(st.integers(fragments, 6), "every")
    delay = data.draw(st.integers(0, every // fragments - 1), "delay")
    steps = data.draw(st.lists(st.integers(0, 9), min_size=3, max_size=3), "steps")
    settings = {"every": every, "fragments": fragments, "delay": delay}
    results = run_ranks(train, 3, steps, outer=outer, reduction=reduction, **settings)
    assert_equal([values for values, _ in results])
    assert all(value.isfinite().all() for value in results[0][0])


@given(sizes=st.lists(st.integers(0, 100), min_size=1, max_size=12), data=st.data())
def test_fragments_are_runs_of_about_equal_size(sizes: list[int], data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, len(sizes)))
    runs = cut(sizes, fragments)
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    assert len(runs) == fragments
    assert all(runs)
    assert cut([1] * 12, 4) == [range(0, 3), range(3, 6), range(6, 9), range(9, 12)]


# -- between processes ------------------------------------------------------------------------------------------------


def test_processes_that_stream_compressed_agree(process_ranks: RankPool) -> None:
    steps = list(range(5, 5 + process_ranks.world_size))
    settings: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 1, "outer": NESTEROV}
    results = process_ranks.run(train, steps, reduction=ErrorFeedback(Quantize(8)), **settings)
    assert_equal([values for values, _ in results])
    exact = process_ranks.run(train, steps, **settings)
    for ours, theirs in zip(results[0][0], exact[0][0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


# -- what travels, and when -------------------------------------------------------------------------------------------


def test_bytes_are_those_of_one_model_every_so_many_steps() -> None:
    def work() -> tuple[int, int, int]:
        communicator, sent = choose_communicator(), []
        reduce = communicator.all_reduce
        communicator.all_reduce = lambda tensor, op="sum": (sent.append(tensor.numel()), reduce(tensor, op))[1]  # type: ignore
        _, model, optimizer = made()
        local = LocalSteps(model, optimizer, every=4)
        sent.clear()
        for step in range(16):
            take_step(model, optimizer, communicator.rank, step)
        local.finish()
        return sum(sent), sum(parameter.numel() for parameter in model.parameters()), local.synchronizations

    for numbers, parameters, synchronizations in run_ranks(work, 2):
        assert synchronizations == 4
        assert 4 * parameters <= numbers <= 4 * (parameters + 16), "but for padding and flags"


def test_parameters_are_those_of_rank_0_at_first_and_frozen_ones_are_left_alone(thread_ranks: ThreadRanks) -> None:
    def work() -> tuple[bool, bool]:
        rank = choose_communicator().rank
        model = make_model(seed=rank)
        model[0].requires_grad_(False)
        before = values_of(make_model(seed=0))
        optimizer = make_optimizer(model)
        with LocalSteps(model, optimizer, every=2):
            started = all(map(torch.equal, values_of(model), before))
            for step in range(3):
                take_step(model, optimizer, rank, step)
        return started, torch.equal(model[0].weight, before[0])

    assert thread_ranks.run(work) == [(True, True)] * thread_ranks.world_size


@pytest.mark.parametrize("delay", [0, 1])
def test_floating_point_buffers_are_averaged_and_counters_are_not(thread_ranks: ThreadRanks, delay: int) -> None:
    def work() -> tuple[torch.Tensor, torch.Tensor, int]:
        rank = choose_communicator().rank
        model = nn.Sequential(nn.BatchNorm1d(3), make_model()).double()
        optimizer = make_optimizer(model)
        with LocalSteps(model, optimizer, every=2, delay=delay):
            for step in range(2 + rank):
                take_step(model, optimizer, rank, step)
        return model[0].running_mean, model[0].running_var, int(model[0].num_batches_tracked)

    results = thread_ranks.run(work)
    assert_equal([[mean, variance] for mean, variance, _ in results])
    assert [count for _, _, count in results] == [2 + rank for rank in range(thread_ranks.world_size)]


@pytest.mark.parametrize("reduction", [None, "int8"])
def test_nan_of_one_rank_is_seen_by_all(reduction: str | None) -> None:
    def work() -> bool:
        rank, model, optimizer = made()
        with LocalSteps(model, optimizer, every=4, reduction=reduction):
            take_step(model, optimizer, rank, 0)
            if rank == 1:
                model[2].weight.data[0, 0] = float("nan")
        return bool(model[2].weight[0, 0].isnan())

    assert run_ranks(work, 3) == [True] * 3


def test_narrow_parameters_move_by_less_than_they_can_tell() -> None:
    """Anchors are float32: outer steps below the precision of bfloat16 add up."""

    def work() -> torch.Tensor:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-7)
        with LocalSteps(model, optimizer, every=1, outer=functools.partial(torch.optim.SGD, lr=0.1)):
            for _ in range(40):
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
        return model.weight.detach().float()

    first, second = run_ranks(work, 2)
    assert torch.equal(first, second)
    assert first.item() < 0.99


# -- ranks that are not together --------------------------------------------------------------------------------------


def test_synchronize_waits_for_nobody_who_is_a_step_behind(thread_ranks: ThreadRanks) -> None:
    """As after a step that a GradScaler has skipped on one rank: the others' round comes first, then the whole."""

    def work() -> tuple[list[Parameters], int]:
        rank, model, optimizer = made()
        local = LocalSteps(model, optimizer, every=3, fragments=2, outer=NESTEROV)
        seen = []
        for step in range(6):
            if (rank, step) != (0, 1):
                take_step(model, optimizer, rank, step)
            if step % 3 == 2:
                local.synchronize()
                seen.append(values_of(model))
        local.finish()
        return [*seen, values_of(model)], local.synchronizations

    results = thread_ranks.run(work)
    for moment in zip(*(seen for seen, _ in results), strict=True):
        assert_equal(moment)
    assert len({synchronizations for _, synchronizations in results}) == 1


def test_a_rank_that_raises_is_named_by_the_others() -> None:
    def work() -> str:
        rank, model, optimizer = made()
        local = LocalSteps(model, optimizer, every=2)
        try:
            with local:
                for step in range(6):
                    if (rank, step) == (1, 3):
                        raise ValueError("a broken batch")
                    take_step(model, optimizer, rank, step)
        except ValueError:
            return "raised"
        except PeerFailedError as error:
            assert not optimizer._optimizer_step_post_hooks
            return str(error)
        return "went on"

    first, second, third = run_ranks(work, 3)
    assert second == "raised"
    assert "rank 1 failed" in first
    assert first == third


def test_a_round_that_the_communicator_breaks_changes_nothing_and_is_remembered() -> None:
    def work() -> tuple[bool, str] | None:
        communicator = choose_communicator()
        _, model, optimizer = made()
        local = LocalSteps(model, optimizer, every=2, outer=NESTEROV)
        take_step(model, optimizer, communicator.rank, 0)
        if communicator.rank == 1:
            communicator.abort("its power is gone")
            return None
        plain, other = make_model(), values_of(model)
        plain.load_state_dict(model.state_dict())
        alone = make_optimizer(plain)
        alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        take_step(plain, alone, communicator.rank, 1)
        with pytest.raises(PeerFailedError, match="power"):
            take_step(model, optimizer, communicator.rank, 1)
        for call in (local.synchronize, local.finish, lambda: take_step(model, optimizer, communicator.rank, 2)):
            with pytest.raises(MisuseError, match=r"has failed .*power"):
                call()
        local.close()
        take_step(plain, alone, communicator.rank, 2)
        assert not torch.equal(other[0], values_of(model)[0])
        return all(map(torch.equal, values_of(model), values_of(plain))), repr(local)

    for result in run_ranks(work, 3)[::2]:
        assert result is not None
        assert result[0], "the parameters are those of local steps alone"
        assert "closed" in result[1]


def test_a_wrapped_model_whose_local_steps_were_given_up_refuses_to_go_on() -> None:
    def work() -> int:
        model = gradsync.DistributedDataParallel(make_model(), communicator=choose_communicator())
        optimizer = make_optimizer(model)
        local = LocalSteps(model, optimizer, every=3)
        take_step(model, optimizer, 0, 0)
        if choose_communicator().rank == 0:
            # One rank alone: nobody waits for the others.
            local.close()
            with pytest.raises(MisuseError, match=r"closed before finish\(\).*Wrap the module again"):
                take_step(model, optimizer, 0, 1)
        return local.synchronizations

    assert run_ranks(work, 2) == [0, 0]


def test_local_steps_that_are_forgotten_send_nothing() -> None:
    """What ends with a collective must not end when Python happens to look for garbage, on one rank alone."""

    def work() -> bool:
        communicator = choose_communicator()
        model = gradsync.DistributedDataParallel(make_model(), communicator=communicator)
        optimizer = make_optimizer(model)
        known = weakref.ref(LocalSteps(model, optimizer, every=3))
        take_step(model, optimizer, 0, 0)
        if communicator.rank == 0:
            del model, optimizer
            gc.collect()
        communicator.all_reduce(torch.ones(1)).wait()
        return known() is None

    assert run_ranks(work, 2) == [True, False]


class _Late:
    """A handle whose collective did not come."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def wait(self) -> None:
        self._handle.wait()
        raise PeerFailedError("the second bucket was lost")


class _LosesOne(Mean):
    ends: tuple[bool, ...] = ()

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        handle: Any = super().start(bucket, communicator, divisor)
        return _Late(handle) if bucket.index == 1 else handle  # type: ignore[return-value]

    def window_ended(self, *, succeeded: bool, correction: float | torch.Tensor = 1.0) -> None:
        self.ends += (succeeded,)


def test_no_parameter_is_written_before_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_exchange, "CAP", 0)

    def work() -> tuple[bool, tuple[bool, ...]]:
        rank, reduction = choose_communicator().rank, _LosesOne()
        _, model, optimizer = made()
        local = LocalSteps(model, optimizer, every=9, reduction=reduction)
        take_step(model, optimizer, rank, 0)
        before = values_of(model)
        with pytest.raises(PeerFailedError, match="second bucket"):
            local.synchronize()
        return all(map(torch.equal, before, values_of(model))), reduction.ends

    assert run_ranks(work, 2) == [(True, (False,))] * 2


def test_a_parameter_that_is_unfrozen_is_refused_on_all_ranks() -> None:
    def work() -> str:
        rank = choose_communicator().rank
        model = make_model()
        model[0].bias.requires_grad_(False)
        optimizer = make_optimizer(model)
        LocalSteps(model, optimizer, every=2)
        take_step(model, optimizer, rank, 0)
        model[0].bias.requires_grad_(rank == 1)
        with pytest.raises(gradsync.GradsyncError) as caught:
            take_step(model, optimizer, rank, 1)
        return str(caught.value)

    first, second = run_ranks(work, 2)
    assert "rank 1 failed" in first
    assert "'0.bias' is trained, but was frozen" in second


# -- wrapped models ---------------------------------------------------------------------------------------------------


def window_by_hand(model: nn.Module, rank: int, step: int, weights: Sequence[int]) -> None:
    losses = [model(batch_of(rank, 10 * step + number)).square().mean() for number in range(len(weights))]
    total = sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
    (total / sum(weights)).backward()  # type: ignore[operator]


def window_framed(model: Any, rank: int, step: int, weights: Sequence[int]) -> None:
    for number in model.accumulate(range(len(weights))):
        model.backward(model(batch_of(rank, 10 * step + number)).square().mean(), weight=weights[number])


def window_in_no_sync(model: Any, rank: int, step: int, weights: Sequence[int]) -> None:
    for number, weight in enumerate(weights):
        loss = model(batch_of(rank, 10 * step + number)).square().mean()
        if number < len(weights) - 1:
            with model.no_sync():
                model.backward(loss, weight=weight)
        else:
            model.backward(loss, weight=weight)


def train_windows(window: Callable[..., None] | None) -> tuple[list[Parameters], float]:
    """Local steps of windows that differ between ranks, with clipping: parameters after each, and a norm at the end."""
    rank = choose_communicator().rank
    plain = make_model()
    model: Any = plain if window is None else gradsync.DistributedDataParallel(plain)
    optimizer = make_optimizer(plain)
    local = None if window is None else LocalSteps(model, optimizer, every=100)
    seen = []
    for step in range(1, 3 + rank):
        weights = [2 * number + rank + step for number in range(1 + (rank + step) % 3)]
        (window or window_by_hand)(model, rank, step, weights)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(values_of(plain))
    if local is not None:
        local.finish()
        # Gradients are averaged again.
        model(batch_of(rank, 0)).sum().backward()
        seen.append([parameter.grad.clone() for parameter in plain.parameters() if parameter.grad is not None])
    return seen, float(norm)


@pytest.mark.parametrize("window", [window_framed, window_in_no_sync])
def test_a_window_of_local_steps_is_the_weighted_mean_of_the_rank(thread_ranks: ThreadRanks, window: Any) -> None:
    expected = thread_ranks.run(train_windows, None)
    results = thread_ranks.run(train_windows, window)
    for (ours, norm), (theirs, their_norm) in zip(results, expected, strict=True):
        assert norm == pytest.approx(their_norm, rel=1e-12)
        for mine, plain in zip(itertools.chain(*ours[:-1]), itertools.chain(*theirs), strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-13)
    assert_equal([ours[-1] for ours, _ in results])


@pytest.mark.parametrize("steps", [(8, 8), (9, 5), (7, 0)])
def test_training_that_goes_on_with_means_after_local_steps_keeps_replicas_equal(
    thread_ranks: ThreadRanks, steps: tuple[int, int]
) -> None:
    """Each rank has built up momenta of its own, and counted its own steps, by then."""

    def work() -> tuple[Parameters, Any]:
        rank, plain = choose_communicator().rank, make_model()
        model = gradsync.DistributedDataParallel(plain)
        layers = list(plain.children())
        optimizers = [torch.optim.AdamW(layers[0].parameters()), torch.optim.SGD(layers[2].parameters(), 0.1, 0.9)]
        with LocalSteps(model, optimizers, every=4):
            for step in range(steps[rank % 2]):
                train_one(model, optimizers, rank, step)
        for step in range(20, 24):
            train_one(model, optimizers, rank, step)
        return values_of(plain), [len(each.state) for each in optimizers]

    def train_one(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], rank: int, step: int) -> None:
        model.zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
        for number, each in enumerate(optimizers):
            each.step()
            # As a scheduler that counts a rank's own steps.
            each.param_groups[0]["lr"] *= 0.9 - number / 10

    results = thread_ranks.run(work)
    assert_equal([values for values, _ in results])
    assert all(counts == [2, 2] for _, counts in results)


def test_a_prepared_optimizer_counts_windows(thread_ranks: ThreadRanks) -> None:
    def work() -> tuple[Parameters, int]:
        rank, plain = choose_communicator().rank, make_model()
        accelerator = gradsync.Accelerator(cpu=computes_on_cpu(), gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(plain, make_optimizer(plain))
        with LocalSteps(model, optimizer, every=3) as local:
            for step in range(12):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch_of(rank, step)).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
        return values_of(plain), local.synchronizations

    results = thread_ranks.run(work)
    assert_equal([values for values, _ in results])
    assert [synchronizations for _, synchronizations in results] == [2] * thread_ranks.world_size


def prepared(**settings: Any) -> tuple[gradsync.Accelerator, Any, Any]:
    accelerator = gradsync.Accelerator(cpu=computes_on_cpu(), **settings)
    return accelerator, *accelerator.prepare(*made()[1:])


def test_an_accelerator_takes_local_steps_by_name(thread_ranks: ThreadRanks, tmp_path: Path) -> None:
    """The same as by hand, and goes on from a checkpoint that has each rank's own state."""
    reduction = "top-k:0.3:int4"

    def by_hand() -> Parameters:
        rank, model, optimizer = made()
        local = LocalSteps(model, optimizer, every=3, outer=OUTER, reduction=reduction)
        for step in range(14):
            if step == 7:
                local.synchronize()
            take_step(model, optimizer, rank, step)
        local.finish()
        return values_of(model)

    def by_name(resumes: bool) -> Parameters:
        accelerator, model, optimizer = prepared(local_steps=f"diloco:3:{reduction}")
        for step in range(14):
            if step == 7:
                if not resumes:
                    accelerator.save_state(tmp_path)
                accelerator.load_state(tmp_path)
            if step >= 7 or not resumes:
                take_step(model, optimizer, accelerator.process_index, step)
        accelerator.local_steps[0].finish()
        return values_of(model)

    expected = thread_ranks.run(by_hand)
    assert_equal(expected)
    for resumes in (False, True):
        for ours, theirs in zip(thread_ranks.run(by_name, resumes), expected, strict=True):
            assert all(map(torch.equal, ours, theirs))


def test_an_accelerator_refuses_what_does_not_go_with_local_steps(thread_ranks: ThreadRanks) -> None:
    def work() -> None:
        for wrong, words in (
            ({"local_steps": "diloco"}, "diloco:STEPS needs a number"),
            ({"local_steps": "int4"}, "local steps are one of local:STEPS"),
            ({"local_steps": "local:2", "overlap": "next-forward"}, "exclude each other"),
            ({"local_steps": "local:2", "shard_optimizer": True}, "exclude each other"),
        ):
            with pytest.raises(ConfigurationError, match=words):
                prepared(**wrong)
        accelerator, model, _ = prepared(local_steps="local:2")
        with pytest.raises(ConfigurationError, match="a second one of its model"):
            accelerator.prepare(make_optimizer(model))

    thread_ranks.run(work)


# -- what a lossy reduction holds back --------------------------------------------------------------------------------

ROUNDS = 200


def train_with_feedback(rounds: range, states: list[Any] | None) -> tuple[Parameters, Parameters, Any]:
    """Of one rank: how far anchors came, this rank's share in what was computed, and its state.

    Every 30 rounds it goes on in a new object, from the state of the last, with another number of fragments.
    """
    rank, ranks = choose_communicator().rank, choose_communicator().world_size
    state = None if states is None else states[rank]
    model, optimizer, local, begun = nn.Module(), None, None, None
    computed = [torch.zeros_like(each) for each in make_model().parameters()]
    for number in rounds:
        if local is None or number % 30 == 29:
            if local is not None:
                state = copy.deepcopy({"model": model.state_dict(), "local": local.state_dict()})
                local.close()
            _, model, optimizer = made()
            reduction = ErrorFeedback(TopK(0.2, Quantize(2)))
            local = LocalSteps(model, optimizer, every=9, fragments=1 + number // 30 % 3, reduction=reduction)
            if state is not None:
                model.load_state_dict(state["model"])
                local.load_state_dict(state["local"])
            begun = values_of(model) if begun is None else begun
        before = values_of(model)
        assert optimizer is not None
        take_step(model, optimizer, rank, number)
        for total, old, new in zip(computed, before, model.parameters(), strict=True):
            total += (old - new.detach()) / ranks
        local.synchronize()
    assert local is not None
    assert begun is not None
    moved = [old - new for old, new in zip(begun, values_of(model), strict=True)]
    return moved, computed, {"model": model.state_dict(), "local": local.state_dict()}


def held_back(states: Sequence[Any]) -> Parameters:
    residuals = [state["local"]["reduction"]["residuals"] for state in states]
    return [sum(each[name] for each in residuals) for name, _ in make_model().named_parameters()]  # type: ignore[misc]


def test_what_is_sent_and_what_is_held_back_is_what_was_computed() -> None:
    """Over 200 rounds in objects that come and go. A rank that is lost takes along only what it held back itself."""
    three = run_ranks(train_with_feedback, 3, range(ROUNDS // 2), None)
    survivors = [state for *_, state in three[:2]]
    two = run_ranks(train_with_feedback, 2, range(ROUNDS // 2, ROUNDS), survivors)
    for results, before in ((three, None), (two, survivors)):
        assert_equal([moved for moved, *_ in results])
        kept = held_back([state for *_, state in results])
        assert any(bool(each.any()) for each in kept)
        came = [torch.zeros(())] * len(kept) if before is None else held_back(before)
        for number, (moved, now, then) in enumerate(zip(results[0][0], kept, came, strict=True)):
            computed = sum(shares[number] for _, shares, _ in results)
            assert float((moved + now - computed - then).abs().max()) <= 1e-9


# -- saving -----------------------------------------------------------------------------------------------------------


def begin(saved: dict[str, Any] | None = None, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer, LocalSteps]:
    _, model, optimizer = made()
    local = LocalSteps(model, optimizer, **settings)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        local.load_state_dict(saved["local"])
    return model, optimizer, local


@pytest.mark.parametrize("outer", [None, NESTEROV], ids=["mean", "nesterov"])
def test_a_training_that_was_saved_goes_on_bit_for_bit(thread_ranks: ThreadRanks, outer: Any) -> None:
    def work() -> list[Parameters]:
        rank = choose_communicator().rank
        settings = {"every": 4, "fragments": 2, "delay": 1, "outer": outer}
        model, optimizer, local = begin(reduction=ErrorFeedback(Quantize(4)), **settings)
        for step in range(5):
            take_step(model, optimizer, rank, step)
        local.synchronize()
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "local": local.state_dict()}
        saved = copy.deepcopy(saved)
        results = []
        for resumed in (False, True):
            if resumed:
                model, optimizer, local = begin(saved, reduction=ErrorFeedback(Quantize(4)), **settings)
            for step in range(5, 12):
                take_step(model, optimizer, rank, step)
            local.finish()
            results.append(values_of(model))
        return results

    results = thread_ranks.run(work)
    assert_equal([values for pair in results for values in pair])


def change_key(state: dict[str, Any]) -> None:
    del state["rounds"]


def change_name(state: dict[str, Any]) -> None:
    state["anchors"]["other"] = state["anchors"].pop("0.weight")


def change_shape(state: dict[str, Any]) -> None:
    state["anchors"]["0.weight"] = torch.zeros(2, 2)


def change_groups(state: dict[str, Any]) -> None:
    state["outer"]["param_groups"][0]["params"].pop()


def change_outer(state: dict[str, Any]) -> None:
    state["outer"] = None


def change_held_back(state: dict[str, Any]) -> None:
    state["reduction"]["residuals"]["0.weight"] = torch.zeros(7)


def change_step(state: dict[str, Any]) -> None:
    state["step"] = 9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_key, "'rounds' is missing"),
        (change_name, "a trained parameter '0.weight'"),
        (change_shape, r"'0.weight' has shape \(2, 2\)"),
        (change_groups, "group 0 of the saved optimizer has 3 parameters, and this one's 4"),
        (change_outer, "without an outer optimizer"),
        (change_step, "at step 9"),
        (change_held_back, r"holds back a gradient of shape \(7,\)"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: Any, words: str) -> None:
    def work() -> None:
        model, optimizer, local = begin(every=3, outer=NESTEROV, reduction="int4")
        take_step(model, optimizer, 0, 0)
        local.synchronize()
        state = local.state_dict()
        state["step"] = 1
        change(state)
        with pytest.raises(ConfigurationError, match=words):
            local.load_state_dict(state)
        after = local.state_dict()
        assert after["step"] == 0
        assert all(map(torch.equal, after["anchors"].values(), values_of(model)))

    run_ranks(work, 1)


def test_nothing_is_saved_while_a_fragment_is_on_its_way() -> None:
    def work() -> None:
        model, optimizer, local = begin(every=2, delay=1)
        take_step(model, optimizer, 0, 0)
        take_step(model, optimizer, 0, 1)
        with pytest.raises(MisuseError, match="on its way"):
            local.state_dict()
        local.synchronize()
        local.load_state_dict(local.state_dict())

    run_ranks(work, 1)


# -- what is refused --------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no step": ({"every": 0}, "every is a number of optimizer steps"),
    "half a step": ({"every": 1.5}, "got 1.5"),
    "a truth": ({"every": True}, "got True"),
    "no fragment": ({"fragments": 0}, "fragments is a number"),
    "more fragments than steps": ({"every": 2, "fragments": 3}, "a step of their own"),
    "more fragments than parameters": ({"every": 9, "fragments": 5}, "that trains 4"),
    "a negative delay": ({"delay": -1}, "delay is a number"),
    "too long a delay": ({"every": 8, "fragments": 2, "delay": 4}, "delay=4 is too long"),
    "an optimizer as outer": ({"outer": torch.optim.SGD([torch.zeros(1)], lr=1.0)}, "outer makes an optimizer"),
    "an outer that makes none": ({"outer": list}, "must return a torch.optim.Optimizer, got list"),
    "an outer that fails": ({"outer": functools.partial(torch.optim.SGD, speed=1)}, "could not make"),
    "an outer of something else": (
        {"outer": lambda _: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)},
        "of all parameters",
    ),
    "an unknown reduction": ({"reduction": "int3"}, "int3"),
    "no reduction": ({"reduction": 8}, "a name such as 'int8'"),
    "a class": ({"reduction": Mean}, "a name such as 'int8'"),
    "auto": ({"reduction": "auto"}, "Name one"),
    "shares": ({"reduction": ScatteredMean()}, "leaves it a share"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_makes_no_sense_is_refused_on_all_ranks(case: str) -> None:
    settings, words = BAD[case]

    def work() -> str:
        _, model, optimizer = made()
        # One rank alone has it wrong.
        wrong = settings if choose_communicator().rank == 1 else {}
        with pytest.raises(ConfigurationError) as caught:
            LocalSteps(model, optimizer, **{"every": 4, **wrong})
        assert not optimizer._optimizer_step_post_hooks
        return str(caught.value)

    for message in run_ranks(work, 2):
        assert words in message


def wrong_models() -> Iterator[tuple[str, Callable[[], tuple[Any, Any]], str]]:
    def of(make: Callable[[], Any]) -> Callable[[], tuple[Any, Any]]:
        def made() -> tuple[Any, Any]:
            model = make()
            return model, make_optimizer(model)

        return made

    def sharded() -> tuple[Any, Any]:
        model = gradsync.DistributedDataParallel(make_model())
        return model, gradsync.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def frozen() -> nn.Module:
        return make_model().requires_grad_(False)

    yield "frozen", of(frozen), "no parameter that requires a gradient"
    yield "sharded", sharded, "sharded optimizer"
    yield "a list", lambda: ([make_model()], make_optimizer(make_model())), "needs a module"
    yield "another's optimizer", lambda: (make_model(), make_optimizer(make_model())), "none of the 4 parameters"
    yield "no optimizer", lambda: (make_model(), "sgd"), "got str"


@pytest.mark.parametrize(
    ("make", "words"), [pytest.param(make, words, id=name) for name, make, words in wrong_models()]
)
def test_models_and_optimizers_that_do_not_fit_are_refused(make: Any, words: str) -> None:
    def work() -> None:
        model, optimizer = make()
        with pytest.raises(ConfigurationError, match=words):
            LocalSteps(model, optimizer, every=2)

    run_ranks(work, 1)


def test_a_model_whose_gradients_are_averaged_elsewhere_is_refused() -> None:
    def work() -> None:
        wrapper, attached = gradsync.DistributedDataParallel(make_model()), make_model()
        attachment = gradsync.synchronize_gradients(attached)
        for model in (wrapper.module, attached):
            with pytest.raises(ConfigurationError, match=r"'0.weight' is averaged in every backward"):
                LocalSteps(model, make_optimizer(model), every=2)
        attachment.detach()
        LocalSteps(attached, make_optimizer(attached), every=2)

    run_ranks(work, 2)


def wrapped_by_torch() -> str:
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    with pytest.raises(ConfigurationError) as caught:
        LocalSteps(model, make_optimizer(model), every=2)
    return str(caught.value)


def test_torchs_wrapper_is_refused(process_ranks: RankPool) -> None:
    assert all(".module" in message for message in process_ranks.run(wrapped_by_torch))


@pytest.mark.parametrize("what", ["every", "outer", "shape"])
def test_ranks_that_were_given_different_things_say_so(what: str) -> None:
    def work() -> str:
        other = choose_communicator().rank == 1
        model = nn.Linear(3, 2 if other and what == "shape" else 1)
        outer = functools.partial(torch.optim.SGD, lr=0.5 if other and what == "outer" else 0.7)
        with pytest.raises(MismatchError) as caught:
            LocalSteps(model, make_optimizer(model), every=5 if other and what == "every" else 4, outer=outer)
        return str(caught.value)

    for message in run_ranks(work, 2):
        assert "ranks 0 and 1" in message
        assert what in message


# -- the end ----------------------------------------------------------------------------------------------------------


def test_afterwards_nothing_is_left_behind(thread_ranks: ThreadRanks) -> None:
    def work() -> None:
        rank, model = choose_communicator().rank, make_model()
        first, last = (torch.optim.SGD(model[index].parameters(), lr=0.1) for index in (0, 2))
        local = LocalSteps(model, [first, last], every=2, outer=NESTEROV)
        assert not first._optimizer_step_post_hooks, "the last one's steps count"
        take_step(model, last, rank, 0)
        local.finish()
        local.finish()
        with pytest.raises(MisuseError, match="finished"):
            local.synchronize()
        assert not last._optimizer_step_post_hooks

    thread_ranks.run(work)


def test_no_cycle_keeps_the_model_alive() -> None:
    def work() -> bool:
        _, model, optimizer = made()
        LocalSteps(model, optimizer, every=2)
        reference = weakref.ref(model)
        # Nobody collects meanwhile.
        del model, optimizer
        return reference() is None

    assert run_ranks(work, 1) == [True]
