"""Contract point 7: gradients that are unlike those of a plain module are averaged like all others.

A `Case` is a module and what one window does with it. It runs twice on every rank, side by side: wrapped, and as a
plain copy whose gradients `average_gradients` averages after backward. Every window's gradients and parameters are
compared. The first window learns the order of gradients, later ones overlap; tiny buckets make the order matter.
"""

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradsync import DistributedDataParallel, average_gradients, synchronize_gradients
from gradsync.communicator import choose_communicator
from gradsync.errors import MisuseError
from tests.core.common import TINY, filled, in_processes, in_threads, in_threads_and_processes
from tests.ranks import RankPool, Ranks

pytestmark = pytest.mark.timeout(60)

# torch warns, once a process, that nobody has said whether it shall check them.
torch.sparse.check_sparse_tensor_invariants.disable()

WIDTH = 4


class Case:
    """Builds a module and runs a window on it; the module is either wrapped or plain."""

    steps: ClassVar[int] = 5
    tolerance: ClassVar[float] = 1e-12
    several_buckets: ClassVar[bool] = True
    # Where a rank's loss does not reach the model its gradients are averaged when the optimizer steps.
    at_step: ClassVar[bool] = False
    Module: ClassVar[Any] = None

    def build(self) -> nn.Module:
        return chain(3) if self.Module is None else self.Module()

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        loss_of(model(batch(step, rank))).backward()

    def optimizer(self, parameters: list[nn.Parameter]) -> Any:
        return torch.optim.SGD(parameters, lr=0.05)

    def zero(self, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()


@dataclass(kw_only=True)
class Outcome:
    """What one rank saw: a dictionary per window of gradients (None where there is none) and of parameters."""

    gradients: list[dict[str, Any]] = field(default_factory=list)
    expected_gradients: list[dict[str, Any]] = field(default_factory=list)
    parameters: list[dict[str, Any]] = field(default_factory=list)
    expected_parameters: list[dict[str, Any]] = field(default_factory=list)
    buckets: int = 0

    def note(self, model: nn.Module, reference: nn.Module) -> None:
        """The gradients of a window, those of the reference averaged by now."""
        self.gradients.append(gradients_of(model))
        self.expected_gradients.append(gradients_of(reference))

    def note_step(self, model: nn.Module, reference: nn.Module) -> None:
        self.parameters.append({name: p.detach().clone() for name, p in plain(model).named_parameters()})
        self.expected_parameters.append({name: p.detach().clone() for name, p in reference.named_parameters()})


def run_case(case_class: type[Case], **settings: Any) -> Outcome:
    case, communicator, outcome = case_class(), choose_communicator(), Outcome()
    model = DistributedDataParallel(filled(case.build()), bucket_cap_mb=TINY, **settings)
    reference = filled(case.build())
    optimizers = [case.optimizer(list(plain(m).parameters())) for m in (model, reference)]
    for step in range(case.steps):
        for optimizer in optimizers:
            case.zero(optimizer, step)
        case.window(model, step, communicator.rank)
        if case.at_step:
            optimizers[0].step()
        case.window(reference, step, communicator.rank)
        average_gradients(reference, communicator)
        outcome.note(model, reference)
        for optimizer in optimizers[1:] if case.at_step else optimizers:
            optimizer.step()
        outcome.note_step(model, reference)
    outcome.buckets = len(model.synchronizer.buckets)
    return outcome


def check(outcomes: list[Outcome], tolerance: float = 1e-12) -> None:
    """Contract points 1 and 2: the mean, and the same bits on every rank."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.gradients
        for step, (came, expected) in enumerate(zip(outcome.gradients, outcome.expected_gradients, strict=True)):
            assert_alike(came, expected, tolerance, f"rank {rank}, window {step}, gradient")
            assert_alike(came, outcomes[0].gradients[step], 0.0, f"ranks 0 and {rank}, window {step}, gradient")
        for step, (came, expected) in enumerate(zip(outcome.parameters, outcome.expected_parameters, strict=True)):
            assert_alike(came, expected, tolerance, f"rank {rank}, window {step}, parameter")
            assert_alike(came, outcomes[0].parameters[step], 0.0, f"ranks 0 and {rank}, window {step}, parameter")


def assert_alike(came: dict[str, Any], expected: dict[str, Any], tolerance: float, where: str) -> None:
    assert came.keys() == expected.keys()
    for name, tensor in came.items():
        other = expected[name]
        assert (tensor is None) == (other is None), f"{where} of {name}: {tensor} and {other}"
        if tensor is None:
            continue
        assert tensor.is_sparse == other.is_sparse, f"{where} of {name}: {tensor.layout} and {other.layout}"
        assert tensor.dtype == other.dtype, f"{where} of {name}: {tensor.dtype} and {other.dtype}"
        allowed = max(tolerance, 8 * torch.finfo(tensor.dtype).eps) if tolerance else 0.0
        error = relative_error(tensor, other)
        assert error <= allowed, f"{where} of {name}: relative error {error:.3g} above {allowed}"


def relative_error(came: torch.Tensor, expected: torch.Tensor) -> float:
    came, expected = (t.to_dense() if t.is_sparse else t for t in (came, expected))
    if torch.equal(came, expected):
        return 0.0
    wide = torch.complex128 if came.is_complex() else torch.float64
    came, expected = came.to(wide), expected.to(wide)
    error = (came - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return float("inf") if error.isnan() else float(error)


def gradients_of(model: nn.Module) -> dict[str, Any]:
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in plain(model).named_parameters()
    }


def plain(model: nn.Module) -> Any:
    return model.module if isinstance(model, DistributedDataParallel) else model


def batch(step: int, rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randn(*(shape or (3, WIDTH)), dtype=torch.float64, generator=generator)


def tokens(step: int, rank: int, count: int, bound: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randint(bound, (count,), generator=generator)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean() + output.mean()


def layer(inputs: int = WIDTH, outputs: int = WIDTH, dtype: torch.dtype = torch.float64) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=dtype)


def chain(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(count) for part in (layer(), nn.Tanh())))


def unsynchronized(model: nn.Module) -> Any:
    """The wrapper's no_sync(); nothing for the plain reference, which only ever accumulates."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


# -- shared and repeated ------------------------------------------------------------------------------------------


class TiedWeights(Case):
    """Two modules hold one parameter."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(6, WIDTH, dtype=torch.float64)
            self.body = chain(1)
            self.head = nn.Linear(WIDTH, 6, bias=False, dtype=torch.float64)
            self.head.weight = self.embedding.weight

        def forward(self, words: torch.Tensor) -> Any:
            return self.head(self.body(self.embedding(words)))

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        loss_of(model(tokens(step, rank, 5, 6))).backward()


class ModuleUsedTwice(Case):
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared, self.last = layer(), layer(), layer()

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(self.shared(torch.tanh(self.first(self.shared(x)))))


class ParameterUsedTwice(Case):
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = chain(2)
            self.scale = nn.Parameter(torch.empty(WIDTH, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x * self.scale) * self.scale + self.scale.square()


class UsedDifferentlyByRanks(Case):
    """How often, and whether, a module is used depends on rank and window."""

    steps = 8

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared, self.last = layer(), layer(), layer()

        def forward(self, x: torch.Tensor, times: int) -> Any:
            x = self.first(x)
            for _ in range(times):
                x = torch.tanh(self.shared(x))
            return self.last(x)

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        loss_of(model(batch(step, rank), (step + rank) % 3)).backward()


# -- activation checkpointing -------------------------------------------------------------------------------------


class NonReentrantCheckpoint(Case):
    reentrant = False

    class Module(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.reentrant = reentrant
            self.first, self.middle, self.second, self.last = layer(), chain(2), chain(1), layer()

        def forward(self, x: torch.Tensor) -> Any:
            x = self.first(x)
            for segment in (self.middle, self.second):
                x = checkpoint(segment, x, use_reentrant=self.reentrant, preserve_rng_state=False)
            return self.last(x)

    def build(self) -> nn.Module:
        return self.Module(self.reentrant)


class ReentrantCheckpoint(NonReentrantCheckpoint):
    reentrant = True


class EverythingInReentrantCheckpoints(Case):
    """All gradients become ready inside inner graph tasks, each of which ends before the backward does."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.segments = nn.ModuleList([chain(1), chain(2), chain(1)])

        def forward(self, x: torch.Tensor) -> Any:
            for segment in self.segments:
                x = checkpoint(segment, x, use_reentrant=True, preserve_rng_state=False)
            return x

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        loss_of(model(batch(step, rank).requires_grad_())).backward()


class SharedByReentrantSegments(Case):
    """The shared module's hooks fire once per segment in one backward."""

    steps = 6

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared, self.middle, self.last = layer(), chain(1), layer(), layer()

        def forward(self, x: torch.Tensor) -> Any:
            x = checkpoint(self.shared, self.first(x), use_reentrant=True, preserve_rng_state=False)
            x = checkpoint(self.shared, self.middle(x), use_reentrant=True, preserve_rng_state=False)
            return self.last(x)


class SharedByReentrantSegmentsAsOftenAsTheRankSays(SharedByReentrantSegments):
    """Hooks fire another number of times on each rank: that is its own affair, and buckets stay as they are."""

    class Module(SharedByReentrantSegments.Module):
        times = 1

        def forward(self, x: torch.Tensor) -> Any:
            x = self.first(x)
            for _ in range(self.times):
                x = checkpoint(self.shared, x, use_reentrant=True, preserve_rng_state=False)
            return self.last(x)

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        plain(model).times = 1 + rank
        super().window(model, step, rank)


class SharedByReentrantSegmentsAccumulated(SharedByReentrantSegments):
    def window(self, model: nn.Module, step: int, rank: int) -> None:
        with unsynchronized(model):
            loss_of(model(batch(step, rank + 50))).backward()
        super().window(model, step, rank)


class CalledUnderReentrantCheckpoint(Case):
    """The wrapped model itself is what is checkpointed: its forward with gradients runs inside backward."""

    times = 1

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        x = batch(step, rank).requires_grad_()
        for _ in range(self.times):
            x = checkpoint(model, x, use_reentrant=True, preserve_rng_state=False)
        loss_of(x).backward()


class CalledTwiceUnderReentrantCheckpoint(CalledUnderReentrantCheckpoint):
    times = 2


class CalledUnderNonReentrantCheckpoint(Case):
    def window(self, model: nn.Module, step: int, rank: int) -> None:
        loss_of(checkpoint(model, batch(step, rank), use_reentrant=False, preserve_rng_state=False)).backward()


# -- several forwards, several backwards --------------------------------------------------------------------------


class SeveralForwardsOneBackward(Case):
    def window(self, model: nn.Module, step: int, rank: int) -> None:
        outputs = [model(batch(step, rank + 10 * number)) for number in range(3)]
        (loss_of(outputs[0] * outputs[1]) + loss_of(outputs[2])).backward()


class OutputFedBack(Case):
    """The model's output is its next input, as in a recurrence."""

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        loss_of(model(model(batch(step, rank)))).backward()


class BackwardsOverOneGraph(Case):
    def window(self, model: nn.Module, step: int, rank: int) -> None:
        output = model(batch(step, rank))
        output.square().mean().backward(retain_graph=True)
        output.mean().backward(retain_graph=True)
        output.exp().mean().backward()


class SeparateLosses(Case):
    """Two forwards first, then two backwards, in the opposite order."""

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        first, second = (model(batch(step, rank + 10 * number)) for number in range(2))
        loss_of(second).backward()
        loss_of(first).backward()


class LossesOfDifferentParts(Case):
    """Each backward reaches other parameters."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.left, self.right = layer(), chain(1), chain(1)

        def forward(self, x: torch.Tensor) -> Any:
            x = torch.tanh(self.trunk(x))
            return self.left(x), self.right(x.detach())

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        left, right = model(batch(step, rank))
        loss_of(left).backward()
        loss_of(right).backward()


class SecondOrder(Case):
    """The loss is made of gradients of the parameters."""

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        loss = loss_of(model(batch(step, rank)))
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        torch.stack([gradient.square().sum() for gradient in gradients]).sum().backward()


# -- frozen and unfrozen ------------------------------------------------------------------------------------------


class FrozenAndUnfrozen(Case):
    """Frozen at wrapping, unfrozen, frozen again, unfrozen again; another layer the other way round."""

    steps = 9

    def build(self) -> nn.Module:
        module = chain(3)
        module[0].requires_grad_(False)
        return module

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        plain(model)[0].requires_grad_(step in (2, 3, 7, 8))
        plain(model)[4].requires_grad_(step not in (4, 5))
        super().window(model, step, rank)


class FrozenAndUnfrozenKeepingZeros(FrozenAndUnfrozen):
    def zero(self, optimizer: Any, step: int) -> None:
        optimizer.zero_grad(set_to_none=False)


class UnfrozenWhileAccumulating(Case):
    """The window in which a layer is unfrozen has begun without it."""

    steps = 6

    def build(self) -> nn.Module:
        module = chain(3)
        module[2].requires_grad_(False)
        return module

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        with unsynchronized(model):
            loss_of(model(batch(step, rank + 20))).backward()
            if step == 2:
                plain(model)[2].requires_grad_(True)
            loss_of(model(batch(step, rank + 10))).backward()
        super().window(model, step, rank)


class FrozenDuringOtherBackwards(Case):
    """As a discriminator is while the generator learns: gradients pass through it and leave none behind."""

    steps = 9

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        model.requires_grad_(False)
        generated = batch(step, rank + 10).requires_grad_()
        loss_of(model(generated)).backward()
        model.requires_grad_(True)
        super().window(model, step, rank)


class FrozenDuringOtherBackwardsThenZeroed(FrozenDuringOtherBackwards):
    """The gradients of the last window are still there while the generator learns."""

    def zero(self, optimizer: Any, step: int) -> None:
        pass

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        model.requires_grad_(False)
        loss_of(model(batch(step, rank + 10).requires_grad_())).backward()
        model.requires_grad_(True)
        model.zero_grad()
        loss_of(model(batch(step, rank))).backward()


# -- sparse gradients ---------------------------------------------------------------------------------------------


class Words(nn.Module):
    """An embedding with sparse gradients and a body with dense ones."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH, sparse=True, dtype=torch.float64)
        self.body = chain(2)
        self.tied = tied

    def forward(self, words: torch.Tensor | None, dense: torch.Tensor | None = None) -> Any:
        x = self.embedding(words) if words is not None else dense
        x = self.body(x)
        return F.linear(x, self.embedding.weight) if self.tied else x


class SparseAndDense(list):
    """Two optimizers in one: SparseAdam takes nothing but sparse gradients."""

    def zero_grad(self) -> None:
        for optimizer in self:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self:
            optimizer.step()


class SparseEmbedding(Case):
    """Ranks use different rows, and different numbers of them, some several times."""

    steps = 6
    tolerance = 1e-11  # Adam divides by the root of a square

    def build(self) -> nn.Module:
        return Words()

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        loss_of(model(tokens(step, rank, 2 + 2 * rank, 9))).backward()

    def optimizer(self, parameters: list[nn.Parameter]) -> Any:
        return SparseAndDense(
            [torch.optim.SparseAdam(parameters[:1], lr=0.01), torch.optim.SGD(parameters[1:], lr=0.05)]
        )


class SparseEmbeddingUnusedBySome(SparseEmbedding):
    """In window 1 by rank 0, in window 3 by all but rank 0, in window 4 by everybody."""

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        unused = {1: rank == 0, 3: rank != 0, 4: True}.get(step, False)
        if unused:
            loss_of(model(None, batch(step, rank))).backward()
        else:
            super().window(model, step, rank)


class SparseEmbeddingAccumulated(SparseEmbedding):
    """In a window's first half only rank 0 uses the embedding, in its second only the others."""

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        inputs = [(tokens(step, rank, 2 + rank, 9), None), (None, batch(step, rank))]
        first, second = inputs if rank == 0 else reversed(inputs)
        with unsynchronized(model):
            loss_of(model(*first)).backward()
        loss_of(model(*second)).backward()


class SparseEmbeddingTiedWithDenseUse(Case):
    """The sum of a sparse and a dense gradient is dense; without the embedding the gradient is dense alone."""

    def build(self) -> nn.Module:
        return Words(tied=True)

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        if step == 3 and rank == 0:
            loss_of(model(None, batch(step, rank))).backward()
        else:
            loss_of(model(tokens(step, rank, 3 + rank, 9))).backward()


class SparseOnOneRankDenseOnOthers(Case):
    class Module(Words):
        def forward(self, words: torch.Tensor | None, dense: torch.Tensor | None = None) -> Any:
            x = self.body(self.embedding(words))
            return x if dense is None else x + F.linear(dense, self.embedding.weight.t())

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        dense = batch(step, rank, 3, 9) if (step + rank) % 2 else None
        loss_of(model(tokens(step, rank, 3, 9), dense)).backward()


class OnlySparse(Case):
    """There is no bucket at all."""

    several_buckets = False

    def build(self) -> nn.Module:
        return nn.Embedding(9, WIDTH, sparse=True, dtype=torch.float64)

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        loss_of(model(tokens(step, rank, 2 + rank, 9))).backward()


class SparseEmbeddingBag(Case):
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(9, WIDTH, sparse=True, mode="sum", dtype=torch.float64)
            self.body = chain(1)

        def forward(self, words: torch.Tensor) -> Any:
            return self.body(self.bag(words.view(2, -1)))

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        loss_of(model(tokens(step, rank, 4 + 2 * rank, 9))).backward()


class FunctionalSparseGradient(Case):
    """A sparse gradient that no module announced lands in its bucket; the reference gets it densely."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(9, WIDTH, dtype=torch.float64))
            self.body = chain(1)

        def forward(self, words: torch.Tensor, sparse: bool) -> Any:
            return self.body(F.embedding(words, self.table, sparse=sparse))

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        loss_of(model(tokens(step, rank, 4, 9), isinstance(model, DistributedDataParallel))).backward()


# -- dtypes, shapes, strides --------------------------------------------------------------------------------------


class Parameters(nn.Module):
    """Holds parameters; the output depends on each of them and on the input."""

    def __init__(self, *parameters: torch.Tensor) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)

    def forward(self, x: torch.Tensor) -> Any:
        total = x.new_zeros(())
        for parameter in self.held:
            wide = torch.complex128 if parameter.is_complex() else torch.float64
            weights = torch.arange(1, parameter.numel() + 1, dtype=torch.float64).view(parameter.shape)
            term = (parameter.to(wide) * weights / (1 + parameter.numel()) * x.mean()).sin().sum()
            total = total + (term.real + 2 * term.imag if term.is_complex() else term)
        return total


class ComplexParameters(Case):
    def build(self) -> nn.Module:
        return Parameters(
            torch.empty(3, 2, dtype=torch.complex128),
            torch.empty(5, dtype=torch.float64),
            torch.empty(2, 5, dtype=torch.complex128).t(),
            torch.empty((), dtype=torch.complex128),
            torch.empty(0, 2, dtype=torch.complex128),
        )


class Frozen(torch.optim.SGD):
    """Leaves parameters as they are, so that roundings of low precision do not add up over windows."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.0)


class MixedDtypes(Case):
    """Every dtype has buckets of its own."""

    dtypes: ClassVar[Sequence[torch.dtype]] = (
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.complex64,
    )

    def build(self) -> nn.Module:
        return Parameters(*(torch.empty(size, dtype=dtype) for size in (40, 7, 90) for dtype in self.dtypes))

    def optimizer(self, parameters: list[nn.Parameter]) -> Any:
        return Frozen(parameters)


class HalfPrecision(MixedDtypes):
    dtypes = (torch.float16,)


class Bfloat16(MixedDtypes):
    dtypes = (torch.bfloat16,)


class SinglePrecision(MixedDtypes):
    dtypes = (torch.float32,)


class LayersOfDifferentDtypes(MixedDtypes):
    class Module(nn.Module):
        def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layer(dtype=dtype) for dtype in dtypes if not dtype.is_complex)

        def forward(self, x: torch.Tensor) -> Any:
            for linear in self.layers:
                x = torch.tanh(linear(x.to(linear.weight.dtype)))
            return x

    def build(self) -> nn.Module:
        return self.Module(self.dtypes)


