"""Laws of the plan: where every gradient lies, for any parameters, any order and any caps."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradsync.communicator import InProcessWorld
from gradsync.core.bucket import Bucket
from gradsync.core.bucket.layout import NEARLY_EMPTY, BucketCaps, BucketLayout, BucketPlan, ParameterSpec, plan_layout

ALIGNMENT_BYTES = 16
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128)
# Descriptions only: no device is touched.
DEVICES = (torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1))


def spec(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = DEVICES[0],
    sparse: bool = False,
    delayed: bool = False,
) -> ParameterSpec:
    stride = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    return ParameterSpec(
        name="p", shape=shape, stride=stride, dtype=dtype, device=device, sparse=sparse, delayed=delayed
    )


# What goes into a plan (parameters, order, caps, number of control flags), and the plan.
Planned = tuple[list[ParameterSpec], list[int], BucketCaps, int, BucketLayout]

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def parameter_lists(draw: st.DrawFn) -> list[ParameterSpec]:
    """Between one parameter and a dozen, often of one kind, at times of many."""
    dtypes = draw(st.sampled_from([DTYPES[:1], DTYPES]))
    devices = draw(st.sampled_from([DEVICES[:1], DEVICES]))
    rarely = st.integers(0, 5).map(lambda number: number == 0)
    return [
        spec(
            *draw(shapes),
            dtype=draw(st.sampled_from(dtypes)),
            device=draw(st.sampled_from(devices)),
            sparse=draw(rarely),
            delayed=draw(rarely),
        )
        for _ in range(draw(st.integers(1, 12)))
    ]


caps_of_any_kind = st.builds(
    lambda caps, from_the_end: BucketCaps(caps=tuple(caps), from_the_end=from_the_end),
    st.lists(st.integers(0, 400), min_size=1, max_size=3),
    st.booleans(),
)


@st.composite
def plans(draw: st.DrawFn) -> Planned:
    """The order may leave parameters out: those that are not trained."""
    specs = draw(parameter_lists())
    order = draw(st.permutations(range(len(specs))))
    order = order[: draw(st.integers(1, len(specs)))]
    caps, control = draw(caps_of_any_kind), draw(st.integers(1, 4))
    return specs, order, caps, control, plan_layout(specs, order, caps, control=control)


def members(plan: BucketPlan) -> list[int]:
    return [slot.parameter for slot in plan.slots]


def payload_bytes(specs: Sequence[ParameterSpec], plan: BucketPlan) -> int:
    return sum(specs[index].nbytes for index in members(plan))


@given(plans())
def test_every_parameter_has_exactly_one_place(planned: Planned) -> None:
    specs, order, _, _, layout = planned
    assert sorted((*layout.parameters, *layout.sparse)) == sorted(order)
    assert list(layout.sparse) == sorted(index for index in order if specs[index].sparse)


@given(plans())
def test_slots_are_disjoint_aligned_and_large_enough(planned: Planned) -> None:
    specs, *_, layout = planned
    for plan in layout.buckets:
        end = 0
        for slot in plan.slots:
            assert slot.offset >= end, "slots overlap"
            assert slot.offset * plan.dtype.itemsize % ALIGNMENT_BYTES == 0
            assert slot.numel * plan.dtype.itemsize == specs[slot.parameter].nbytes
            # Padding is what alignment needs, and no more.
            assert (slot.offset - end) * plan.dtype.itemsize < ALIGNMENT_BYTES
            end = slot.offset + slot.numel
        assert plan.payload >= end
        assert plan.numel == plan.payload + len(plan.slots) + plan.control


@given(plans(), st.integers(1, 5))
def test_a_payload_can_be_shared_out(planned: Planned, shares: int) -> None:
    """Shares are equal and begin aligned; otherwise the layout is the same, and no larger than that needs."""
    specs, order, caps, control, plain = planned
    layout = plan_layout(specs, order, caps, control=control, shares=shares)
    for plan, unpadded in zip(layout.buckets, plain.buckets, strict=True):
        assert plan.slots == unpadded.slots
        assert plan.share * shares == plan.payload
        assert plan.share * plan.dtype.itemsize % ALIGNMENT_BYTES == 0
        assert 0 <= (plan.payload - unpadded.payload) * plan.dtype.itemsize < ALIGNMENT_BYTES * shares


def test_the_shares_of_a_bucket_are_its_payload() -> None:
    world = InProcessWorld(1).communicator(0)
    parameters = [nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(3, 7))]
    specs = [ParameterSpec.of(str(number), parameter) for number, parameter in enumerate(parameters)]
    layout = plan_layout(specs, [1, 0], BucketCaps.uniform(10**6), control=1, shares=3)
    bucket = Bucket(layout.buckets[0], parameters, specs, world.allocate)
    bucket.payload.copy_(torch.arange(bucket.payload.numel()))
    assert torch.equal(torch.cat([bucket.share(rank) for rank in range(3)]), bucket.payload)
    assert all(bucket.share(rank).data_ptr() % ALIGNMENT_BYTES == 0 for rank in range(3))


@given(plans())
def test_a_bucket_holds_one_dtype_on_one_device(planned: Planned) -> None:
    specs, *_, layout = planned
    for plan in layout.buckets:
        assert {specs[index].bucket_dtype for index in members(plan)} == {plan.dtype}
        assert {specs[index].device for index in members(plan)} == {plan.device}
        assert not plan.dtype.is_complex, "complex numbers are sent as pairs of reals"


@given(plans())
def test_caps_are_kept_unless_a_parameter_alone_is_larger(planned: Planned) -> None:
    specs, _, caps, _, layout = planned
    for plan in layout.buckets:
        assert fits(specs, plan, max(caps.caps), from_the_end=caps.from_the_end)


def fits(specs: Sequence[ParameterSpec], plan: BucketPlan, cap: int, *, from_the_end: bool) -> bool:
    """Whether a bucket is within its cap, or holds one gradient, beside what is not worth a bucket of its own.

    Counted from the end, what was left over for the first bucket may have joined it, too.
    """
    sizes = [specs[index].nbytes for index in members(plan)]
    little = cap * NEARLY_EMPTY
    starts = range(len(sizes)) if from_the_end else (0,)
    for start in starts:
        if start and sum(sizes[:start]) >= little:
            return False
        rest = sorted(sizes[start:])
        if sum(rest) <= cap or sum(rest[:-1]) < little or not sum(rest[:-1]):
            return True
    return False


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.lists(st.integers(4, 200), min_size=1, max_size=3),
    st.booleans(),
)
def test_caps_count_from_the_first_bucket_or_from_the_last_and_buckets_are_no_smaller_than_need_be(
    sizes: list[int], caps: list[int], from_the_end: bool
) -> None:
    specs = [spec(size) for size in sizes]
    layout = plan_layout(specs, range(len(specs)), BucketCaps(caps=tuple(caps), from_the_end=from_the_end), control=1)
    assert layout.parameters == tuple(range(len(specs)))
    buckets = layout.buckets[::-1] if from_the_end else layout.buckets
    for position, plan in enumerate(buckets):
        cap = caps[min(position, len(caps) - 1)]
        assert fits(specs, plan, cap, from_the_end=from_the_end)
        if position + 1 < len(buckets):
            following = members(buckets[position + 1])
            first = following[-1] if from_the_end else following[0]
            assert payload_bytes(specs, plan) + specs[first].nbytes > cap, "the next one would have had room"


def test_what_is_left_over_for_the_first_bucket_has_none_of_its_own() -> None:
    specs = [spec(size) for size in (1, 100, 100, 100)]
    layout = plan_layout(specs, range(4), BucketCaps(caps=(400,), from_the_end=True), control=1)
    assert [members(plan) for plan in layout.buckets] == [[0, 1], [2], [3]]
    # Counted from the start it is what backward ends with, and nothing would hide it.
    layout = plan_layout(specs, range(3, -1, -1), BucketCaps(caps=(400,)), control=1)
    assert [members(plan) for plan in layout.buckets] == [[3], [2], [1], [0]]


@given(plans())
def test_delayed_parameters_come_last_and_by_themselves(planned: Planned) -> None:
    specs, *_, layout = planned
    kinds = [{specs[index].delayed for index in members(plan)} for plan in layout.buckets]
    assert all(len(kind) == 1 for kind in kinds)
    assert kinds == sorted(kinds, key=lambda kind: True in kind)


@given(plans())
def test_the_control_flags_is_in_the_last_bucket_only(planned: Planned) -> None:
    *_, control, layout = planned
    assert [plan.control for plan in layout.buckets] == [0] * (len(layout.buckets) - 1) + [control] * bool(
        layout.buckets
    )


@given(plans())
def test_buckets_are_numbered_and_sorted_by_their_last_gradient(planned: Planned) -> None:
    """A bucket starts when its last gradient is ready, so this is the order in which they can start."""
    specs, order, _, _, layout = planned
    assert [plan.index for plan in layout.buckets] == list(range(len(layout.buckets)))
    place = {index: number for number, index in enumerate(order)}
    for plan in layout.buckets:
        places = [place[index] for index in members(plan)]
        assert places == sorted(places), "slots lie in ready order"
    for delayed in (False, True):
        lasts = [place[members(p)[-1]] for p in layout.buckets if specs[members(p)[0]].delayed is delayed]
        assert lasts == sorted(lasts)


@given(plans())
def test_equal_descriptions_give_equal_layouts(planned: Planned) -> None:
    """Ranks plan by themselves: nothing but the arguments may count, not even the identity of dtypes and devices."""
    specs, order, caps, control, layout = planned
    copies = [
        spec(
            *each.shape,
            dtype=each.dtype,
            device=torch.device(str(each.device)),
            sparse=each.sparse,
            delayed=each.delayed,
        )
        for each in specs
    ]
    assert (
        plan_layout(copies, tuple(order), BucketCaps(caps=caps.caps, from_the_end=caps.from_the_end), control=control)
        == layout
    )


def test_one_parameter_each() -> None:
    specs = [spec(size) for size in (1, 2, 3, 100, 1)]
    order = random.Random(0).sample(range(5), 5)
    layout = plan_layout(specs, order, BucketCaps.one_parameter_each(), control=2)
    assert [members(plan) for plan in layout.buckets] == [[index] for index in order]


def test_nothing_but_sparse_parameters() -> None:
    layout = plan_layout([spec(3, sparse=True)], [0], BucketCaps.uniform(100), control=2)
    assert layout == BucketLayout(buckets=(), sparse=(0,))


@pytest.mark.parametrize(
    ("parameter", "stride"),
    [
        (torch.empty(2, 3, 4), (12, 4, 1)),
        (torch.empty(2, 3, 4).permute(2, 0, 1), (1, 12, 4)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.empty(4, 6)[:, ::2], (3, 1)),
        (torch.empty(3, 1).expand(3, 4), (4, 1)),
        (torch.empty(()), ()),
        (torch.empty(0, 3), (3, 1)),
    ],
    ids=["contiguous", "permuted", "channels_last", "with gaps", "expanded", "scalar", "empty"],
)
def test_a_gradient_lies_like_its_parameter_where_that_is_dense(
    parameter: torch.Tensor, stride: tuple[int, ...]
) -> None:
    described = ParameterSpec.of("p", parameter)
    assert described.stride == stride
    assert described.bucket_numel == parameter.numel()


@given(parameter_lists())
def test_nbytes_is_what_the_elements_take(specs: list[ParameterSpec]) -> None:
    for each in specs:
        assert each.nbytes == torch.empty(each.shape, dtype=each.dtype, device="meta").nbytes
