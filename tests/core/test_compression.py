"""Reductions that send fewer bytes: the laws they keep, whatever they are given."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradsync
from gradsync.accelerator import DistributedDataParallelKwargs, GradScalerKwargs
from gradsync.communicator import Communicator, choose_communicator
from gradsync.core.engine import SyncPolicy
from gradsync.core.reduction.codings import Blocks, FourLevels, Noise, Rounded, Signs
from gradsync.errors import ConfigurationError, GradsyncError
from gradsync.reduction import Cast, ErrorFeedback, LowRank, Quantize, Reduction, Sign, TopK
from gradsync.testing import run_ranks
from tests.communicators import WIRES
from tests.ranks import RankPool, pool_of, seeded

pytestmark = pytest.mark.timeout(120)

# Matrices, something with more dimensions, vectors, and one number alone; no multiple of anything.
SHAPES: dict[str, tuple[int, ...]] = {"a": (37, 29), "b": (150,), "c": (), "d": (19, 5, 7), "e": (33, 41)}
MAKERS: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: Cast(torch.bfloat16),
    "float16": lambda: Cast(torch.float16),
    "8 bits": lambda: Quantize(8),
    "4 bits": lambda: Quantize(4),
    "small blocks": lambda: Quantize(8, block=32),
    "at random": lambda: Quantize(4, stochastic=True),
    "2 bits": lambda: Quantize(2),
    "sign": lambda: Sign(),
    "low rank": lambda: LowRank(2),
    "top k": lambda: TopK(0.1),
    "top k in 2 bits": lambda: TopK(0.1, Quantize(2)),
    "top k in 4 bits": lambda: TopK(0.1, Quantize(4, stochastic=True)),
    "all of them": lambda: TopK(1.0),
}
# `make test` tries one of each sort, and is content with that where every example is a training.
ONE_OF_EACH = ("float16", "4 bits", "2 bits", "sign", "low rank", "top k", "top k in 2 bits")
every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ONE_OF_EACH else pytest.mark.breadth) for kind in MAKERS]
)
# Several buckets, in which gradients of several parameters lie.
CAP = 6000 / 2**20


class Given(nn.Module):
    """Its parameters get the gradients that are passed, the last one first."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        terms = [(self.get_parameter(name) * gradient).sum() for name, gradient in gradients.items()]
        return torch.stack(terms).sum()


