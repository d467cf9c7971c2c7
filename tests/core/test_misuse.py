"""Contract points 9, 10 and 11: what cannot be right is refused, on every rank, with what was expected, what came and
what to do; and after a failed backward training goes on exactly once the half-made gradients are zeroed.
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradsync import (
    ConfigurationError,
    DistributedDataParallel,
    MisuseError,
    PeerFailedError,
    average_gradients,
    synchronize_gradients,
)
from gradsync.communicator import Communicator, InProcessWorld, choose_communicator
from gradsync.core.engine.synchronizer import synchronizer_of
from gradsync.errors import NoProcessGroupError
from gradsync.reduction import Cast
from tests.core.common import TINY, filled, in_processes, in_threads, in_threads_and_processes, on
from tests.ranks import Ranks

pytestmark = pytest.mark.timeout(60)

# torch warns, once a process, that nobody has said whether it shall check them.
torch.sparse.check_sparse_tensor_invariants.disable()

WIDTH = 4


# The class and the text of an error, as a rank reports it.
Raised = tuple[str, str]


def alone() -> Communicator:
    return InProcessWorld(1).communicator(0)


def linear(*args: Any, **kwargs: Any) -> nn.Linear:
    return nn.Linear(*(args or (WIDTH, WIDTH)), dtype=torch.float64, **kwargs)


def net(seed: int = 0) -> nn.Sequential:
    module: nn.Sequential = filled(nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear()), seed)
    return module


def batch(*key: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(key) & 0xFFFF_FFFF)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean() + output.mean()


def error_of(action: Callable[[], object]) -> Raised | None:
    """What the action raises, if it does."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def values_of(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def same_bits(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(these, those, strict=True))