class Autocast(MixedDtypes):
    """Forward in bfloat16, parameters and gradients in float32."""

    def build(self) -> nn.Module:
        return nn.Sequential(*(part for _ in range(3) for part in (layer(dtype=torch.float32), nn.Tanh())))

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(batch(step, rank).float())
        assert output.dtype == torch.bfloat16
        loss_of(output.float()).backward()


class EmptyParameters(Case):
    """0-element parameters, and 0-dimensional ones, among others and alone in a bucket."""

    def build(self) -> nn.Module:
        wide = {"dtype": torch.float64}
        return Parameters(
            torch.empty(0, **wide),
            torch.empty(3, 5, **wide),
            torch.empty(0, 4, **wide),
            torch.empty((), **wide),
            torch.empty(4, 0, dtype=torch.float32),
            torch.empty(7, **wide),
            torch.empty(2, 0, 3, **wide),
        )


class DifferentStrides(Case):
    """Transposed, sliced and channels_last parameters."""

    def build(self) -> nn.Module:
        wide = {"dtype": torch.float64}
        return Parameters(
            torch.empty(5, 3, **wide).t(),
            torch.empty(4, 6, **wide)[:, ::2],
            torch.empty(2, 3, 4, 5, **wide).to(memory_format=torch.channels_last),
            torch.empty(2, 3, 2, 2, 2, **wide).to(memory_format=torch.channels_last_3d),
            torch.empty(3, 1, 1, 1, **wide).to(memory_format=torch.channels_last),
            torch.empty(6, **wide),
        )


