"""Collectives over structures: the same in threads and processes, and an error instead of a hang."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync.accelerator.operations import (
    broadcast,
    broadcast_object_list,
    concatenate,
    find_batch_size,
    gather,
    gather_object,
    map_tensors,
    pad_across_processes,
    reduce,
    send_to_device,
    slice_tensors,
)
from gradsync.communicator import ProcessGroupCommunicator, choose_communicator
from tests.ranks import Ranks

pytestmark = pytest.mark.timeout(120)

Point = namedtuple("Point", ["x", "y"])

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]


def pattern(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, different on every rank and at every place."""
    numbers = (torch.arange(torch.Size(shape).numel()) * (rank + 2) + rank) % 7
    if dtype.is_complex:
        return torch.complex(numbers.double(), -numbers.double() - 1).to(dtype).view(shape)
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype).view(shape)


def outcome(operation: Callable[[], Any]) -> tuple[str, str]:
    """The kind and the message of what a rank raises; a collective afterwards shows that the ranks are in step."""
    communicator = choose_communicator()
    try:
        result = operation()
    except gradsync.GradsyncError as error:
        raised = (type(error).__name__, str(error))
    else:
        raised = ("nothing", repr(result))
    token = torch.ones(1)
    communicator.all_reduce(token).wait()
    assert token.item() == communicator.world_size
    return raised


def own_rank() -> int:
    return choose_communicator().rank


# -- gather -----------------------------------------------------------------------------------------------------------


def gather_all_dtypes() -> list[torch.Tensor]:
    gathered: list[torch.Tensor] = gather([pattern(own_rank(), 3, 2, dtype=dtype) for dtype in DTYPES])
    return gathered


def test_every_dtype_is_gathered_in_rank_order(ranks: Ranks) -> None:
    for results in ranks.run(gather_all_dtypes):
        for dtype, result in zip(DTYPES, results, strict=True):
            expected = [pattern(rank, 3, 2, dtype=dtype).tolist() for rank in range(ranks.world_size)]
            assert result.dtype == dtype
            assert result.tolist() == [row for rows in expected for row in rows]


def gather_odd_ones() -> dict[str, torch.Tensor]:
    rank = own_rank()
    own = pattern(rank, 2, 3)
    gathered: dict[str, torch.Tensor] = gather(
        {
            "scalar": torch.tensor(rank),
            "empty": torch.empty(0, 3),
            "no columns": torch.empty(2, 0, dtype=torch.int64),
            "transposed": own.t(),
            "strided": pattern(rank, 8)[::2],
            "conjugate": pattern(rank, 2, dtype=torch.complex64).conj(),
            "with a graph": own.requires_grad_() * 2,
        }
    )
    return gathered


def test_odd_shapes_and_strides_are_gathered(ranks: Ranks) -> None:
    everywhere = range(ranks.world_size)
    for result in ranks.run(gather_odd_ones):
        assert result["scalar"].tolist() == list(everywhere)
        assert result["empty"].shape == (0, 3)
        assert result["no columns"].shape == (2 * ranks.world_size, 0)
        assert result["no columns"].dtype == torch.int64
        assert torch.equal(result["transposed"], torch.cat([pattern(rank, 2, 3).t() for rank in everywhere]))
        assert torch.equal(result["strided"], torch.cat([pattern(rank, 8)[::2] for rank in everywhere]))
        complex_ones = [pattern(rank, 2, dtype=torch.complex64).conj() for rank in everywhere]
        assert torch.equal(result["conjugate"], torch.cat(complex_ones))
        assert torch.equal(result["with a graph"], torch.cat([2 * pattern(rank, 2, 3) for rank in everywhere]))
        assert not result["with a graph"].requires_grad


def gather_a_structure() -> Any:
    one = torch.tensor([own_rank()])
    return gather(OrderedDict(a=[one, (one,)], b=Point(x=one, y={"deep": one})))


def test_structures_keep_their_types(ranks: Ranks) -> None:
    for result in ranks.run(gather_a_structure):
        assert type(result) is OrderedDict
        assert type(result["a"]) is list
        assert type(result["a"][1]) is tuple
        assert type(result["b"]) is Point
        everything = [result["a"][0], result["a"][1][0], result["b"].x, result["b"].y["deep"]]
        assert [each.tolist() for each in everything] == [list(range(ranks.world_size))] * 4