def assert_close(came: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(came, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


# -- what cannot be wrapped ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call", [DistributedDataParallel, synchronize_gradients, average_gradients], ids=lambda call: call.__name__
)
def test_without_a_process_group_the_error_says_how_to_get_one(call: Callable[[nn.Module], Any]) -> None:
    assert issubclass(NoProcessGroupError, ConfigurationError)
    with pytest.raises(NoProcessGroupError, match=r"torchrun.*init_process_group.*communicator="):
        call(net())


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def with_lazy_layer() -> nn.Module:
    return nn.Sequential(linear(), nn.LazyLinear(3))


def on_meta() -> nn.Module:
    return nn.Sequential(linear(), nn.Linear(3, 3, device="meta"))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (frozen, r"Sequential has no parameter that requires a gradient.*unfreeze"),
        (nn.Tanh, r"Tanh has no parameter that requires a gradient.*Use the module itself"),
        (with_lazy_layer, r"'1\.weight' is not initialized.*Run a forward"),
        (on_meta, r"'1\.weight' is on the meta device.*to_empty"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("wrap", [DistributedDataParallel, synchronize_gradients], ids=lambda wrap: wrap.__name__)
def test_a_module_that_has_nothing_to_average_is_refused(
    build: Callable[[], nn.Module], message: str, wrap: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrap(build(), communicator=alone())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket_cap_mb": 0}, r"positive number of MiB, got 0\b.*Leave bucket_cap_mb out"),
        ({"bucket_cap_mb": -1.5}, r"positive number of MiB, got -1\.5"),
        ({"bucket_cap_mb": float("nan")}, r"positive number of MiB, got nan"),
        ({"bucket_cap_mb": float("inf")}, r"positive number of MiB, got inf"),
        ({"bucket_cap_mb": "huge"}, r"positive number of MiB, got 'huge'"),
        ({"bucket_cap_mb": [1, 0]}, r"positive number of MiB, got 0\b"),
        ({"bucket_cap_mb": []}, r"MiB, got \[\]"),
        ({"bucket_cap_mb": [1, "big"]}, r"positive number of MiB, got 'big'"),
        ({"schedule": "eager"}, r"schedule must be one of overlapped, bucketed, naive, got 'eager'"),
        ({"reduction": 8}, r"reduction must be a Reduction.*Mean\(\), got 8"),
        (
            {"reduction": "int3"},
            r"a reduction is one of mean, bf16, .*low-rank:RANK, top-k:FRACTION\[:FORMAT\], got 'int3'",
        ),
        ({"reduction": "low-rank"}, r"low-rank:RANK needs a number, got 'low-rank'"),
        ({"reduction": "top-k:0"}, r"above 0 and at most 1, got 0\.0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("wrap", [DistributedDataParallel, synchronize_gradients], ids=lambda wrap: wrap.__name__)
def test_settings_that_cannot_be_honoured_are_refused(
    settings: dict[str, Any], message: str, wrap: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrap(net(), communicator=alone(), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket_cap_mb_list": [0.0]}, r"positive number of MiB, got 0\.0"),
        ({"bucket_cap_mb_list": [1.0], "bucket_cap_mb": 2}, r"bucket_cap_mb or bucket_cap_mb_list, not both"),
        ({"delay_all_reduce_named_params": []}, r"param_to_hook_all_reduce belong together"),
        ({"param_to_hook_all_reduce": nn.Parameter(torch.zeros(1))}, r"delay_all_reduce_named_params and "),
        ({"device_ids": [0]}, r"modules on one GPU; this module's parameters are on \['cpu'\]\. Leave both out"),
        ({"output_device": 0}, r"modules on one GPU"),
        ({"device_ids": [0, 1]}, r"device_ids must be None or hold one device, got \[0, 1\]"),
        ({"process_group": object()}, r"pass one of .* got communicator and process_group"),
        ({"device_mesh": object()}, r"pass one of .* got communicator and device_mesh"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_arguments_of_torchs_wrapper_that_cannot_be_honoured_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DistributedDataParallel(net(), communicator=alone(), **settings)


@pytest.mark.parametrize(
    ("call", "name"),
    [(DistributedDataParallel, "DistributedDataParallel"), (synchronize_gradients, "synchronize_gradients")],
)
def test_an_unknown_keyword_argument_is_refused_by_what_was_called(call: Any, name: str) -> None:
    refused = rf"^{name}\(\) got an unexpected keyword argument "
    with pytest.raises(TypeError, match=refused + r"'bucket_size'\. Did you mean 'bucket_cap_mb'\?$"):
        call(net(), communicator=alone(), bucket_size=3)
    with pytest.raises(TypeError, match=refused + r"'qqq'$"):
        call(net(), communicator=alone(), reduction="int8", qqq=3)


def test_only_one_way_to_name_the_ranks_is_taken() -> None:
    """By the wrapper and in place: which of the two was meant is not to be guessed."""
    with pytest.raises(ConfigurationError, match="process_group and device_mesh"):
        DistributedDataParallel(net(), process_group=object(), device_mesh=object())
    with pytest.raises(ConfigurationError, match=r"communicator and process_group"):
        synchronize_gradients(net(), communicator=alone(), process_group=alone())


def test_a_refused_module_is_left_as_it_was() -> None:
    module = net()
    before = values_of(module)
    for settings in ({"bucket_cap_mb": 0}, {"schedule": "eager"}, {"device_ids": [0]}):
        with pytest.raises(ConfigurationError):
            DistributedDataParallel(module, communicator=alone(), **settings)  # type: ignore[arg-type]
    assert same_bits(values_of(module), before)
    for parameter in module.parameters():
        assert synchronizer_of(parameter) is None
        assert not parameter._post_accumulate_grad_hooks
    module[0].scale = nn.Parameter(torch.ones(1))
    DistributedDataParallel(module, communicator=alone())(batch(0))


# -- replicas that differ -----------------------------------------------------------------------------------------


def conv(memory_format: torch.memory_format) -> nn.Module:
    return nn.Conv2d(2, 3, 3).to(memory_format=memory_format)


def named(name: str) -> nn.Module:
    module = net()
    module.add_module(name, linear())
    return module


def partly_frozen(*layers: int) -> nn.Module:
    module = net()
    for layer in layers:
        module[layer].requires_grad_(False)
    return module


# The usual model and settings, the odd ones, and what the error must say of them: where, and the two values.
DIFFERENCES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, str, str]]] = {
    "name": ((named, "last"), (named, "end"), ("name", "last.weight", "end.weight")),
    "shape": ((linear, 4, 4), (linear, 4, 5), ("weight", "[4, 4]", "[5, 4]")),
    "dtype": ((nn.Linear, 2, 2), (linear, 2, 2), ("weight", "torch.float32", "torch.float64")),
    "stride": (
        (conv, torch.contiguous_format),
        (conv, torch.channels_last),
        ("weight", "[18, 9, 3, 1]", "[18, 1, 6, 2]"),
    ),
    "requires_grad": ((partly_frozen,), (partly_frozen, 2), ("2.weight", "True", "False")),
    "sparse": ((nn.Embedding, 3, 2), (lambda: nn.Embedding(3, 2, sparse=True),), ("weight", "False", "True")),
    "more parameters": ((net,), (named, "extra"), ("extra.weight", "", "")),
    "bias": ((linear,), (lambda: linear(bias=False),), ("bias", "", "")),
}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str, str]]] = {
    "bucket size": ({"bucket_cap_mb": 1.0}, {"bucket_cap_mb": 2.0}, ("bucket_cap_mb", "1.0", "2.0")),
    "bucket sizes": ({"bucket_cap_mb": [1, 2]}, {"bucket_cap_mb": [1, 3]}, ("bucket_cap_mb", "[1, 2]", "[1, 3]")),
    "automatic buckets": ({}, {"bucket_cap_mb": 2.0}, ("bucket_cap_mb", "auto", "2.0")),
    "schedule": ({}, {"schedule": "naive"}, ("schedule", "overlapped", "naive")),
    "reduction": ({}, {"reduction": Cast(torch.bfloat16)}, ("reduction", "Mean()", "Cast(torch.bfloat16)")),
}


def wrap_differently(kind: str, odd_rank: int, in_place: bool) -> Raised | None:
    odd = choose_communicator().rank == odd_rank
    if kind in DIFFERENCES:
        (build, *args), settings = DIFFERENCES[kind][odd], {}
    else:
        (build, *args), settings = (net,), SETTINGS[kind][odd]
    module = build(*args)
    before = values_of(module)
    wrap = synchronize_gradients if in_place else DistributedDataParallel
    answer = error_of(lambda: wrap(module, **settings))
    assert same_bits(values_of(module), before)
    return answer


@in_threads_and_processes
@pytest.mark.parametrize("kind", [*DIFFERENCES, *SETTINGS])
def test_replicas_that_differ_are_refused_on_every_rank(ranks: Ranks, kind: str) -> None:
    """Contract point 9: the error names the first difference and both ranks, and no value was changed."""
    where, usual, odd = {**DIFFERENCES, **SETTINGS}[kind][2]
    for odd_rank, in_place in ((ranks.world_size - 1, False), (0, True)):
        answers = ranks.run(wrap_differently, kind, odd_rank, in_place)
        assert len(set(answers)) == 1, answers
        assert answers[0] is not None
        name, text = answers[0]
        assert name == "MismatchError"
        other = odd_rank or 1
        assert f"ranks 0 and {other} differ" in text
        values = (odd, usual) if odd_rank == 0 else (usual, odd)
        assert where in text
        assert re.search(rf"rank 0 has .*{re.escape(values[0])}.*rank {other} has .*{re.escape(values[1])}", text), text
        assert "Build the same model with the same settings" in text


@in_threads_and_processes
def test_a_group_that_refused_a_mismatch_goes_on_working(ranks: Ranks) -> None:
    """Contract point 9: nobody is left in a collective that the others do not join."""
    assert ranks.run(mismatch_then_train) == ["MismatchError"] * ranks.world_size


def mismatch_then_train() -> str:
    rank = choose_communicator().rank
    refused = error_of(lambda: DistributedDataParallel(linear(WIDTH, 2 + rank)))
    model, reference = DistributedDataParallel(net(), bucket_cap_mb=TINY), net()
    for m in (model, reference):
        loss_of(m(batch(rank))).backward()
    average_gradients(reference)
    assert_close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    return refused[0] if refused else "nothing"


# -- parameters added after wrapping ------------------------------------------------------------------------------


class WithList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([net()])

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def add_parameter(module: Any) -> None:
    module.scale = nn.Parameter(torch.ones(1))


def add_parameter_deep_inside(module: Any) -> None:
    module.layers[0][2].scale = nn.Parameter(torch.ones(1))


def add_module(module: Any) -> None:
    module.head = nn.Sequential(nn.Tanh(), linear())


def append_to_list(module: Any) -> None:
    module.layers.append(linear())


def replace_parameter(module: Any) -> None:
    module.layers[0][0].weight = nn.Parameter(module.layers[0][0].weight.detach().clone())


def replace_module(module: Any) -> None:
    module.layers[0][0] = linear()


def add_module_then_parameter(module: Any) -> None:
    module.head = nn.Identity()
    module.head.scale = nn.Parameter(torch.ones(1))


ADDITIONS: list[tuple[Callable[[Any], None], str]] = [
    (add_parameter, "scale"),
    (add_parameter_deep_inside, "scale"),
    (add_module, r"head\.1\.weight"),
    (append_to_list, r"1\.weight"),
    (replace_parameter, "weight"),
    (replace_module, r"0\.weight"),
    (add_module_then_parameter, "scale"),
]


@pytest.mark.parametrize(("add", "name"), ADDITIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_parameters_added_after_wrapping_are_refused_at_the_next_forward(add: Callable[[Any], None], name: str) -> None:
    """Contract point 10: their gradients would differ on every rank."""
    wrapped = DistributedDataParallel(WithList(), communicator=alone())
    wrapped(batch(0))
    add(wrapped.module)
    with pytest.raises(MisuseError, match=rf"{name}' was added.*after it was wrapped.*wrap .*afterwards"):
        wrapped(batch(0))
    in_place = WithList()
    synchronize_gradients(in_place, communicator=alone())
    add(in_place)
    with pytest.raises(MisuseError, match=rf"{name}' was added.*after it was wrapped"):
        in_place(batch(0))


def test_a_parameter_added_to_the_wrapper_itself_is_refused_too() -> None:
    wrapped = DistributedDataParallel(net(), communicator=alone())
    wrapped.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(MisuseError, match=r"scale' was added.*after it was wrapped"):
        wrapped(batch(0))


def test_what_has_no_gradient_of_its_own_may_be_added() -> None:
    wrapped = DistributedDataParallel(WithList(), communicator=alone())
    module: Any = wrapped.module
    module.register_buffer("count", torch.zeros(1))
    module.activation = nn.Tanh()
    module.fixed = nn.Parameter(torch.ones(1), requires_grad=False)
    module.layers[0][0].weight = module.layers[0][2].weight  # tied: the engine knows it
    module.none = None
    loss_of(wrapped(batch(0))).backward()
    assert wrapped.synchronizer.synchronizations == 1


# -- communication hooks ------------------------------------------------------------------------------------------


def answer_nothing(state: Any, bucket: Any) -> None:
    return None


def answer_a_tensor(state: Any, bucket: Any) -> Any:
    return bucket.buffer()


def answer_too_few(state: Any, bucket: Any) -> Any:
    return finished(bucket.buffer()[:-1])


def answer_no_tensor(state: Any, bucket: Any) -> Any:
    return finished("done")


def finished(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return future


def backward_with_hook(hook: Callable[..., Any]) -> tuple[Raised | None, bool]:
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = values_of(model)
    answer = error_of(lambda: loss_of(model(batch(0))).backward())
    step = error_of(optimizer.step)
    assert step is not None
    assert step[0] == "MisuseError"
    return answer, same_bits(values_of(model), before)


@in_threads
@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (
            answer_nothing,
            r"'answer_nothing' must return a torch\.futures\.Future.*got NoneType.*work\.get_future",
        ),
        (answer_a_tensor, r"'answer_a_tensor' must return a torch\.futures\.Future.*got Tensor"),
        (answer_too_few, r"'answer_too_few' must hold a tensor of \d+ elements .*got Tensor of \d+ elements"),
        (answer_no_tensor, r"'answer_no_tensor' must hold a tensor of \d+ elements .*got str"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_communication_hook_that_answers_wrongly_is_told_what_is_right(
    ranks: Ranks, hook: Callable[..., Any], message: str
) -> None:
    """Contract point 10: and nobody steps on what it left."""
    for answer, untouched in ranks.run(backward_with_hook, hook):
        assert answer is not None
        assert answer[0] == "MisuseError"
        assert re.search(message, answer[1]), answer[1]
        assert untouched


# -- optimizer steps ----------------------------------------------------------------------------------------------


def complex_net() -> nn.Module:
    class Phases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex128))
            self.shift = nn.Parameter(torch.ones(0, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> Any:
            return torch.view_as_real(x * self.phase) + self.shift.abs().sum()

    return Phases()


def sparse_net() -> nn.Module:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, WIDTH, sparse=True, dtype=torch.float64)
            nn.init.constant_(self.table.weight, 0.5)

        def forward(self, x: torch.Tensor) -> Any:
            return self.table(x.argmax(dim=1)) * x

    return Rows()


def half_net() -> nn.Module:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> Any:
            return self.scale.double() * x

    return Half()


NETS: dict[str, Callable[[], nn.Module]] = {
    "dense": net,
    "complex": complex_net,
    "sparse": sparse_net,
    "bfloat16": half_net,
}


def step_unsynchronized(kind: str, windows_before: int) -> dict[str, Any]:
    rank = choose_communicator().rank
    model = DistributedDataParallel(NETS[kind](), bucket_cap_mb=TINY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(windows_before):
        optimizer.zero_grad()
        loss_of(model(batch(step, rank))).backward()
        optimizer.step()
    optimizer.zero_grad()
    with model.no_sync():
        loss_of(model(batch(9, rank))).backward()
        local = [p.grad.to_dense().clone() for p in model.parameters()]
        before = values_of(model)
        answers = [error_of(optimizer.step)]
    answers.append(error_of(optimizer.step))
    untouched = same_bits(values_of(model), before)
    kept = same_bits([p.grad.to_dense() for p in model.parameters()], local)
    model.synchronize()
    means = [p.grad.to_dense().clone() for p in model.parameters()]
    optimizer.step()
    moved = not same_bits(values_of(model), before)
    return {"answers": answers, "untouched": untouched, "kept": kept, "local": local, "means": means, "moved": moved}


@in_threads_and_processes
@pytest.mark.parametrize("windows_before", [0, 3])
@pytest.mark.parametrize("kind", NETS)
def test_a_step_on_gradients_of_one_rank_alone_is_refused(ranks: Ranks, kind: str, windows_before: int) -> None:
    """Contract point 10: parameters and gradients stay as they were, and synchronize() is the remedy."""
    results = ranks.run(step_unsynchronized, kind, windows_before)
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if kind == "bfloat16" else {"rtol": 1e-12, "atol": 1e-14}
    for result in results:
        for answer in result["answers"]:
            assert answer is not None
            assert answer[0] == "MisuseError"
            for word in ("gradients that only this rank has", "no_sync()", "synchronize()", "local_steps()"):
                assert word in answer[1]
        assert result["untouched"]
        assert result["kept"]
        assert result["moved"]
        for number, mean in enumerate(result["means"]):
            locals_ = [other["local"][number] for other in results]
            torch.testing.assert_close(mean, sum(locals_) / len(locals_), **tolerance)


def step_locally() -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    rank = choose_communicator().rank
    model, reference = DistributedDataParallel(net(), bucket_cap_mb=TINY), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        for m, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            with contextlib.ExitStack() as stack:
                if m is model:
                    stack.enter_context(model.no_sync())
                    stack.enter_context(model.local_steps())
                loss_of(m(batch(step, rank))).backward()
                optimizer.step()
    local = values_of(model), values_of(reference)
    with model.no_sync():
        loss_of(model(batch(7, rank))).backward()
    refused_again = error_of(optimizers[0].step)
    return *local, refused_again is not None


@in_threads_and_processes
def test_inside_local_steps_every_rank_steps_by_itself(ranks: Ranks) -> None:
    """Contract point 10: the named exception, and only for as long as it lasts."""
    for came, expected, refused_again in ranks.run(step_locally):
        assert_close(came, expected)
        assert refused_again


def test_an_optimizer_of_other_parameters_may_step_at_any_time() -> None:
    model, other = DistributedDataParallel(net(), communicator=alone()), net()
    with model.no_sync():
        loss_of(model(batch(0))).backward()
    loss_of(other(batch(0))).backward()
    before = values_of(other)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert any(not torch.equal(a, b) for a, b in zip(before, values_of(other), strict=True))


def misuse_in_backward(action: str, bad_step: int) -> dict[str, Any]:
    """Do something in the middle of a backward, on all ranks; then go on."""
    rank = choose_communicator().rank
    model, reference = DistributedDataParallel(net(), bucket_cap_mb=TINY), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    answer, untouched = None, False
    for step in range(6):
        optimizers[0].zero_grad()
        loss = loss_of(model(batch(step, rank)))
        earlier = loss_of(model(batch(step, rank, 1))) if action == "backward" else loss
        if step != bad_step:
            loss.backward()
            optimizers[0].step()
            continue
        actions = {"step": optimizers[0].step, "synchronize": model.synchronize, "backward": earlier.backward}
        before = values_of(model)
        handle = model.module[2].weight.register_post_accumulate_grad_hook(lambda _, act=actions[action]: act())
        answer = error_of(loss.backward)
        handle.remove()
        untouched = same_bits(values_of(model), before)
    for step in range(6):
        optimizers[1].zero_grad()
        loss_of(reference(batch(step, rank))).backward()
        average_gradients(reference)
        if step != bad_step:
            optimizers[1].step()
    return {"answer": answer, "untouched": untouched, "came": values_of(model), "expected": values_of(reference)}


@in_threads_and_processes
@pytest.mark.parametrize("bad_step", [0, 2, 3])
@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("step", r"stepped inside backward.*Step after backward\(\)"),
        ("synchronize", r"synchronize\(\) was called inside backward.*after backward\(\)"),
        ("backward", r"zero_grad\(\)"),
    ],
    ids=["step", "synchronize", "backward"],
)
def test_calls_in_the_middle_of_a_backward_are_refused(ranks: Ranks, action: str, message: str, bad_step: int) -> None:
    """Contract point 10: a step, a synchronization or another backward would see half of the gradients."""
    for result in ranks.run(misuse_in_backward, action, bad_step):
        assert result["answer"] is not None
        assert result["answer"][0] == "MisuseError"
        assert re.search(message, result["answer"][1]), result["answer"][1]
        assert result["untouched"]
        assert_close(result["came"], result["expected"])


# -- failures in the middle of a backward -------------------------------------------------------------------------


class Failure(Exception):  # noqa: N818
    """What the user's own code raises."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which backward fails, on which ranks and where; and what is done about it.

    The place is the layer whose gradient is just being made: gradients come from the last layer to the first, and
    from there to the input.
    """

    step: int
    ranks: tuple[int, ...]
    place: str = "middle"
    set_to_none: bool = True
    zeroes: bool = True
    settings: tuple[tuple[str, Any], ...] = ()


PLACES = {"early": 4, "middle": 2, "late": 0}
STEPS = 7


def train_through(plan: Plan) -> dict[str, Any]:
    rank, steps = choose_communicator().rank, STEPS
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY, **dict(plan.settings))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answers: list[tuple[int, Raised]] = []
    refusals: list[Raised | None] = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=plan.set_to_none)
        answer = error_of(lambda step=step: run_window(model, step, rank, plan))
        if answer is None:
            optimizer.step()
            continue
        answers.append((step, answer))
        if not plan.zeroes:
            before = values_of(model)
            refusals.append(error_of(optimizer.step))
            refusals.append(error_of(lambda step=step: loss_of(model(batch(step, rank))).backward()))
            assert same_bits(values_of(model), before)
    reference = net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(reference(batch(step, rank))).backward()
        average_gradients(reference)
        if step != plan.step:
            optimizer.step()
    return {"answers": answers, "refusals": refusals, "came": values_of(model), "expected": values_of(reference)}