class ChannelsLast(Case):
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64)
            self.second = nn.Conv2d(3, 2, 3, padding=1, bias=False, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> Any:
            return self.second(torch.tanh(self.first(x)))

    def build(self) -> nn.Module:
        return self.Module().to(memory_format=torch.channels_last)

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        image = batch(step, rank, 2, 2, 5, 5)
        loss_of(model(image.to(memory_format=torch.channels_last) if step % 2 else image)).backward()
        if isinstance(model, DistributedDataParallel):
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                assert parameter.grad.stride() == parameter.stride(), name


# -- zeroing, hooks, direct use -----------------------------------------------------------------------------------


class ZeroedInPlace(Case):
    def zero(self, optimizer: Any, step: int) -> None:
        optimizer.zero_grad(set_to_none=False)


class ZeroedBothWays(Case):
    steps = 8

    def zero(self, optimizer: Any, step: int) -> None:
        optimizer.zero_grad(set_to_none=step % 4 < 2)


class NeverZeroed(Case):
    """Means accumulate: the mean of (mean so far + new gradient)."""

    def zero(self, optimizer: Any, step: int) -> None:
        pass


class ZeroedInMidWindow(Case):
    """What was accumulated before zero_grad is gone, what comes after it is averaged."""

    set_to_none = True

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        with unsynchronized(model):
            loss_of(model(batch(step, rank + 10))).backward()
            model.zero_grad(set_to_none=self.set_to_none)
            loss_of(model(batch(step, rank + 20))).backward()
        loss_of(model(batch(step, rank))).backward()


class ZeroedInPlaceInMidWindow(ZeroedInMidWindow):
    set_to_none = False


class ZeroedAfterSynchronization(Case):
    """A synchronized backward whose result is thrown away."""

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        loss_of(model(batch(step, rank + 10))).backward()
        model.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model(batch(step, rank))).backward()