def results_that_share_memory() -> list[str]:
    """With the communicator passed, and without."""
    own, given = torch.ones(2), choose_communicator()
    results = {
        "gather": gather(own, communicator=given),
        "broadcast": broadcast(own, communicator=given),
        "mean": reduce(own, communicator=given),
        "none": reduce(own, "none"),
    }
    return [name for name, result in results.items() if result.data_ptr() == own.data_ptr()]


def test_results_share_no_memory_with_arguments(ranks: Ranks) -> None:
    assert ranks.run(results_that_share_memory) == [[]] * ranks.world_size


MISMATCHES: dict[str, tuple[Callable[[int], Any], str]] = {
    "shape": (
        lambda rank: gather({"logits": torch.ones(2, 3), "ids": torch.ones(1 if rank else 4)}),
        "value['ids']: rank 0 has 'torch.float32 of shape (4,)', rank 1 has 'torch.float32 of shape (1,)'. Tensors",
    ),
    "dtype": (
        lambda rank: broadcast(torch.ones(2, dtype=torch.float64 if rank else torch.int64)),
        "value: rank 0 has 'torch.int64 of shape (2,)', rank 1 has 'torch.float64 of shape (2,)'",
    ),
    "keys": (
        lambda rank: reduce({"b" if rank else "a": torch.ones(1)}),
        """name: rank 0 has "value['a']", rank 1 has "value['b']\"""",
    ),
    "length": (
        lambda rank: gather([torch.ones(1)] * (2 if rank else 1)),
        "the first only one of them has is 'value[1]': rank 0 has 2, rank 1 has 3",
    ),
    "operation": (
        lambda rank: reduce(torch.ones(1)) if rank else gather(torch.ones(1)),
        "call: rank 0 has 'gather', rank 1 has \"reduce by 'mean' with scale 1.0\"",
    ),
    "reduction": (
        lambda rank: reduce(torch.ones(1), "sum" if rank else "mean"),
        "rank 1 has \"reduce by 'sum' with scale 1.0\"",
    ),
    "scale": (
        lambda rank: reduce(torch.ones(1), scale=2.0 if rank else 1.0),
        "rank 1 has \"reduce by 'mean' with scale 2.0\"",
    ),
    "source": (
        lambda rank: broadcast(torch.ones(1), int(rank > 0)),
        "call: rank 0 has 'broadcast from 0', rank 1 has 'broadcast from 1'",
    ),
    "padded dim": (
        lambda rank: pad_across_processes(torch.ones(2, 2), dim=int(rank > 0)),
        "rank 1 has 'pad_across_processes in dim 1'",
    ),
    "padded dimensions": (
        lambda rank: pad_across_processes({"a": torch.ones((1, 1) if rank else 1)}),
        "value['a']: rank 0 has '1-dimensional', rank 1 has '2-dimensional'",
    ),
}


def differ(case: str) -> tuple[str, str]:
    return outcome(lambda: MISMATCHES[case][0](own_rank()))


@pytest.mark.parametrize("case", MISMATCHES)
def test_what_differs_is_named(ranks: Ranks, case: str) -> None:
    if ranks.world_size == 1:
        pytest.skip("one rank cannot differ from itself")
    for kind, message in ranks.run(differ, case):
        assert kind == "MismatchError"
        assert message.startswith("ranks 0 and 1 differ in ")
        assert MISMATCHES[case][1] in message


LEAVES = {
    "int": (3, "value['x'][1] is int: 3"),
    "none": (None, "value['x'][1] is NoneType: None"),
    "text": ("word", "value['x'][1] is str: 'word'"),
    "sparse": (torch.eye(2).to_sparse(), "value['x'][1] is a torch.sparse_coo tensor"),
    "nested": (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "a nested tensor"),
}


def with_leaf(name: str, operation: str, only_on_zero: bool) -> tuple[str, str]:
    leaf = torch.ones(2) if only_on_zero and own_rank() else LEAVES[name][0]
    function = {"gather": gather, "broadcast": broadcast, "reduce": reduce, "pad": pad_across_processes}[operation]
    return outcome(lambda: function({"x": [torch.ones(2), leaf]}))


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("operation", ["gather", "broadcast", "reduce", "pad"])
def test_what_is_no_tensor_is_refused_everywhere(thread_ranks: Ranks, name: str, operation: str) -> None:
    for rank, (kind, message) in enumerate(thread_ranks.run(with_leaf, name, operation, False)):
        assert kind == "UnsupportedTypeError"
        assert f"on rank {rank} " in message
        assert LEAVES[name][1] in message