def run_window(model: Any, step: int, rank: int, plan: Plan) -> None:
    def fail(_: torch.Tensor) -> None:
        raise Failure(f"on rank {rank}")

    x = batch(step, rank).requires_grad_()
    loss = loss_of(model(x * 1.0))  # the gradient of the product comes first, and every parameter's before it
    hooks = []
    if step == plan.step and rank in plan.ranks:
        target = x if plan.place == "input" else model.module[PLACES[plan.place]].weight
        hooks.append(target.register_hook(fail))
    try:
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()


def check_training_goes_on(results: list[dict[str, Any]], plan: Plan) -> None:
    for rank, result in enumerate(results):
        assert [step for step, _ in result["answers"]] == [plan.step], f"rank {rank}: {result['answers']}"
        name, text = result["answers"][0][1]
        if rank in plan.ranks:
            assert (name, text) == ("Failure", f"on rank {rank}")
        else:
            assert name == PeerFailedError.__name__
            for failed in plan.ranks:
                assert f"rank {failed}" in text
            assert "zero_grad()" in text
        assert_close(result["came"], result["expected"])
        assert same_bits(result["came"], results[0]["came"])


every_place = pytest.mark.parametrize("place", [*PLACES, "input"])
# The first window learns, the second counts, the third looks, the fourth counts and learns again.
every_phase = pytest.mark.parametrize("step", [0, 1, 2, 3])
both_settings = pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "in place"])
three_threads = on(("threads", 3))