class SomeGradientsZeroed(Case):
    """One part of the model starts a window with gradients, the other without."""

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        with unsynchronized(model):
            loss_of(model(batch(step, rank + 10))).backward()
        plain(model)[2 * (step % 3)].zero_grad()
        loss_of(model(batch(step, rank))).backward()


class UserHooks(Case):
    """Hooks of the user change the local gradient before it is averaged: registered before and after wrapping."""

    class Module(nn.Sequential):
        hooked = False

    def build(self) -> nn.Module:
        module = self.Module(*chain())
        module[0].weight.register_hook(lambda gradient: gradient * 3)
        module[2].bias.register_post_accumulate_grad_hook(self.amplify)
        return module

    @staticmethod
    def amplify(parameter: Any) -> None:
        parameter.grad *= 5

    @staticmethod
    def clip(parameter: Any) -> None:
        parameter.grad.clamp_(-0.2, 0.2)

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        module = plain(model)
        if not module.hooked:
            module.hooked = True
            module[4].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
            for part in (module[0].bias, module[2].weight, module[4].bias):
                part.register_post_accumulate_grad_hook(self.clip)
        super().window(model, step, rank)


class LossWithoutModel(Case):
    """On one rank, another one in every window, no gradient reaches the model."""

    steps = 7
    at_step = True

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        output = model(batch(step, rank))
        world_size = choose_communicator().world_size
        if world_size > 1 and step % world_size == rank:
            torch.zeros(3, dtype=torch.float64, requires_grad=True).sum().backward()
        else:
            loss_of(output).backward()