def draw(window: int, rank: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """In an order that changes with windows."""
    generator = torch.Generator().manual_seed(100 * window + rank)
    names = list(SHAPES)
    names = names[window // 3 % len(names) :] + names[: window // 3 % len(names)]
    return {name: (torch.randn(SHAPES[name], generator=generator) * scale).to(dtype) for name in names}


def mean_of(window: int, ranks: int, **settings: Any) -> dict[str, torch.Tensor]:
    drawn = [draw(window, rank, **settings) for rank in range(ranks)]
    return {name: torch.stack([each[name].double() for each in drawn]).mean(0) for name in SHAPES}


def wrapped(reduction: Reduction, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return gradsync.DistributedDataParallel(Given(dtype), reduction=reduction, **{"bucket_cap_mb": CAP, **options})


def window_of(model: Any, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(gradients).backward()
    return {name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None}


def residuals_of(reduction: ErrorFeedback) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in reduction.state_dict()["residuals"].items()}


def through(coding: Any, values: torch.Tensor) -> torch.Tensor:
    """The values as they are after they were encoded and decoded."""
    coded = torch.empty(len(values), coding.nbytes(values.shape[1]), dtype=torch.uint8)
    coding.encode(values, coded)
    decoded = torch.empty_like(values)
    coding.decode(coded, decoded)
    return decoded


every_coding = pytest.mark.parametrize(
    "coding",
    [Rounded(torch.float16), Blocks(8, 64), Blocks(4, 64), FourLevels(64), Signs(64)],
    ids=["float16", "8 bits", "4 bits", "2 bits", "sign"],
)

# -- codings ----------------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 3), blocks=st.integers(1, 4), exponent=st.integers(-30, 30), seed=st.integers(0, 2**16))
@pytest.mark.parametrize(
    ("coding", "step"),
    [
        (Rounded(torch.bfloat16), 2.0**-8),
        (Rounded(torch.float16), 2.0**-11),
        (Blocks(8, 64), 0.5 / 127),
        (Blocks(4, 64), 0.5 / 7),
        (Blocks(8, 64, Noise(0)), 1 / 127),
    ],
    ids=["bfloat16", "float16", "8 bits", "4 bits", "at random"],
)
def test_what_is_decoded_is_close_to_what_was_encoded(
    coding: Any, step: float, rows: int, blocks: int, exponent: int, seed: int
) -> None:
    """A number is off by at most ``step``, of the largest in its block or of itself."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, blocks * coding.multiple, generator=generator) * 2.0**exponent
    values[:, 1] = 0.0
    decoded = through(coding, values)
    largest = values.unflatten(1, (-1, coding.multiple)).abs().amax(-1, keepdim=True)
    assert ((decoded - values).unflatten(1, (-1, coding.multiple)).abs() <= largest * step * 1.001).all()
    assert (decoded[:, 1] == 0.0).all(), "zeros stay zeros"


@every_coding
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_visible(coding: Any, bad: float) -> None:
    values = torch.ones(1, 2 * max(coding.multiple, 64))
    values[0, 3] = bad
    decoded = through(coding, values)
    assert not decoded[0, 3].isfinite()
    assert decoded[0, -1].isfinite(), "only its block is lost"


@every_coding
def test_zeros_and_the_smallest_numbers_do_no_harm(coding: Any) -> None:
    for value in (0.0, 1e-45, 1e-38, 1e36):
        values = torch.full((1, max(coding.multiple, 64)), value)
        decoded = through(coding, values)
        assert decoded.isfinite().all()
        assert (decoded - values).abs().max() <= max(value * 0.1, 1e-37)
        assert not decoded.signbit().any()


def test_rounding_at_random_is_right_on_average() -> None:
    """Within five standard errors; rounding to the nearest is off by far more."""
    coding = Blocks(4, 64, Noise(1))
    # Neither the blocks of a message nor one message after the other may share their noise.
    blocks, messages = 40, 100
    values = torch.linspace(-1.0, 1.0, 64).repeat(blocks).view(1, -1)
    total, count = torch.zeros(64), blocks * messages
    for _ in range(messages):
        total += through(coding, values).view(blocks, 64).sum(0)
    # Between two levels a number is off by half of their distance, as a standard deviation, at most.
    assert (total / count - values[0, :64]).abs().max() <= 5 * 0.5 / 7 / count**0.5
    assert (through(Blocks(4, 64), values) - values).abs().max() > 5 * 0.5 / 7 / count**0.5


@pytest.mark.parametrize("coding", [FourLevels(64), Signs(64)], ids=["2 bits", "sign"])
@pytest.mark.parametrize("outlier", [1.0, 1e4])
def test_what_is_lost_in_few_bits_is_less_than_what_is_sent(coding: Any, outlier: float) -> None:
    """Otherwise what error feedback holds back would grow."""
    values = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    values[:, 5] *= outlier
    decoded = through(coding, values)
    lost = (values - decoded).unflatten(1, (-1, 64)).square().sum(-1)
    assert (lost < values.unflatten(1, (-1, 64)).square().sum(-1)).all()
    assert (decoded.sign() == values.sign()).all()


@every_coding
def test_numbers_of_float64_decode_to_those_of_float32(coding: Any) -> None:
    values = torch.randn(2, 2 * max(coding.multiple, 64), generator=torch.Generator().manual_seed(0))
    wide = through(coding, values.double())
    assert torch.equal(wide, through(coding, values).double())
    coded = torch.empty(2, coding.nbytes(values.shape[1]), dtype=torch.uint8)
    coding.encode(values, coded)
    left = values.double()
    coding.decode(coded, left, add=-1.0)
    assert torch.equal(left, values.double() - wide), "differences are taken in float64"


# -- the mean ---------------------------------------------------------------------------------------------------------


def one_window(kind: str, dtype: torch.dtype, scale: float) -> dict[str, torch.Tensor]:
    rank = choose_communicator().rank
    return window_of(wrapped(MAKERS[kind](), dtype), draw(0, rank, scale=scale, dtype=dtype))


# How far the mean may be off, in parts of the largest gradient. None: by any part of it.
BOUNDS = {"bfloat16": 2e-2, "float16": 2e-3, "8 bits": 2e-2, "4 bits": 0.3, "small blocks": 2e-2, "at random": 0.6}


@every_kind
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_mean_is_the_same_on_all_ranks_and_close(kind: str, world_size: int) -> None:
    results = run_ranks(one_window, world_size, kind, torch.float32, 1.0)
    for other in results[1:]:
        for name, gradient in results[0].items():
            assert torch.equal(gradient, other[name]), f"{name} differs"
    bound = 1e-6 if world_size == 1 or kind == "all of them" else BOUNDS.get(kind)
    if bound is not None:
        for name, expected in mean_of(0, world_size).items():
            assert (results[0][name] - expected).abs().max() <= bound * 4, name


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_other_types_are_compressed(kind: str, dtype: torch.dtype) -> None:
    results = run_ranks(one_window, 3, kind, dtype, 0.1)
    assert all(gradient.dtype == dtype and gradient.isfinite().all() for gradient in results[0].values())
    for other in results[1:]:
        assert all(torch.equal(gradient, other[name]) for name, gradient in results[0].items())


@pytest.mark.parametrize("scale", [1e7, 1e-9])
def test_float16_neither_overflows_nor_vanishes(scale: float) -> None:
    results = run_ranks(one_window, 3, "float16", torch.float32, scale)
    for name, expected in mean_of(0, 3, scale=scale).items():
        assert (results[0][name] - expected).abs().max() <= 4e-3 * scale, name


def over_processes(kind: str) -> dict[str, torch.Tensor]:
    return one_window(kind, torch.float32, 1.0)


@every_kind
def test_real_processes_have_the_bits_of_threads(process_ranks: RankPool, kind: str) -> None:
    expected = run_ranks(over_processes, process_ranks.world_size, kind)[0]
    for result in process_ranks.run(over_processes, kind):
        if kind == "low rank":
            # Products of matrices may be added up in another order elsewhere.
            assert all(torch.allclose(result[name], gradient, atol=1e-5) for name, gradient in expected.items())
        else:
            assert all(torch.equal(result[name], gradient) for name, gradient in expected.items())


# -- error feedback ---------------------------------------------------------------------------------------------------


def with_feedback(kind: str, windows: int, events: Sequence[str], communicator: Any = None) -> dict[str, Any]:
    """What was applied in all, and what is held back in the end, whatever happens in between."""
    rank = choose_communicator().rank
    reduction = ErrorFeedback(MAKERS[kind]())
    model = wrapped(reduction, communicator=communicator)
    applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for window in range(windows):
        if "rebucket" in events and window == windows // 2:
            model = wrapped(reduction, bucket_cap_mb=1.0)
        if "checkpoint" in events and window == windows // 2:
            state = reduction.state_dict()
            reduction = ErrorFeedback(MAKERS[kind]())
            reduction.load_state_dict(state)
            model = wrapped(reduction)
        if "failure" in events and window % 3 == 1:
            before = residuals_of(reduction)
            fail_one_backward(model, window, rank)
            after = residuals_of(reduction)
            assert all(torch.equal(after[name], value) for name, value in before.items())
        if "not finite" in events and window % 3 == 2:
            before = residuals_of(reduction)
            bad = draw(window, rank)
            if rank == 0:
                bad["e"][0, 0] = float("nan")
            assert not window_of(model, bad)["e"].isfinite().all()
            after = residuals_of(reduction)
            assert all(torch.equal(after[name], value) for name, value in before.items())
        gradients = draw(window, rank)
        if "unused" in events:
            gradients = {name: value for name, value in gradients.items() if is_used(name, window, rank)}
        for name, gradient in window_of(model, gradients).items():
            applied[name] += gradient
    return {"applied": applied, "held": residuals_of(reduction)}


def is_used(name: str, window: int, rank: int) -> bool:
    """There is one that a rank does not use in some windows, and one that nobody uses in others."""
    return not (name == "a" and rank == 1 and window % 3 == 1) and not (name == "b" and window % 4 == 2)


class Explosion(Exception):  # noqa: N818 (it is what is expected)
    pass


def fail_one_backward(model: Any, window: int, rank: int) -> None:
    gradients = draw(window, rank)
    loss = model(gradients)
    handle = None
    if rank == 0:

        def explode(_: torch.Tensor) -> None:
            raise Explosion

        handle = model.module.a.register_hook(explode)
    with pytest.raises((Explosion, GradsyncError)):
        loss.backward()
    if handle is not None:
        handle.remove()


def total_of(windows: int, ranks: int, events: Sequence[str]) -> dict[str, torch.Tensor]:
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for window in range(windows):
        for rank in range(ranks):
            for name, gradient in draw(window, rank).items():
                if "unused" not in events or is_used(name, window, rank):
                    total[name] += gradient.double() / ranks
    return total


def check_law(results: list[dict[str, Any]], expected: dict[str, torch.Tensor], bound: float = 1e-4) -> None:
    """What was applied, the same everywhere, and what ranks hold back are all there was."""
    for name, total in expected.items():
        held = sum(result["held"].get(name, torch.zeros(())).double() for result in results)
        assert (results[0]["applied"][name] + held - total).abs().max() <= bound, name
        assert all(torch.equal(results[0]["applied"][name], result["applied"][name]) for result in results)


def kinds_and_events() -> Iterator[Any]:
    """What is rounded takes one road, however it is coded: there one coding meets every event."""
    for event in ("nothing", "rebucket", "checkpoint", "failure", "not finite", "unused"):
        for kind in MAKERS:
            chosen = kind in ONE_OF_EACH and (event == "nothing" or kind not in ("float16", "sign"))
            yield pytest.param(kind, event, marks=() if chosen else pytest.mark.breadth, id=f"{event}-{kind}")


@pytest.mark.parametrize(("kind", "event"), list(kinds_and_events()))
def test_what_was_applied_and_what_is_held_back_is_all_there_was(kind: str, event: str) -> None:
    # Events happen at least once in each half, and the order of gradients changes between them.
    windows, ranks = 6, 3
    results = run_ranks(with_feedback, ranks, kind, windows, [event])
    check_law(results, total_of(windows, ranks, [event]))
    if kind in ("top k", "top k in 2 bits", "sign", "low rank", "4 bits", "2 bits"):
        assert any(value.abs().max() > 0.01 for value in results[0]["held"].values()), "something was held back"


def with_scales(windows: int) -> dict[str, Any]:
    """Losses are scaled, and the scale grows in every third step; what is applied has none."""
    handler = GradScalerKwargs(init_scale=4.0, growth_factor=8.0, growth_interval=3)
    reduction = ErrorFeedback(TopK(0.1))
    options = DistributedDataParallelKwargs(policy=SyncPolicy(reduction=reduction, bucket_cap_mb=CAP))
    accelerator = gradsync.Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler, options])
    module = Given()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    scales = []
    for window in range(windows):
        with torch.autocast("cpu", enabled=False):
            accelerator.backward(module_loss(model, draw(window, accelerator.process_index)))
        scales.append(accelerator.scaler.get_scale())
        optimizer.step()
        optimizer.zero_grad()
    held = {name: value / accelerator.scaler.get_scale() for name, value in residuals_of(reduction).items()}
    return {"applied": {n: -p.detach().double() for n, p in module.named_parameters()}, "held": held, "scales": scales}


def module_loss(model: Any, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(gradients).float()


def test_what_is_held_back_follows_the_scale_of_the_loss() -> None:
    windows, ranks = 8, 2
    results = pool_of(ranks).run(with_scales, windows)
    assert len(set(results[0]["scales"])) > 2
    check_law(results, total_of(windows, ranks, []), 1e-3)


def by_turns() -> list[str]:
    reduction, outcomes = ErrorFeedback(TopK(0.1)), []
    first, second = wrapped(reduction), wrapped(reduction)
    for model in (first, first, second, second, first):
        try:
            window_of(model, draw(0, 0))
            outcomes.append("right")
        except GradsyncError as error:
            outcomes.append(str(error))
    return outcomes


def test_two_models_cannot_share_what_is_held_back() -> None:
    for outcomes in run_ranks(by_turns, 2):
        assert outcomes[:4] == ["right"] * 4
        assert "two models take turns with one ErrorFeedback" in outcomes[4]


def load_misfit() -> dict[str, torch.Tensor]:
    reduction = ErrorFeedback(TopK(0.1))
    model = wrapped(reduction)
    window_of(model, draw(0, 0))
    before = residuals_of(reduction)
    with pytest.raises(ConfigurationError, match=r"of shape \(3,\) for 'b', whose shape is \(150,\) here"):
        reduction.load_state_dict({"residuals": {"a": torch.ones(37, 29), "b": torch.ones(3)}})
    return {name: value - before[name] for name, value in residuals_of(reduction).items()}


def test_a_state_of_other_shapes_is_refused_and_nothing_changes() -> None:
    for changes in run_ranks(load_misfit, 2):
        assert all(bool((change == 0).all()) for change in changes.values())


def between_hosts(hosts: str, kind: str, windows: int, events: Sequence[str]) -> dict[str, Any]:
    return with_feedback(kind, windows, events, WIRES[hosts](dist.group.WORLD))


@pytest.mark.parametrize(
    ("hosts", "kind", "event"),
    [("hosts-2+2", "4 bits", "unused"), ("hosts-3+1", "4 bits", "nothing"), ("hosts-2+2", "float16", "not finite")],
)
def test_several_ranks_of_a_host_keep_that_law(hosts: str, kind: str, event: str) -> None:
    """They are summed first, and one of them codes for all."""
    windows, ranks = 5, 4
    results = pool_of(ranks).run(between_hosts, hosts, kind, windows, [event])
    check_law(results, total_of(windows, ranks, [event]))


def with_weights(kind: str, windows: int) -> dict[str, Any]:
    """Windows of two micro-batches whose weights differ between windows and ranks, so that means are corrected."""
    rank = choose_communicator().rank
    reduction = ErrorFeedback(MAKERS[kind]())
    model = wrapped(reduction)
    applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for window in range(windows):
        model.zero_grad()
        for number in model.accumulate(range(2)):
            model.backward(model(draw(2 * window + number, rank)), weight=weight_of(window, number, rank))
        for name, parameter in model.module.named_parameters():
            applied[name] += parameter.grad
    return {"applied": applied, "held": residuals_of(reduction)}


def weight_of(window: int, number: int, rank: int) -> int:
    return 1 + (5 * window + 3 * number + 2 * rank) % 7


@every_kind
def test_nothing_is_lost_with_weights_that_change(kind: str) -> None:
    windows, ranks = 6, 3
    results = run_ranks(with_weights, ranks, kind, windows)
    expected = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for window in range(windows):
        parts = [(number, rank) for number in range(2) for rank in range(ranks)]
        total = sum(weight_of(window, *part) for part in parts)
        for number, rank in parts:
            for name, gradient in draw(2 * window + number, rank).items():
                expected[name] += gradient.double() * weight_of(window, number, rank) / total
    check_law(results, expected)


def after_a_bad_window(kind: str, feedback: bool, bad: float) -> list[bool]:
    """Whether means are finite, window by window; in the second one rank has a gradient that is not."""
    rank = choose_communicator().rank
    made = MAKERS[kind]()
    model = wrapped(ErrorFeedback(made) if feedback else made)
    finite = []
    for window in range(4):
        gradients = draw(window, rank)
        if window == 1 and rank == 0:
            gradients["a"][0, 0] = bad
        finite.append(all(bool(value.isfinite().all()) for value in window_of(model, gradients).values()))
    return finite


@pytest.mark.breadth
@every_kind
@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])
def test_one_bad_window_is_one(kind: str, feedback: bool) -> None:
    """Padding between gradients is part of a block, too."""
    for bad in (float("nan"), float("inf")):
        assert run_ranks(after_a_bad_window, 3, kind, feedback, bad) == [[True, False, True, True]] * 3


def without_elements(kind: str, schedule: str) -> list[float]:
    module = nn.Linear(40, 40)
    module.register_parameter("nothing", nn.Parameter(torch.zeros(0, 4)))
    made = ErrorFeedback(MAKERS[kind]())
    model = gradsync.DistributedDataParallel(module, reduction=made, schedule=schedule, bucket_cap_mb=1e-5)  # type: ignore[arg-type]
    for _ in range(2):
        model.zero_grad()
        (model(torch.ones(2, 40)).sum() + model.module.nothing.sum()).backward()
    return [float(model.module.bias.grad.sum())]


@every_kind
def test_parameters_without_elements_need_nothing(kind: str) -> None:
    for schedule in ("overlapped", "naive"):
        assert run_ranks(without_elements, 2, kind, schedule)[0][0] > 0.0


def descend(make: Callable[[], Reduction], steps: int) -> float:
    """How far parameters are from where the mean of the losses is least, which is zero.

    Ranks are pulled apart in one place, by forces that cancel out but are the largest on each: all that is ever sent.
    """
    rank = choose_communicator().rank
    module = nn.Linear(16, 1, bias=False)
    nn.init.ones_(module.weight)
    model = gradsync.DistributedDataParallel(module, reduction=make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pull = torch.zeros(16)
    pull[0] = 3.0 - 6.0 * rank
    for _ in range(steps):
        optimizer.zero_grad()
        weights = model(torch.eye(16)).view(-1)
        (weights.square().sum() / 2 + weights @ pull).backward()
        optimizer.step()
    return float(module.weight.detach().abs().max())


@pytest.mark.breadth
def test_error_feedback_converges_where_the_largest_alone_stand_still() -> None:
    alone, with_memory = (run_ranks(descend, 2, make, 250)[0] for make in (few, few_remembered))
    assert alone > 0.9
    assert with_memory < 0.1


def few() -> Reduction:
    return TopK(1 / 16)


def few_remembered() -> Reduction:
    return ErrorFeedback(TopK(1 / 16))


# -- bytes ------------------------------------------------------------------------------------------------------------


class Weighing:
    """A communicator that adds up what this rank sends, as rings and pairwise exchanges do."""

    def __init__(self, inner: Communicator) -> None:
        self._inner, self.nbytes = inner, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _of_all(self) -> float:
        return (self._inner.world_size - 1) / self._inner.world_size

    def all_reduce(self, tensor: torch.Tensor, *args: Any) -> Any:
        self.nbytes += 2 * tensor.nbytes * self._of_all()
        return self._inner.all_reduce(tensor, *args)

    def all_gather(self, output: torch.Tensor, *args: Any) -> Any:
        self.nbytes += output.nbytes * self._of_all()
        return self._inner.all_gather(output, *args)

    def all_to_all(self, output: torch.Tensor, *args: Any) -> Any:
        self.nbytes += output.nbytes * self._of_all()
        return self._inner.all_to_all(output, *args)


def weigh(make: Callable[[], Reduction] | None) -> float:
    """Bytes of one window once everything is learned, of a small transformer's matrices."""
    communicator = Weighing(choose_communicator())
    with seeded(0):
        layers = [nn.Sequential(nn.Linear(256, 768), nn.Linear(768, 256)) for _ in range(3)]
    options = {} if make is None else {"reduction": make()}
    model = gradsync.DistributedDataParallel(
        nn.Sequential(*layers), communicator=communicator, bucket_cap_mb=2.0, **options
    )
    for _ in range(3):
        before = communicator.nbytes
        model.zero_grad()
        model(torch.randn(2, 256)).sum().backward()
    return communicator.nbytes - before


@functools.cache
def weigh_mean(world_size: int) -> float:
    return run_ranks(weigh, world_size, None)[0]


@pytest.mark.breadth
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("make", "bound"),
    [
        pytest.param(make, bound, marks=() if kind in ONE_OF_EACH else pytest.mark.breadth, id=kind)
        for kind, make, bound in (
            ("bfloat16", functools.partial(Cast, torch.bfloat16), 0.51),
            ("float16", functools.partial(Cast, torch.float16), 0.51),
            ("8 bits", functools.partial(Quantize, 8), 0.27),
            ("4 bits", functools.partial(Quantize, 4), 0.145),
            ("2 bits", functools.partial(Quantize, 2), 0.08),
            ("sign", Sign, 0.045),
            ("low rank", lambda: ErrorFeedback(LowRank(4)), 0.05),
            ("top k", functools.partial(TopK, 0.01), 0.03),
            ("top k in 2 bits", functools.partial(TopK, 0.01, Quantize(2)), 0.01),
        )
    ],
)
def test_bytes(make: Callable[[], Reduction], bound: float, world_size: int) -> None:
    assert run_ranks(weigh, world_size, make)[0] <= bound * weigh_mean(world_size)


def weigh_local_steps(every: int) -> float:
    """Bytes a step, of the same matrices, over two cycles."""
    communicator = Weighing(choose_communicator())
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 768), nn.Linear(768, 256)) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gradsync.LocalSteps(model, optimizer, every=every, group=communicator)
    before = communicator.nbytes
    for _ in range(2 * every):
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (communicator.nbytes - before) / (2 * every)


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_of_local_steps(world_size: int) -> None:
    assert run_ranks(weigh_local_steps, world_size, 16)[0] <= weigh_mean(world_size) / 15