@three_threads
@both_settings
@every_place
@every_phase
def test_after_a_failure_on_all_ranks_training_goes_on_exactly(
    ranks: Ranks, step: int, place: str, set_to_none: bool
) -> None:
    """Contract point 11: zero_grad() is all it takes."""
    plan = Plan(step=step, ranks=tuple(range(ranks.world_size)), place=place, set_to_none=set_to_none)
    check_training_goes_on(ranks.run(train_through, plan), plan)


@three_threads
@both_settings
@every_place
@every_phase
def test_after_a_failure_on_one_rank_the_others_name_it_and_training_goes_on_exactly(
    ranks: Ranks, step: int, place: str, set_to_none: bool
) -> None:
    """Contract point 11: no rank steps on gradients that another one did not make."""
    plan = Plan(step=step, ranks=(step % ranks.world_size,), place=place, set_to_none=set_to_none)
    check_training_goes_on(ranks.run(train_through, plan), plan)


@in_processes
@both_settings
@pytest.mark.parametrize("place", ["middle", "input"])
@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "one rank"])
def test_after_a_failure_in_real_processes_training_goes_on_exactly(
    ranks: Ranks, everywhere: bool, place: str, set_to_none: bool
) -> None:
    """Contract point 11: the two laws above, where communication needs no core."""
    for step in (0, 2):
        failed = tuple(range(ranks.world_size)) if everywhere else (step // 2,)
        plan = Plan(step=step, ranks=failed, place=place, set_to_none=set_to_none)
        check_training_goes_on(ranks.run(train_through, plan), plan)


@in_threads
@pytest.mark.parametrize("schedule", ["bucketed", "naive"])
@every_place
def test_a_failure_is_told_whenever_buckets_start(ranks: Ranks, place: str, schedule: str) -> None:
    """Contract point 11."""
    for step in (0, 2):
        plan = Plan(step=step, ranks=(1,), place=place, settings=(("schedule", schedule),))
        check_training_goes_on(ranks.run(train_through, plan), plan)


@three_threads
def test_all_failed_ranks_are_named(ranks: Ranks) -> None:
    """Contract point 11."""
    for step, place in itertools.product((0, 2), ("early", "middle")):
        plan = Plan(step=step, ranks=(0, 2), place=place)
        check_training_goes_on(ranks.run(train_through, plan), plan)


@in_threads_and_processes
@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "one rank"])
@every_phase
def test_without_zero_grad_a_failed_backward_stops_training(ranks: Ranks, step: int, everywhere: bool) -> None:
    """Contract point 10: neither a step nor a backward takes up what a failed backward left."""
    failed = tuple(range(ranks.world_size)) if everywhere else (0,)
    plan = Plan(step=step, ranks=failed, zeroes=False)
    results = ranks.run(train_through, plan)
    check_training_goes_on(results, plan)
    for result in results:
        assert len(result["refusals"]) == 2
        for refusal in result["refusals"]:
            assert refusal is not None
            assert refusal[0] == "MisuseError"
            assert re.search(r"earlier backward failed.*Call zero_grad\(\)", refusal[1]), refusal[1]