class OutputWithoutParameters(Case):
    """On one rank the output has a graph, but no parameter is in it."""

    steps = 7
    at_step = True

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = chain()

        def forward(self, x: torch.Tensor, skip: bool) -> Any:
            return x * 2 if skip else self.body(x)

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        world_size = choose_communicator().world_size
        skip = world_size > 1 and step % world_size == rank
        loss_of(model(batch(step, rank).requires_grad_(), skip)).backward()


class EvaluatedInBetween(Case):
    """Forwards without gradients: between windows, and between a forward and its backward."""

    def build(self) -> nn.Module:
        without_bias = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        return nn.Sequential(without_bias, nn.BatchNorm1d(WIDTH, dtype=torch.float64), nn.Tanh(), layer())

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        self.evaluate(model, step, rank)
        output = model(batch(step, rank))
        self.evaluate(model, step, rank + 10)
        loss_of(output).backward()

    @staticmethod
    def evaluate(model: nn.Module, step: int, rank: int) -> None:
        model.eval()
        with torch.no_grad():
            model(batch(step, rank + 20))
        with torch.inference_mode():
            model(batch(step, rank + 30))
        model(batch(step, rank + 40))  # with a graph that no backward uses
        model.train()


# -- outputs ------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Record:
    """An output as a dataclass."""

    value: torch.Tensor
    others: dict[str, Any]