def weigh_link(make: Callable[[], Reduction] | None) -> float:
    """Bytes that this rank sends to the other host, of two with two ranks each."""
    communicator: Any = WIRES["hosts-2+2"](dist.group.WORLD)
    communicator.between = Weighing(communicator.between)
    model = gradsync.DistributedDataParallel(nn.Linear(256, 768), communicator=communicator, reduction=make and make())
    for _ in range(3):
        before = communicator.between.nbytes
        model.zero_grad()
        model(torch.randn(2, 256)).sum().backward()
    return communicator.between.nbytes - before


def test_ranks_of_a_host_send_once() -> None:
    exact = pool_of(4).run(weigh_link, None)
    for eighth, whole in zip(pool_of(4).run(weigh_link, functools.partial(Quantize, 8)), exact, strict=True):
        assert eighth <= 0.27 * whole


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Quantize(3), "8, 4, 2 bits, got 3"),
        (lambda: Quantize(2, stochastic=True), "Use 4 or 8 bits"),
        (lambda: TopK(0.1, TopK(0.1)), "Quantize(2), got TopK(0.1)"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(Sign(), decay=0.0), "above 0 and at most 1"),
        (lambda: gradsync.reduction.reduction_by_name("top-k:0.1:int3"), "int4, int2, sign, got 'int3' in"),
        (lambda: gradsync.reduction.reduction_by_name("top-k:2:int2"), "at most 1, got 2.0"),
        (lambda: Quantize(8, block=100), "multiple of 32 numbers, got 100"),
        (lambda: Sign(block=0), "multiple of 32"),
        (lambda: TopK(0.0), "above 0"),
        (lambda: TopK(1.5), "at most 1, got 1.5"),
        (lambda: LowRank(0), "at least 1, got 0"),
        (lambda: LowRank(4, start_after=-1), "number of windows, got -1"),
        (lambda: ErrorFeedback(gradsync.reduction.Mean()), "got Mean()"),  # type: ignore[arg-type]
        (lambda: Cast(torch.int8), "floating-point dtype"),
    ],
)
def test_bad_settings_are_named(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert words in str(caught.value)


def test_a_rank_that_no_matrix_has_is_refused_at_wrapping() -> None:
    def wrap() -> str:
        with pytest.raises(ConfigurationError) as caught:
            wrapped(LowRank(40))
        return str(caught.value)

    for message in run_ranks(wrap, 2):
        assert "'e', of shape (33, 41)" in message