def fail_while_accumulating(step: int) -> dict[str, Any]:
    """On all ranks the first micro-batch of a window fails; all of them zero and repeat the window."""
    rank = choose_communicator().rank
    model, reference = DistributedDataParallel(net(), bucket_cap_mb=TINY), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    plan, answers = Plan(step=step, ranks=tuple(range(99))), []
    for window in range(5):
        for m, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            if m is model and window == step:
                with model.no_sync():
                    answers.append(error_of(lambda: run_window(model, step, rank, plan)))
                optimizer.zero_grad()
            with model.no_sync() if m is model else contextlib.nullcontext():
                loss_of(m(batch(window, rank, 1))).backward()
            loss_of(m(batch(window, rank))).backward()
            if m is reference:
                average_gradients(reference)
            optimizer.step()
    return {"answers": answers, "came": values_of(model), "expected": values_of(reference)}


@in_threads_and_processes
@pytest.mark.parametrize("step", [0, 2, 3])
def test_a_failure_while_accumulating_loses_the_window_and_no_more(ranks: Ranks, step: int) -> None:
    """Contract points 10 and 11."""
    for rank, result in enumerate(ranks.run(fail_while_accumulating, step)):
        assert result["answers"] == [("Failure", f"on rank {rank}")]
        assert_close(result["came"], result["expected"])