class Opaque:
    """An output that nobody can look into."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class OutputOf(nn.Module):
    """Packs its outputs by a function."""

    def __init__(self, pack: Callable[..., Any]) -> None:
        super().__init__()
        self.left, self.right, self.pack = chain(2), layer(), pack

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(self.left(x), self.right(x))


OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tuple": (lambda a, b: (a, b), lambda out: out[0] + out[1]),
    "list": (lambda a, b: [a, None, b, 7], lambda out: out[0] + out[2]),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda out: out["a"] * out["b"]),
    "ordered dict": (lambda a, b: OrderedDict(a=a, b=b), lambda out: out["a"] * out["b"]),
    "named tuple": (Pair, lambda out: out.first - out.second),
    "dataclass": (lambda a, b: Record(a, {"b": b}), lambda out: out.value + out.others["b"]),
    "nested": (lambda a, b: {"x": [(a, Record(b, {}))], "n": 1}, lambda out: out["x"][0][0] * out["x"][0][1].value),
    "one of two used": (lambda a, b: (a, b), lambda out: out[1]),
    "opaque": (lambda a, b: Opaque(a + b), lambda out: out.value),
    "partly opaque": (lambda a, b: (a, Opaque(b)), lambda out: out[0] + out[1].value),
    "function": (lambda a, b: lambda: a + b, lambda out: out()),
}


def case_of_output(kind: str) -> type[Case]:
    pack, unpack = OUTPUTS[kind]

    class OutputCase(Case):
        steps = 6

        def build(self) -> nn.Module:
            return OutputOf(pack)

        def window(self, model: nn.Module, step: int, rank: int) -> None:
            loss_of(unpack(model(batch(step, rank)))).backward()

    return OutputCase


def run_output_case(kind: str) -> Outcome:
    return run_case(case_of_output(kind))


class LeafOutput(Case):
    """The output is a parameter: it has no graph that could be watched."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.empty(WIDTH, dtype=torch.float64))
            self.second = nn.Parameter(torch.empty(3, WIDTH, dtype=torch.float64))

        def forward(self) -> Any:
            return self.first, self.second

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        first, second = model()
        loss_of(first * second * batch(step, rank)).backward()


class NoOutput(Case):
    """The loss leaves the module by another way than its output."""

    reentrant = False

    class Module(nn.Module):
        loss: torch.Tensor

        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.reentrant = reentrant
            self.body, self.last = chain(2), chain(1)

        def forward(self, x: torch.Tensor) -> None:
            if self.reentrant:
                x = checkpoint(self.body, x.requires_grad_(), use_reentrant=True, preserve_rng_state=False)
            else:
                x = self.body(x)
            self.loss = loss_of(self.last(x))

    def build(self) -> nn.Module:
        return self.Module(self.reentrant)

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        model(batch(step, rank))
        plain(model).loss.backward()


class NoOutputWithReentrantCheckpoint(NoOutput):
    reentrant = True


class NoOutputAllInReentrantCheckpoints(Case):
    """No sign of the backward outside inner graph tasks: the step averages what they left."""

    steps = 6
    at_step = True

    class Module(EverythingInReentrantCheckpoints.Module):
        loss: torch.Tensor

        def forward(self, x: torch.Tensor) -> None:
            self.loss = loss_of(super().forward(x))

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        model(batch(step, rank).requires_grad_())
        plain(model).loss.backward()


class DetachedOutput(Case):
    """The output carries no gradient; the loss reaches the parameters directly."""

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        weight = model(batch(step, rank)).detach().sum()
        (weight * sum(parameter.square().sum() for parameter in plain(model).parameters())).backward()


class LossUsesParameters(Case):
    """The output and the parameters themselves, as weight decay by hand does."""

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        decay = sum(parameter.square().sum() for parameter in plain(model).parameters())
        (loss_of(model(batch(step, rank))) + (rank + 1) * decay).backward()