def test_what_is_no_tensor_on_one_rank_stops_all(ranks: Ranks) -> None:
    zero, *others = ranks.run(with_leaf, "int", "gather", True)
    assert zero[0] == "UnsupportedTypeError"
    for kind, message in others:
        assert kind == "MismatchError"
        assert "value['x'][1]: rank 0 has 'int', rank 1 has 'torch.float32 of shape (2,)'" in message


# -- objects ----------------------------------------------------------------------------------------------------------


def own_objects(rank: int) -> list[Any]:
    """A dict whose keys are numbers, a tuple, a tensor: nothing on rank 0, and more on every next one."""
    return [f"ünï {rank}", {"n": rank, 7: [None, True, 1.5, (1, torch.full((2, 1), rank))]}] * rank


def gather_own_objects() -> list[Any]:
    return gather_object(own_objects(own_rank()))


def test_objects_are_gathered_in_rank_order(ranks: Ranks) -> None:
    expected = [each for rank in range(ranks.world_size) for each in own_objects(rank)]
    for gathered in ranks.run(gather_own_objects):
        assert repr(gathered) == repr(expected)


def broadcast_own_objects(source: int, shorter: bool) -> Any:
    rank = own_rank()
    own: list[Any] = [rank, {"of": (rank,)}][: 1 if shorter and rank else 2]
    return outcome(lambda: broadcast_object_list(own, source)), own


def test_objects_are_broadcast_in_place(ranks: Ranks) -> None:
    source = ranks.world_size - 1
    for answer, own in ranks.run(broadcast_own_objects, source, False):
        assert answer == ("nothing", repr([source, {"of": (source,)}]))
        assert own == [source, {"of": (source,)}]


def test_objects_to_broadcast_must_be_as_many_everywhere(thread_ranks: Ranks) -> None:
    for (kind, message), _ in thread_ranks.run(broadcast_own_objects, 0, True):
        assert kind == ("nothing" if thread_ranks.world_size == 1 else "MismatchError")
        assert kind == "nothing" or "lists of the same length" in message


def circle() -> list[Any]:
    around: list[Any] = []
    around.append(around)
    return around


OBJECTS: dict[str, tuple[Callable[[], Any], str]] = {
    "set": (lambda: ["a", {1}], "objects[1] is a builtins.set"),
    "sparse tensor": (lambda: [torch.ones(1).to_sparse()], "objects[0] is a torch.Tensor"),
    "key": (lambda: [{"a": ({(1,): 2},)}], "objects[0]['a'][0] is a builtins.dict"),
    "circle": (circle, "maximum recursion depth exceeded"),
    "no list": (lambda: {"a": 1}, "a list was expected, got dict"),
}


def gather_bad_object(name: str) -> tuple[str, str]:
    last = own_rank() == choose_communicator().world_size - 1
    return outcome(lambda: gather_object(OBJECTS[name][0]() if last else ["fine"]))


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_that_cannot_be_sent_are_named_everywhere(ranks: Ranks, name: str) -> None:
    for kind, message in ranks.run(gather_bad_object, name):
        assert kind == "UnsupportedTypeError"
        assert f"on rank {ranks.world_size - 1}: {OBJECTS[name][1]}" in message


# -- reduce -----------------------------------------------------------------------------------------------------------


def reduce_pattern(dtype: torch.dtype, reduction: str, scale: float = 1.0) -> torch.Tensor:
    own = pattern(own_rank(), 3, 2, dtype=dtype).t()
    reduced: torch.Tensor = reduce({"a": (own,)}, reduction, scale)["a"][0]
    return reduced


def expected_reduction(size: int, dtype: torch.dtype, reduction: str) -> torch.Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stacked = torch.stack([pattern(rank, 3, 2, dtype=dtype).t().to(wide) for rank in range(size)])
    if reduction == "max":
        return stacked.amax(0)
    return stacked.sum(0) if reduction == "sum" else stacked.mean(0)