# -- gradients that come too late ---------------------------------------------------------------------------------


class Segments(nn.Module):
    """Runs its shared part in reentrant checkpoints: its gradients are accumulated once a segment."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = net(1), net(2), net(3)
        self.times = 1
        self.uses_last = True

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for _ in range(self.times):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True, preserve_rng_state=False))
        return self.last(x) if self.uses_last else x


def surprise(step: int, ranks: tuple[int, ...], schedule: str, uses_last: bool = True) -> dict[str, Any]:
    """In one window, on some ranks, the shared part runs in two segments instead of one.

    If the last part, whose buckets start first, is not used there, all other buckets wait for the end of backward.
    """
    rank = choose_communicator().rank
    model, reference = DistributedDataParallel(Segments(), bucket_cap_mb=TINY, schedule=schedule), Segments()
    answers: list[tuple[int, Raised]] = []
    for m in (model, reference):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.05)
        for window in range(STEPS):
            optimizer.zero_grad()
            module = m.module if m is model else m
            surprised = window == step and rank in ranks
            module.times = 2 if surprised else 1
            module.uses_last = uses_last or not surprised
            answer = error_of(lambda m=m, window=window: loss_of(m(batch(window, rank))).backward())
            if m is reference:
                average_gradients(reference)
            if answer is not None:
                answers.append((window, answer))
            elif m is model or window not in [number for number, _ in answers]:
                optimizer.step()
    return {"answers": answers, "came": values_of(model), "expected": values_of(reference)}


@in_threads_and_processes
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_gradient_that_comes_too_late_is_refused_on_all_ranks(ranks: Ranks, step: int) -> None:
    """Contract point 10: never a wrong sum; the window is lost and training goes on."""
    everybody = tuple(range(ranks.world_size))
    for result in ranks.run(surprise, step, everybody, "overlapped"):
        assert [window for window, _ in result["answers"]] == [step]
        name, text = result["answers"][0][1]
        assert name == "LateGradientError"
        assert re.search(r"'shared\.\d\.(weight|bias)'", text), text
        for remedy in ("schedule='bucketed'", "use_reentrant=False"):
            assert remedy in text
        assert_close(result["came"], result["expected"])


@in_threads_and_processes
@pytest.mark.parametrize("uses_last", [True, False], ids=["started", "waiting"])
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_gradient_that_comes_too_late_on_one_rank_is_told_to_the_others(
    ranks: Ranks, step: int, uses_last: bool
) -> None:
    """Contract point 11: they must not step on a mean that lacks it, whether its bucket has started or waits."""
    results = ranks.run(surprise, step, (0,), "overlapped", uses_last)
    for rank, result in enumerate(results):
        assert [window for window, _ in result["answers"]] == [step], f"rank {rank}: {result['answers']}"
        name, text = result["answers"][0][1]
        assert name == ("PeerFailedError" if rank else "LateGradientError")
        assert not rank or "rank 0" in text
        assert same_bits(result["came"], results[0]["came"])
        assert_close(result["came"], result["expected"])


@in_threads
@pytest.mark.parametrize("ranks_surprised", [(0,), (0, 1)], ids=["one rank", "all ranks"])
def test_no_gradient_comes_too_late_with_the_remedy(ranks: Ranks, ranks_surprised: tuple[int, ...]) -> None:
    """Contract point 10: schedule='bucketed', as the message says."""
    for step in (0, 2, 3):
        for result in ranks.run(surprise, step, ranks_surprised, "bucketed"):
            assert result["answers"] == []
            assert_close(result["came"], result["expected"])