class ParameterUsedByLossOnly(Case):
    """Its gradient becomes ready before any output's."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.empty(3, dtype=torch.float64))
            self.body = chain()

        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x)

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        loss = loss_of(model(batch(step, rank)))
        (loss + rank * plain(model).temperature.exp().sum() * loss.detach()).backward()


class GradientPenalty(Case):
    """autograd.grad runs through the output before the backward does, and again through its own graph."""

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        x = batch(step, rank).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (loss_of(output) + (slope.norm(dim=1) - 1).square().mean()).backward()


class GradientPenaltyAlone(Case):
    """The backward does not run through the output at all."""

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        x = batch(step, rank).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()


class GradientPenaltyOverAccumulation(GradientPenalty):
    """Gradients of an earlier micro-batch are there while autograd.grad runs."""

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        with unsynchronized(model):
            super().window(model, step, rank + 10)
        super().window(model, step, rank)


class GradientsOfSomeInputs(Case):
    """backward(inputs=...) accumulates into the parameters it names and no other."""

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        chosen = list(plain(model).parameters())[:: 1 + step % 2]
        loss_of(model(batch(step, rank))).backward(inputs=chosen)


class CalledThroughSubmodule(Case):
    """The wrapper's forward is bypassed: its hooks on parameters still see the backward."""

    steps = 7

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        if step % 3 == 2:
            loss_of(plain(model)(batch(step, rank))).backward()
        else:
            super().window(model, step, rank)


def all_cases(cases: Iterable[type[Case]]) -> list[type[Case]]:
    """Each with its variants behind it."""
    return [one for case in cases for one in (case, *all_cases(case.__subclasses__()))]


class MovedGradients(Case):
    """``module.to()`` gives gradients other memory, which are then dropped, zeroed in place, or added to."""

    steps = 10

    def zero(self, optimizer: Any, step: int) -> None:
        parameters = optimizer.param_groups[0]["params"]
        for parameter in parameters[step % 2 :]:
            if parameter.grad is not None:
                moved = torch.empty_like(parameter, memory_format=torch.preserve_format)
                parameter.grad.data = moved.copy_(parameter.grad)
        if step % 4:
            optimizer.zero_grad(set_to_none=step % 4 == 1)


class MovedInsideWindow(Case):
    """A module moves between two micro-batches, and before its step."""

    def window(self, model: nn.Module, step: int, rank: int) -> None:
        with unsynchronized(model):
            loss_of(model(batch(step, rank))).backward()
            plain(model)._apply(torch.clone)
        loss_of(model(batch(step + 9, rank))).backward()
        plain(model)._apply(torch.clone)


every_case = pytest.mark.parametrize("case", all_cases(Case.__subclasses__()), ids=lambda case: case.__name__)


@in_threads_and_processes
@every_case
def test_gradients_are_those_of_the_naive_reference(ranks: Ranks, case: type[Case]) -> None:
    """Contract points 7, 1 and 2."""
    outcomes = ranks.run(run_case, case)
    check(outcomes, case.tolerance)
    assert all((outcome.buckets > 1) == case.several_buckets for outcome in outcomes)


def both_schedules() -> Iterator[Any]:
    """Every case with both; which one `make test` leaves out is told by turns."""
    for number, case in enumerate(all_cases(Case.__subclasses__())):
        for which, schedule in enumerate(("bucketed", "naive")):
            marks = [pytest.mark.breadth] if (number + which) % 2 else []
            yield pytest.param(case, schedule, marks=marks, id=f"{case.__name__}-{schedule}")


@pytest.mark.breadth
@in_threads
@pytest.mark.parametrize(("case", "schedule"), list(both_schedules()))
def test_gradients_are_the_same_whenever_buckets_start(ranks: Ranks, case: type[Case], schedule: str) -> None:
    """Contract points 7 and 1."""
    check(ranks.run(run_case, case, schedule=schedule), case.tolerance)


@in_threads_and_processes
@pytest.mark.parametrize("kind", OUTPUTS)
def test_an_output_may_be_anything(ranks: Ranks, kind: str) -> None:
    """Contract point 7; what cannot be looked into is seen when the first gradient is ready."""
    check(ranks.run(run_output_case, kind))


# -- further ways to run a model ----------------------------------------------------------------------------------


def run_in_place(calls: Sequence[str]) -> Outcome:
    """The engine attached to a plain model, which is then called as a whole or by its parts."""
    model, reference, outcome = filled(chain()), filled(chain()), Outcome()
    communicator = choose_communicator()
    handle = synchronize_gradients(model, bucket_cap_mb=TINY)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference)]

    def window(m: Any, step: int, call: str) -> None:
        x = batch(step, communicator.rank)
        if call == "whole":
            loss_of(m(x)).backward()
        elif call == "parts":
            for part in m:
                x = part(x)
            loss_of(x).backward()
        elif call == "first half":
            loss_of(m[0](x)).backward()
        elif call == "accumulated":
            with handle.no_sync() if m is model else contextlib.nullcontext():
                loss_of(m(x)).backward()
            loss_of(m[2](x)).backward()

    for step, call in enumerate(calls):
        for m, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            window(m, step, call)
        average_gradients(reference)
        outcome.note(model, reference)
        for optimizer in optimizers:
            optimizer.step()
        outcome.note_step(model, reference)
    return outcome