@pytest.mark.parametrize("dtype", [each for each in DTYPES if not each.is_complex], ids=str)
def test_sums_and_maxima(ranks: Ranks, dtype: torch.dtype) -> None:
    for reduction in ("sum", "max"):
        expected = expected_reduction(ranks.world_size, dtype, reduction)
        for result in ranks.run(reduce_pattern, dtype, reduction):
            counted = dtype == torch.bool and reduction == "sum"
            assert result.dtype == (torch.int64 if counted else dtype)
            assert torch.equal(result, expected.to(result.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_means(ranks: Ranks, dtype: torch.dtype) -> None:
    whole = not (dtype.is_floating_point or dtype.is_complex)
    expected = expected_reduction(ranks.world_size, dtype, "mean")
    for result in ranks.run(reduce_pattern, dtype, "mean"):
        assert result.dtype == (torch.float32 if whole else dtype)
        epsilon = torch.finfo(result.dtype).eps
        assert torch.allclose(result.to(expected.dtype), expected, rtol=epsilon, atol=0)


def test_complex_numbers_are_summed_and_have_no_maximum(ranks: Ranks) -> None:
    expected = expected_reduction(ranks.world_size, torch.complex64, "sum")
    for result in ranks.run(reduce_pattern, torch.complex64, "sum"):
        assert torch.equal(result, expected.to(torch.complex64))
    for kind, message in ranks.run(reduce_badly, "complex"):
        assert (kind, "complex" in message) == ("ConfigurationError", True)


def test_none_leaves_every_rank_its_own(ranks: Ranks) -> None:
    for rank, result in enumerate(ranks.run(reduce_pattern, torch.int64, "none")):
        assert torch.equal(result, pattern(rank, 3, 2, dtype=torch.int64).t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_the_result_is_scaled(ranks: Ranks, dtype: torch.dtype) -> None:
    expected = 0.5 * expected_reduction(ranks.world_size, dtype, "sum")
    for result in ranks.run(reduce_pattern, dtype, "sum", 0.5):
        assert result.dtype == (torch.float32 if dtype == torch.int64 else dtype)
        assert torch.equal(result.double(), expected)


def halves_that_overflow() -> float:
    return float(reduce(torch.tensor(60000.0, dtype=torch.float16)))


def test_the_mean_of_large_halves_is_finite(ranks: Ranks) -> None:
    assert ranks.run(halves_that_overflow) == [60000.0] * ranks.world_size


def reduce_badly(case: str) -> tuple[str, str]:
    calls: dict[str, Callable[[], Any]] = {
        "complex": lambda: reduce([torch.ones(1, dtype=torch.complex64)], "max"),
        "reduction": lambda: reduce(torch.ones(1), "median"),
        "empty": lambda: reduce(torch.ones(0, 2)).shape,
    }
    return outcome(calls[case])


def test_an_unknown_reduction_and_an_empty_tensor(ranks: Ranks) -> None:
    for kind, message in ranks.run(reduce_badly, "reduction"):
        assert kind == "ConfigurationError"
        assert "'mean', 'sum', 'max', 'none', got 'median'" in message
    assert set(ranks.run(reduce_badly, "empty")) == {("nothing", "torch.Size([0, 2])")}


# -- broadcast --------------------------------------------------------------------------------------------------------


def broadcast_from(source: int) -> list[torch.Tensor]:
    own = [pattern(own_rank(), 3, 2, dtype=dtype).t() for dtype in DTYPES]
    kept = [each.clone() for each in own]
    result: list[torch.Tensor] = broadcast((own, torch.empty(0)), source)[0]
    assert all(each.tolist() == before.tolist() for each, before in zip(own, kept, strict=True))
    return result


def test_everybody_has_the_tensors_of_the_source(ranks: Ranks) -> None:
    for source in {0, ranks.world_size - 1}:
        for results in ranks.run(broadcast_from, source):
            for dtype, result in zip(DTYPES, results, strict=True):
                assert result.dtype == dtype
                assert result.tolist() == pattern(source, 3, 2, dtype=dtype).t().tolist()


def broadcast_badly(source: int) -> tuple[str, str]:
    return outcome(lambda: broadcast(torch.ones(1), source))


def test_a_source_that_is_no_rank(ranks: Ranks) -> None:
    for source in (ranks.world_size, -1):
        expected = ("ConfigurationError", f"from_process must be in 0..{ranks.world_size - 1}, got {source}")
        assert ranks.run(broadcast_badly, source) == [expected] * ranks.world_size


# -- padding ----------------------------------------------------------------------------------------------------------


def pad_own(dim: int, pad_first: bool) -> dict[str, torch.Tensor]:
    rank, world_size = own_rank(), choose_communicator().world_size
    tree = {
        "rows": pattern(rank, 2, rank + 1),
        "scalar": torch.tensor(1.0),
        "flags": torch.ones(2, world_size - rank, dtype=torch.bool),
    }
    padded: dict[str, torch.Tensor] = pad_across_processes(tree, dim, pad_index=0 if dim else 9, pad_first=pad_first)
    assert padded["scalar"] is tree["scalar"]
    return padded


@pytest.mark.parametrize("pad_first", [False, True])
@pytest.mark.parametrize("dim", [1, -1])
def test_tensors_are_padded_to_the_largest(ranks: Ranks, dim: int, pad_first: bool) -> None:
    size = ranks.world_size
    for rank, result in enumerate(ranks.run(pad_own, dim, pad_first)):
        own, nothing = pattern(rank, 2, rank + 1), torch.zeros(2, size - rank - 1)
        assert torch.equal(result["rows"], torch.cat([nothing, own] if pad_first else [own, nothing], 1))
        assert result["flags"].shape == (2, size)
        assert result["flags"].dtype == torch.bool
        assert result["flags"].sum() == 2 * (size - rank)


def pad_ids() -> list[Any]:
    ids = torch.arange(own_rank(), dtype=torch.int64)  # none at all on rank 0
    padded = pad_across_processes([ids], pad_index=-100)
    return [padded[0].tolist(), gather(padded)[0].numel()]


def test_what_is_padded_can_be_gathered(ranks: Ranks) -> None:
    longest = ranks.world_size - 1
    for rank, (ids, gathered) in enumerate(ranks.run(pad_ids)):
        assert ids == [*range(rank), *[-100] * (longest - rank)]
        assert gathered == longest * ranks.world_size


def pad_with_a_graph() -> list[float]:
    own = torch.ones(own_rank() + 1, requires_grad=True)
    (3 * pad_across_processes(own)).sum().backward()
    assert own.grad is not None
    return own.grad.tolist()


def test_gradients_flow_through_padding(thread_ranks: Ranks) -> None:
    assert thread_ranks.run(pad_with_a_graph) == [[3.0] * (rank + 1) for rank in range(thread_ranks.world_size)]


# -- on one rank ------------------------------------------------------------------------------------------------------


def test_map_keeps_containers_and_other_leaves() -> None:
    by_default: defaultdict[str, Any] = defaultdict(list, a=torch.ones(1))
    tree = [
        by_default,
        UserDict(b=torch.ones(1)),
        MappingProxyType({"c": torch.ones(1)}),
        Point(1, "x"),
        torch.Size([3]),
    ]
    mapped = map_tensors(lambda tensor: tensor + 1, tree)
    assert [type(each) for each in mapped] == [type(each) for each in tree]
    assert (mapped[0]["a"], mapped[1]["b"], mapped[2]["c"], mapped[3:]) == (2, 2, 2, [Point(1, "x"), torch.Size([3])])
    assert mapped[0].default_factory is list
    assert (tree[0]["a"], tree[1]["b"], tree[2]["c"]) == (1, 1, 1)


class Rows(list[Any]):
    """A list of somebody's own."""


@pytest.mark.xdist_group("packages")
def test_containers_of_any_class_keep_their_class() -> None:
    transformers = pytest.importorskip("transformers")
    tree = {
        "batch": transformers.BatchEncoding({"ids": torch.ones(1), "deep": Rows([torch.ones(1), "x"])}),
        # Known to torch, which cannot say where in it a tensor lies.
        "output": transformers.utils.ModelOutput(logits=torch.ones(1), states=(torch.ones(1),)),
        "largest": torch.ones(1, 2).max(dim=1),
    }
    mapped = map_tensors(lambda tensor: tensor + 1, tree)
    assert {key: type(value) for key, value in mapped.items()} == {key: type(value) for key, value in tree.items()}
    assert (mapped["batch"]["ids"], type(mapped["batch"]["deep"]), mapped["batch"]["deep"]) == (2, Rows, [2, "x"])
    assert (mapped["output"].logits, mapped["output"]["states"], tuple(mapped["largest"])) == (2, (2,), (2, 1))
    assert tree["batch"]["ids"] == tree["output"].logits == 1


def gather_own_containers() -> tuple[str, str]:
    return outcome(lambda: gather(UserDict(a=[Rows([torch.ones(1), Point(torch.ones(1), "x")])])))


def test_paths_lead_through_containers_of_any_class(thread_ranks: Ranks) -> None:
    for _, message in thread_ranks.run(gather_own_containers):
        assert "value['a'][0][1].y is str: 'x'" in message


class Movable:
    """Has a `to` of its own, which knows no `non_blocking`."""

    def __init__(self) -> None:
        self.moved_to: Any = None

    def to(self, device: Any) -> "Movable":
        self.moved_to = device
        return self


class Batch(UserDict[str, Any]):
    """Knows how to move itself, and says what it was asked for."""

    def to(self, device: Any, non_blocking: bool = False) -> tuple[Any, bool]:
        return device, non_blocking


def test_everything_that_can_move_is_moved() -> None:
    movable = Movable()
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    tree = {"x": [torch.ones(2), 3, "text", None], "own": movable, "p": packed, "t": Point(torch.ones(1), Batch())}
    moved = send_to_device(tree, "meta", non_blocking=True)
    assert moved["x"][0].device.type == "meta"
    assert moved["x"][1:] == [3, "text", None]
    assert movable.moved_to == "meta"
    assert moved["p"].data.device.type == "meta"
    assert moved["t"].x.device.type == "meta"
    assert moved["t"].y == ("meta", True)


def test_a_device_that_does_not_exist_is_the_callers_error() -> None:
    with pytest.raises(TypeError):
        send_to_device(torch.ones(1), object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tree", "size"),
    [
        (torch.ones(3, 2), 3),
        ({"id": 7, "x": [torch.tensor(1.0), torch.ones(4)], "y": torch.ones(5)}, 4),
        (["text", 1], None),
        ([], None),
        (torch.ones(()), None),
    ],
)
def test_the_batch_size_is_the_first_tensors(tree: Any, size: int | None) -> None:
    assert find_batch_size(tree) == size


def test_slices_are_views() -> None:
    whole = torch.arange(6)
    sliced = slice_tensors({"a": (whole, "name")}, slice(2, 4))
    assert sliced["a"][0].tolist() == [2, 3]
    assert sliced["a"][0].data_ptr() == whole[2:].data_ptr()
    assert sliced["a"][1] == "name"


def test_structures_are_concatenated() -> None:
    trees = [{"a": [torch.full((1, size), size)], "b": Point(torch.ones(size), torch.zeros(1))} for size in (1, 2)]
    joined = concatenate([{"a": tree["a"]} for tree in trees], dim=1)
    assert joined["a"][0].tolist() == [[1, 2, 2]]
    points = concatenate([tree["b"] for tree in trees])
    assert (type(points), points.x.tolist(), points.y.tolist()) == (Point, [1, 1, 1], [0, 0])
    assert concatenate([{"name": "alone"}]) == {"name": "alone"}


@pytest.mark.parametrize(
    ("trees", "kind", "message"),
    [
        ([], gradsync.ConfigurationError, "at least one structure, got none"),
        ([{"a": 1}, {"a": 2}], TypeError, "joins tensors, got int"),
        ([torch.ones(1), 2], TypeError, "joins tensors, got Tensor, int"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], ValueError, r"0 is dict with \['a'\] and number 1 is dict with"),
        ([[torch.ones(1)], [torch.ones(1)] * 2], ValueError, r"list with \[0\] and number 1 is list with \[0, 1\]"),
        ([[torch.ones(1)], 3], ValueError, "number 1 is int"),
    ],
)
def test_what_cannot_be_concatenated(trees: list[Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        concatenate(trees)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_group_with_nccl_alone_takes_tensors_from_everywhere() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        nccl = ProcessGroupCommunicator(dist.distributed_c10d._get_default_group())
        for device in ("cpu", "cuda:0"):
            for dtype in DTYPES:
                own = pattern(0, 3, 2, dtype=dtype).t().to(device)
                for result in (
                    gather(own, communicator=nccl),
                    broadcast(own, communicator=nccl),
                    reduce(own, "none", communicator=nccl),
                    reduce(own, communicator=nccl),
                ):
                    assert str(result.device) == device
                    assert result.tolist() == own.tolist()
        short = [torch.ones(2, device="cuda"), torch.ones(3)]
        assert [each.numel() for each in pad_across_processes(short, communicator=nccl)] == [2, 3]
        assert gather_object(["a"], communicator=nccl) == ["a"]
    finally:
        dist.destroy_process_group()