@in_threads_and_processes
@pytest.mark.parametrize(
    "calls",
    [
        ["parts"] * 5,
        ["whole", "whole", "whole", "parts", "whole", "parts", "whole"],
        ["first half", "whole", "first half", "parts", "first half", "whole"],
        ["whole", "whole", "whole", "accumulated", "accumulated", "whole", "accumulated"],
    ],
    ids=" ".join,
)
def test_a_model_with_the_engine_attached_may_be_called_by_its_parts(ranks: Ranks, calls: list[str]) -> None:
    """Contract point 7: hooks on the parameters see a backward that no output announced."""
    check(ranks.run(run_in_place, calls))


def run_compiled(place: str) -> Outcome:
    torch._dynamo.reset()
    rank, outcome = choose_communicator().rank, Outcome()
    module, reference = filled(chain()), filled(chain())
    if place == "inside":
        model = DistributedDataParallel(torch.compile(module, backend="aot_eager"), bucket_cap_mb=TINY)
        called: Any = model
    else:
        model = DistributedDataParallel(module, bucket_cap_mb=TINY)
        called = torch.compile(model, backend="aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (module, reference)]
    for step in range(5):
        for m, optimizer in zip((called, reference), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(m(batch(step, rank))).backward()
        average_gradients(reference)
        outcome.note(module, reference)
        for optimizer in optimizers:
            optimizer.step()
    torch._dynamo.reset()
    return outcome


@pytest.mark.program
@in_processes
@pytest.mark.parametrize("place", ["inside", "around"])
def test_a_compiled_module_is_averaged_like_any_other(ranks: RankPool, place: str) -> None:
    """Contract point 7: torch.compile inside the wrapper and around it."""
    check(ranks.run(run_compiled, place))


def run_scaled(bad_rank: int, bad_step: int) -> tuple[list[float], list[torch.Tensor], Outcome]:
    """Train with a GradScaler; on one rank, in one window, a gradient overflows."""
    rank, outcome = choose_communicator().rank, Outcome()
    model = DistributedDataParallel(filled(chain()), bucket_cap_mb=TINY)
    reference = filled(chain())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100) for _ in optimizers]
    scales, weights = [], []
    for step in range(6):
        for m, optimizer, scaler in zip((model, reference), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(m(batch(step, rank)))
            scaler.scale(loss * float("inf") if (rank, step) == (bad_rank, bad_step) else loss).backward()
            if m is reference:
                average_gradients(reference)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        outcome.gradients.append({n: g.nan_to_num(0.0, 0.0, 0.0) for n, g in gradients_of(model).items()})
        outcome.expected_gradients.append({n: g.nan_to_num(0.0, 0.0, 0.0) for n, g in gradients_of(reference).items()})
        scales.append(scalers[0].get_scale())
        weights.append(plain(model)[0].weight.detach().clone())
    return scales, weights, outcome


@in_threads_and_processes
@pytest.mark.parametrize("bad_step", [0, 3])
def test_an_overflow_on_one_rank_makes_every_rank_skip_that_step(ranks: Ranks, bad_step: int) -> None:
    """Contract point 7: the mean with an infinity is an infinity on every rank, so GradScalers stay in step."""
    for bad_rank in (0, ranks.world_size - 1):
        results = ranks.run(run_scaled, bad_rank, bad_step)
        check([outcome for *_, outcome in results])
        for scales, weights, _ in results:
            assert scales == [1024.0] * bad_step + [512.0] * (6 - bad_step)
            unchanged = [torch.equal(before, after) for before, after in itertools.pairwise(weights)]
            assert unchanged == [step == bad_step for step in range(1, 6)]


def run_create_graph() -> Outcome:
    rank, outcome = choose_communicator().rank, Outcome()
    model, reference = DistributedDataParallel(filled(chain()), bucket_cap_mb=TINY), filled(chain())
    for step in range(5):
        for m in (model, reference):
            if step % 2:
                m.zero_grad()
            loss_of(m(batch(step, rank))).backward(create_graph=True)
        average_gradients(reference)
        outcome.note(model, reference)
    model.zero_grad()  # a gradient with a graph and its parameter keep each other alive
    reference.zero_grad()
    return outcome


@in_threads
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_have_a_graph_are_averaged(ranks: Ranks) -> None:
    """Contract point 7: backward(create_graph=True) adds to earlier gradients out of place."""
    check(ranks.run(run_create_graph))


def convert_late() -> None:
    model = DistributedDataParallel(filled(chain()), bucket_cap_mb=TINY)
    loss_of(model(batch(0, 0))).backward()
    model.zero_grad()
    model.module.float()
    loss_of(model(batch(0, 0).float())).backward()


@in_threads
def test_a_model_that_was_converted_after_wrapping_is_refused(ranks: Ranks) -> None:
    with pytest.raises(MisuseError, match=r"was converted after.*float64.*float32.*Convert a model before"):
        ranks.run(convert_late)
