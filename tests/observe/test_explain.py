"""Where a step's time went: parts that add up, who is waited for, and what to change, from chosen times."""

import dataclasses
import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradsync import DistributedDataParallel
from gradsync.errors import ConfigurationError
from gradsync.observe.explain import Explanation, explain_recordings
from gradsync.observe.explain.link import BucketCost, fit_link
from gradsync.observe.explain.merging import WARM_UP, MergedRecording, merge
from gradsync.observe.explain.replay import duration, regroup
from gradsync.observe.explain.split import FEWEST_STEPS, SHORTEST_STEP
from gradsync.observe.explain.split import split as split_of
from gradsync.observe.recording import GatherTimes, RecordedBucket, Step
from gradsync.observe.recording.files import lines_of, parse_recording, read_recordings
from tests.ranks import RankPool, pool_of
from tests.recordings import Loop, World, write_all

seconds = st.floats(min_value=0.0, max_value=0.2)
loops = st.builds(
    Loop,
    data=seconds,
    loop=seconds,
    forward=st.floats(min_value=1e-3, max_value=0.2),
    backward=st.floats(min_value=1e-3, max_value=0.2),
    optimizer=st.floats(min_value=1e-4, max_value=0.05),
    other=seconds,
)
worlds = st.builds(
    World,
    ranks=st.lists(loops, min_size=1, max_size=4),
    buckets=st.lists(st.integers(min_value=1000, max_value=1 << 24), min_size=1, max_size=6),
    latency=st.floats(min_value=1e-5, max_value=1e-2),
    per_byte=st.floats(min_value=1e-11, max_value=1e-8),
    micro_batches=st.just(3),
    synchronizations=st.integers(min_value=1, max_value=3),
    steps=st.just(6),
)


@given(worlds)
def test_the_parts_of_every_rank_add_up_to_its_step(world: World) -> None:
    recordings = world.record()
    explanation = explain_recordings(recordings)
    for place, (rank, parts) in enumerate(explanation.split.ranks.items()):
        steps = [merged.ranks[place].seconds for merged in explanation.timeline.steps]
        assert parts.step == pytest.approx(sum(steps) / len(steps), rel=1e-6), rank
        assert min(dataclasses.astuple(parts)) >= 0.0


def shaken(step: Step, draw: Callable[[float, float], float]) -> Step:
    """The same step, in which ends were seen at any moment between start and the end of the synchronization: threads
    that see them are run when there is a core."""
    parts = tuple(
        dataclasses.replace(
            part,
            buckets=tuple(
                dataclasses.replace(bucket, reduced=draw(bucket.start, max(bucket.start, part.finished)))
                for bucket in part.buckets
            ),
        )
        for part in step.synchronizations
    )
    return dataclasses.replace(step, synchronizations=parts)


@given(worlds, st.randoms(use_true_random=False))
def test_parts_add_up_in_whichever_order_ends_were_seen(world: World, chance: Random) -> None:
    recordings = [
        dataclasses.replace(each, steps=tuple(shaken(step, chance.uniform) for step in each.steps))
        for each in world.record()
    ]
    timeline = merge(recordings)
    for place, parts in enumerate(split_of(timeline).ranks.values()):
        steps = [merged.ranks[place].seconds for merged in timeline.steps]
        assert parts.step == pytest.approx(sum(steps) / len(steps), rel=1e-6)
        assert min(dataclasses.astuple(parts)) >= -1e-12


@given(worlds)
def test_a_replay_without_a_change_takes_as_long_as_was_recorded(world: World) -> None:
    timeline = merge(world.record())
    # Ranks leave a step at different times, and the first step of a replay begins at once.
    assert duration(timeline) == pytest.approx(
        sum(max(step.seconds for step in merged.ranks) for merged in timeline.steps) / len(timeline.steps),
        rel=0.5,
    )
    alone = World(ranks=[world.ranks[0]], buckets=world.buckets, steps=6)
    timeline = merge(alone.record())
    assert duration(timeline) == pytest.approx(timeline.steps[0].seconds, rel=1e-6)


def test_waiting_is_told_from_communication_and_the_rank_is_named() -> None:
    world = World(ranks=[Loop(), Loop(), Loop(forward=0.040)], buckets=(1 << 20,) * 4)
    split = explain_recordings(world.record()).split
    assert split.ranks[2].waiting == 0.0
    assert split.ranks[0].waiting == pytest.approx(0.030)
    assert split.waited_for == {2: pytest.approx(0.020)}
    assert split.was_last == {2: 1.0}
    # The last bucket has nothing to hide behind, those before have.
    assert split.mean.exposed == pytest.approx(0.0002 + (1 << 20) * 1e-9)
    assert split.ranks[2].hidden == pytest.approx(3 * (0.0002 + (1 << 20) * 1e-9))
    assert split.mean.turn == pytest.approx(0.0, abs=1e-9)


def test_what_queues_on_a_slow_link_is_a_turn() -> None:
    world = World(ranks=[Loop(), Loop()], buckets=(1 << 20,) * 4, per_byte=1e-7)
    split = explain_recordings(world.record()).split
    each = 0.0002 + (1 << 20) * 1e-7
    assert split.mean.exposed == pytest.approx(each)
    assert split.mean.turn == pytest.approx(3 * each - 0.015)


def test_clocks_that_are_apart_and_drift_make_no_difference() -> None:
    plain = World(ranks=[Loop(), Loop(forward=0.030)], steps=60)
    apart = World(ranks=[Loop(), Loop(forward=0.030)], steps=60, offsets=[0.0, 5.0], errors=[0.0, 1e-5])
    expected, split = explain_recordings(plain.record()).split, explain_recordings(apart.record()).split
    assert split.mean.waiting == pytest.approx(expected.mean.waiting)
    drifting = apart.record()
    drifting[1] = dataclasses.replace(
        drifting[1],
        steps=tuple(step.shifted((step.begin - drifting[1].steps[0].begin) * 1e-2) for step in drifting[1].steps),
    )
    split = explain_recordings(drifting).split
    assert split.ranks[0].waiting == pytest.approx(expected.ranks[0].waiting, rel=0.05)


# -- advice -----------------------------------------------------------------------------------------------------------


def first(world: World) -> tuple[str, float, str]:
    """The first advice, what it gains by its own account, and its words."""
    advice = explain_recordings(world.record()).advice[0]
    return advice.kind, advice.gain, f"{advice.cause} → {advice.change}"


def buckets_in(words: str) -> int:
    """How many an advice speaks of."""
    found = re.search(r"\((\d+) buckets?\)", words)
    assert found is not None, words
    return int(found[1])


def taken(world: World) -> float:
    return explain_recordings(world.record()).split.mean.step


@pytest.mark.parametrize("phase", ["forward", "backward", "data", "loop", "optimizer"])
def test_a_slow_rank_is_the_first_advice(phase: str) -> None:
    slow = Loop(**{phase: getattr(Loop(), phase) + 0.025})
    kind, gain, words = first(World(ranks=[Loop(), slow, Loop()]))
    assert kind == "slow rank"
    assert "rank 1" in words
    assert phase in words
    before, after = taken(World(ranks=[Loop(), slow, Loop()])), taken(World(ranks=[Loop(), Loop(), Loop()]))
    assert gain == pytest.approx(1 - after / before, rel=0.1)


TINY = {"buckets": [10_000, 30_000] * 100, "latency": 5e-4}
FORGOTTEN = {"synchronizations": 4, "micro_batches": 4, "per_byte": 1e-8}


@pytest.mark.parametrize(
    ("kind", "words", "loop", "shape", "repaired", "within"),
    [
        ("slow data", "num_workers=", Loop(data=0.05), {}, {"ranks": [Loop(data=0.0)] * 2}, 0.01),
        ("slow loop", "the loop's own code", Loop(loop=0.05), {}, {"ranks": [Loop()] * 2}, 0.01),
        ("forgotten no_sync", "3 of 4 are for nothing", Loop(), FORGOTTEN, {"synchronizations": 1}, 0.05),
        ("bucket size", "too small.*bucket_cap_mb=", Loop(), TINY, {"buckets": [1_000_000] * 4}, 0.1),
    ],
)
def test_what_costs_most_is_the_first_advice(
    kind: str, words: str, loop: Loop, shape: dict[str, Any], repaired: dict[str, Any], within: float
) -> None:
    shape = {"ranks": [loop] * 2, **shape}
    found, gain, text = first(World(**shape))
    assert found == kind
    assert re.search(words, text)
    assert gain == pytest.approx(1 - taken(World(**{**shape, **repaired})) / taken(World(**shape)), rel=within)


def test_one_huge_bucket_is_too_large() -> None:
    shape = {"ranks": [Loop(), Loop()], "per_byte": 1e-9, "latency": 1e-4}
    kind, gain, words = first(World(buckets=[1 << 24], parameters=32, **shape))
    assert kind == "bucket size"
    assert "too large" in words
    number = buckets_in(words)
    after = taken(World(buckets=[(1 << 24) // number] * number, **shape))
    assert gain == pytest.approx(1 - after / taken(World(buckets=[1 << 24], **shape)), rel=0.1)


def kinds(world: World) -> set[str]:
    return {advice.kind for advice in explain_recordings(world.record()).advice}


def test_one_parameter_is_not_cut() -> None:
    shape = {"ranks": [Loop(), Loop()], "per_byte": 1e-9, "latency": 1e-4}
    assert "bucket size" in kinds(World(buckets=[1 << 24], parameters=32, **shape))
    assert "bucket size" not in kinds(World(buckets=[1 << 24], parameters=1, **shape))


def test_what_starting_buckets_takes_is_saved_where_the_thread_computes() -> None:
    # Nothing else is wrong with them: the link is fast.
    shape = {"ranks": [Loop(), Loop()], "buckets": [20_000, 40_000] * 50, "latency": 1e-6, "per_byte": 1e-12}
    computes = World(host=1e-4, busy=0.95, **shape)
    kind, gain, words = first(computes)
    assert kind == "bucket size"
    assert gain == pytest.approx((100 - buckets_in(words)) * 1e-4 / taken(computes), rel=0.1)
    # One that waits for an accelerator has the time.
    assert kinds(World(host=1e-4, busy=0.2, **shape)) == set()


@pytest.mark.parametrize(("latency", "limit"), [(1e-2, "off core"), (1e-5, "link")])
def test_a_thread_that_computes_and_has_no_core_is_kept_off_it_by_buckets(latency: float, limit: str) -> None:
    """As long as the link is busy, and no longer: others use the machine, too."""

    def fitted(busy: float) -> tuple[BucketCost, MergedRecording]:
        world = World(
            ranks=[Loop(), Loop()], buckets=[40_000] * 20, latency=latency, per_byte=1e-12, host=1e-4, busy=busy
        )
        explanation = explain_recordings(world.record())
        link = fit_link(explanation.timeline, explanation.split)
        assert link is not None
        return link, explanation.timeline

    (calm, timeline), (kept, _) = fitted(1.0), fitted(0.6)
    part = timeline.steps[-1].ranks[0].synchronizations[-1]
    off_core = 0.4 * (part.backward_end - part.begin)
    busy = sum(each.seconds(0) for each in timeline.steps[-1].collectives[-1])
    assert (off_core < busy) == (limit == "off core")
    assert kept.starting - calm.starting == pytest.approx(min(off_core, busy) / 20, rel=0.05)


def test_other_buckets_are_those_that_the_engine_would_lay_out() -> None:
    timeline = merge(World(ranks=[Loop(), Loop()], buckets=[1000, 3000, 9000, 1000, 1000], parameters=2).record())
    assert [(each.nbytes, each.source, each.share) for each in regroup(timeline, 3500)] == [
        (2500, 1, 0.5),
        (1500, 1, 1.0),
        (4500, 2, 0.5),
        (4500, 2, 1.0),
        (2000, 4, 1.0),
    ]
    # Sizes that nobody has recorded leave a bucket whole.
    header = dataclasses.replace(timeline.recordings[0].header, parameters={})
    unknown = dataclasses.replace(
        timeline, recordings=tuple(dataclasses.replace(each, header=header) for each in timeline.recordings)
    )
    assert [each.nbytes for each in regroup(unknown, 3500)] == [1000, 3000, 9000, 2000]


def test_what_bytes_cost_is_taken_from_a_measurement_where_buckets_do_not_tell() -> None:
    recordings = World(ranks=[Loop(), Loop()], buckets=[40_000] * 100, latency=2e-4, per_byte=1e-8).record()

    def predicted(link: tuple[float, float] | None) -> BucketCost:
        known = [dataclasses.replace(each, header=dataclasses.replace(each.header, link=link)) for each in recordings]
        explanation = explain_recordings(known)
        fitted = fit_link(explanation.timeline, explanation.split)
        assert fitted is not None
        return fitted

    # They all take as long. An idle link had a smaller latency than this one, and the same bandwidth.
    assert predicted((5e-5, 1e-8)).latency == pytest.approx(2e-4)
    assert predicted((5e-5, 1e-8)).seconds_per_byte == pytest.approx(1e-8)
    assert predicted(None).seconds(40_000) == pytest.approx(6e-4)
    # It cannot be slower than what was seen.
    assert predicted((5e-5, 1e-6)).seconds_per_byte == pytest.approx(6e-4 / 40_000)


def test_a_slow_link_is_the_first_advice() -> None:
    slow = World(ranks=[Loop(), Loop()], buckets=[1 << 20, 1 << 18] * 4, per_byte=1e-7)
    explanation = explain_recordings(slow.record())
    assert {advice.kind for advice in explanation.advice[:3]} == {"slow link"}
    by_change = {advice.change.split(":")[0]: advice for advice in explanation.advice}
    eight = by_change['reduction="int8"']
    quick = World(ranks=[Loop(), Loop()], buckets=[1 << 20, 1 << 18] * 4, per_byte=0.254e-7)
    assert eight.gain == pytest.approx(1 - taken(quick) / taken(slow), rel=0.05)


@pytest.mark.parametrize("latency", [2e-3, 2e-2])
def test_a_few_bytes_are_not_what_takes_long(latency: float) -> None:
    """Whatever a bucket of a hundred bytes waits for, fewer bytes would wait as long."""
    explanation = explain_recordings(World(ranks=[Loop(), Loop()], buckets=[112], latency=latency).record())
    fitted = fit_link(explanation.timeline, explanation.split)
    assert fitted is not None
    assert fitted.latency == pytest.approx(latency, rel=0.1)
    assert fitted.seconds(112) == pytest.approx(explanation.split.buckets[0].seconds)
    assert not [advice for advice in explanation.advice if "int8" in advice.change]


def test_a_training_that_has_nothing_to_gain_gets_no_advice() -> None:
    explanation = explain_recordings(World(ranks=[Loop(), Loop()], per_byte=1e-11, latency=1e-6).record())
    assert explanation.advice == ()
    assert "nothing stands out" in str(explanation)


def test_the_words_name_everything() -> None:
    text = str(explain_recordings(World(ranks=[Loop(), Loop(forward=0.05)]).record()))
    for word in ("2 ranks", "rank 1", "layer3.weight", "waiting for a rank", "what to change"):
        assert word in text


# -- one verdict, enough evidence, one unit ---------------------------------------------------------------------------

uneven = st.builds(
    World,
    ranks=st.lists(loops, min_size=2, max_size=4),
    buckets=st.lists(st.integers(min_value=1000, max_value=1 << 22), min_size=1, max_size=4),
    latency=st.floats(min_value=1e-5, max_value=1e-2),
    micro_batches=st.just(2),
    synchronizations=st.integers(min_value=1, max_value=2),
    steps=st.just(WARM_UP + FEWEST_STEPS + 4),
)


def jittery(world: World, chance: Random, spread: float) -> Explanation:
    """Ranks whose forwards take another time in every step."""
    usual = [loop.forward for loop in world.ranks]

    class Jittery(World):
        def _step(self, number: int) -> list[Step]:
            for loop, forward in zip(self.ranks, usual, strict=True):
                loop.forward = forward + chance.uniform(0.0, spread)
            return super()._step(number)

    return explain_recordings(Jittery(**{name: each for name, each in vars(world).items() if name != "_at"}).record())


@given(uneven, st.randoms(use_true_random=False), st.sampled_from([0.0, 0.02, 0.2]))
def test_all_that_is_said_of_slow_ranks_is_one_verdict(world: World, chance: Random, spread: float) -> None:
    explanation = jittery(world, chance, spread)
    named = {each.rank for each in explanation.stragglers}
    # Each rank that is called slow in an advice, or waited for in the text, is one of them; and is really waited for.
    text = str(explanation).splitlines()
    assert {int(rank) for line in text for rank in re.findall(r"wait \S+ \S+ of a step for rank (\d+)", line)} == named
    blamed = {int(rank) for line in text for rank in re.findall(r"rank (\d+) (?:is|comes later)", line)}
    assert blamed <= named
    split = explanation.split
    for straggler in explanation.stragglers:
        assert split.waited_for[straggler.rank] > 0
        assert split.was_last[straggler.rank] == straggler.last
        others = [parts.waiting for rank, parts in split.ranks.items() if rank != straggler.rank]
        assert split.ranks[straggler.rank].waiting < max(others)
        assert all(own > usual for own, usual in straggler.phases.values())
    if len(split.ranks) == 2:
        assert len(named) <= 1
        if named:
            assert max(split.waited_for, key=lambda rank: split.waited_for[rank]) in named


def test_ranks_that_are_last_in_different_synchronizations_of_a_step_are_all_counted() -> None:
    """An optimizer makes rank 0 late for the first of two, a forward makes rank 1 late for the second."""
    world = World(ranks=[Loop(optimizer=0.1), Loop(forward=0.05)], micro_batches=2, synchronizations=2, steps=15)
    split = explain_recordings(world.record()).split
    assert {rank for rank, seconds in split.waited_for.items() if seconds > 0} == {0, 1}
    assert split.was_last == {0: 1.0, 1: 1.0}


def test_a_rank_that_is_slower_in_a_phase_and_not_waited_for_is_no_straggler() -> None:
    """Rank 0 takes longer in its forward, rank 1 in all: rank 0 waits."""
    explanation = explain_recordings(World(ranks=[Loop(forward=0.02), Loop(data=0.031)]).record())
    assert [(each.rank, list(each.phases)) for each in explanation.stragglers] == [(1, ["data"])]
    text = str(explanation)
    assert "rank 1 is 30 ms slower in data" in text
    assert "rank 0 is" not in text


def test_ranks_that_come_last_in_turns_are_not_called_slow() -> None:
    chance = Random(0)
    explanation = jittery(World(ranks=[Loop(), Loop()], steps=60), chance, 0.02)
    assert explanation.split.mean.waiting > 0.05 * explanation.split.mean.step
    assert explanation.stragglers == ()
    assert "for each other; last came rank 0 in" in str(explanation)
    assert "slow rank" not in {advice.kind for advice in explanation.advice}


def test_what_clocks_may_be_apart_is_no_verdict() -> None:
    shape = {"ranks": [Loop(), Loop(forward=0.014)], "offsets": [0.0, 5.0]}
    sure, unsure = (explain_recordings(World(errors=[0.0, error], **shape).record()) for error in (1e-5, 3e-3))
    assert [each.rank for each in sure.stragglers] == [1]
    assert unsure.stragglers == ()


@given(worlds, st.integers(min_value=1, max_value=WARM_UP + FEWEST_STEPS - 1))
def test_few_steps_give_no_advice(world: World, steps: int) -> None:
    explanation = explain_recordings(dataclasses.replace(world, steps=steps).record())
    assert (explanation.advice, explanation.stragglers) == ((), ())
    assert f"and {FEWEST_STEPS} after the first {WARM_UP} are needed" in str(explanation)


def test_one_step_more_is_enough_to_call_a_rank_slow() -> None:
    slow = World(ranks=[Loop(), Loop(forward=0.02, backward=0.04)], steps=WARM_UP + FEWEST_STEPS)
    assert "slow rank" in kinds(slow)


@pytest.mark.parametrize("wrong", [Loop(), Loop(forward=0.05), Loop(data=0.05), Loop(loop=0.05)])
def test_steps_of_microseconds_give_no_advice(wrong: Loop) -> None:
    def shrunk(factor: float) -> Explanation:
        loops = [Loop(**{name: seconds * factor for name, seconds in vars(loop).items()}) for loop in (Loop(), wrong)]
        shape = {"latency": 2e-3 * factor, "per_byte": 1e-9 * factor}
        return explain_recordings(World(ranks=loops, steps=60, **shape).record())

    assert shrunk(1.0).advice
    tiny = shrunk(0.5 * SHORTEST_STEP / shrunk(1.0).split.mean.step)
    assert (tiny.advice, tiny.stragglers) == ((), ())
    assert "no advice: in steps of 500 µs" in str(tiny)


@given(worlds)
def test_every_gain_is_in_one_unit(world: World) -> None:
    explanation = explain_recordings(dataclasses.replace(world, steps=20).record())
    step = explanation.split.mean.step
    for advice in explanation.advice:
        assert advice.before == pytest.approx(step)
        assert advice.saved == pytest.approx(advice.gain * step)
    lines = [line for line in str(explanation).splitlines() if re.match(r"  \d+\. ", line)]
    assert len(lines) == len(explanation.advice)
    assert all(re.match(r"  \d+\. saves [\d.,]+ ms a step \(\d+%\): ", line) for line in lines), lines


def test_a_slow_body_of_the_loop_is_not_the_loaders() -> None:
    slow = World(ranks=[Loop(loop=0.05), Loop(loop=0.05)])
    assert "slow data" not in kinds(slow)
    assert "num_workers" not in str(explain_recordings(slow.record()))


# -- what does not belong together ------------------------------------------------------------------------------------


def test_ranks_with_different_numbers_of_steps_have_some_in_common() -> None:
    one, other = World(ranks=[Loop(), Loop()]).record()
    shorter = dataclasses.replace(other, steps=other.steps[:7], total=7, ended=False)
    explanation = explain_recordings([one, shorter])
    assert len(explanation.timeline.recorded) == 7
    assert "rank 1 has no end" in str(explanation)
    apart = dataclasses.replace(other, steps=other.steps[7:9])
    with pytest.raises(ConfigurationError, match="no step in common"):
        explain_recordings([dataclasses.replace(one, steps=one.steps[:7]), apart])
    with pytest.raises(ConfigurationError, match="rank 1 has recorded no step"):
        explain_recordings([one, dataclasses.replace(other, steps=())])


def test_a_rank_that_was_killed_before_buckets_changed_is_compared_as_far_as_it_came() -> None:
    one, other = World(ranks=[Loop(), Loop()]).record()
    (layout,) = one.layouts
    later = tuple(dataclasses.replace(step, layout=1) for step in one.steps[12:])
    one = dataclasses.replace(one, layouts=(layout, layout[::-1]), steps=(*one.steps[:12], *later))
    other = dataclasses.replace(other, steps=other.steps[:12], total=12, ended=False)
    timeline = explain_recordings([one, other]).timeline
    assert timeline.layout == layout
    assert max(step.number for step in timeline.steps) < 12
    with pytest.raises(ConfigurationError, match="their buckets differ"):
        explain_recordings([one, dataclasses.replace(other, layouts=(layout[::-1],))])
    with pytest.raises(ConfigurationError, match="their buckets differ"):
        explain_recordings([one, dataclasses.replace(other, layouts=())])


def test_windows_that_one_rank_left_out_are_not_compared() -> None:
    one, other = World(ranks=[Loop(), Loop()]).record()
    odd = dataclasses.replace(other.steps[9], synchronizations=())
    other = dataclasses.replace(other, steps=(*other.steps[:9], odd, *other.steps[10:]))
    assert 9 not in {step.number for step in explain_recordings([one, other]).timeline.steps}


def test_a_world_of_one_and_a_rank_alone_are_explained(tmp_path: Path) -> None:
    assert explain_recordings(World(ranks=[Loop()]).record()).split.mean.waiting == 0.0
    alone = explain_recordings(World(ranks=[Loop(), Loop(forward=0.05)]).record()[:1])
    assert "rank 0 of 2 alone" in str(alone)
    assert "counts as communication" in str(alone)
    without = World(ranks=[Loop()], synchronizations=0).record()
    assert explain_recordings(without).split.collectives == 0


WRITTEN = """\
{"kind":"recording","format":1,"rank":0,"world_size":2,"name":"Net","parameters":{"b":8,"a":1040},"link":[0.0003,1e-09]}
{"kind":"layout","number":0,"buckets":[{"nbytes":1048,"parameters":["b","a"]}]}
{"kind":"step","number":7,"layout":0,"begin":12.5,"end":12.6,"micro_batches":1,"spans":[["backward",12.5,12.55]],\
"synchronizations":[{"begin":12.5,"backward_end":12.55,"finished":12.58,"buckets":[[0,12.52,12.53,null,12.58,12.51]],\
"busy":0.04}],"gathers":[[0,1048,12.4,12.45,null,null]]}
{"kind":"end","total":8,"ended":true}"""


def test_the_format_of_files_stays() -> None:
    recording = parse_recording(WRITTEN, "a file")
    _, *written = WRITTEN.splitlines()
    header, *lines = lines_of(recording)
    assert lines == written
    assert json.loads(WRITTEN.splitlines()[0]).items() <= json.loads(header).items()
    (step,) = recording.steps
    (synchronization,) = step.synchronizations
    assert synchronization.buckets == (
        RecordedBucket(index=0, ready=12.52, start=12.53, reduced=None, finish=12.58, full=12.51),
    )
    assert step.gathers == (GatherTimes(index=0, nbytes=1048, start=12.4, end=12.45),)
    # Files of earlier versions do not say when a bucket was full, nor how long a thread was on a core.
    earlier = parse_recording(WRITTEN.replace(",12.51]]", "]]").replace(',"busy":0.04', ""), "a file")
    assert earlier.steps[0].synchronizations[0].buckets[0].full is None


@pytest.mark.parametrize(
    ("invalidate", "words"),
    [
        (lambda text: text.replace('"format":1', '"format":9'), "format 9, and 1 is read here"),
        (lambda text: text.replace('"kind":"recording"', '"kind":"else"'), "no recording of a rank"),
        (lambda text: text[:200], "line 1 is no JSON, or cut off"),
        (lambda text: text[:-3], "line 6 is no JSON, or cut off"),
        (lambda text: "[" * 100_000, "line 1 is no JSON"),
        (lambda text: text.replace('"kind":"layout"', '"kind":[]'), "line 2 is of no kind that is known"),
        (lambda text: text.replace('"number":1', '"number":"x"'), "line 4: number: expected a whole number, got 'x'"),
        (lambda text: text.replace('"layout":0', '"layout":-1'), "layout -1, which is not there"),
        (lambda text: text.replace('"rank":0', f'"rank":{10**400}'), "rank: expected a whole number of 64 bits"),
        (lambda text: "", "no recording of a rank"),
        (lambda text: "[1]\n", "no recording of a rank"),
    ],
)
def test_what_no_rank_has_written_is_refused(invalidate: object, words: str) -> None:
    text = "\n".join(lines_of(World(ranks=[Loop()], steps=3).record()[0]))
    with pytest.raises(ConfigurationError, match=words):
        parse_recording(invalidate(text), "a file")  # type: ignore[operator]


def test_what_gives_the_same_results_comes_first_unless_others_gain_twice_as_much() -> None:
    found = explain_recordings(World(ranks=[Loop(), Loop()], per_byte=6e-9).record()).advice
    sharded = next(advice for advice in found if "same results" in advice.change)
    places = {advice.change: place for place, advice in enumerate(found)}
    lossy = [advice for advice in found if "rounded" in advice.change or "larger batches" in advice.change]
    assert lossy
    for advice in lossy:
        assert (places[sharded.change] < places[advice.change]) == (2 * sharded.gain > advice.gain)


def test_ranks_may_differ_in_how_often_they_synchronize() -> None:
    """As where one of them steps half as often; and the last time may have had no buckets."""
    first = World(ranks=[Loop(), Loop()], busy=0.9).record()[0]
    second = World(ranks=[Loop(), Loop()], busy=0.9, synchronizations=2, micro_batches=2).record()[1]
    steps = [
        dataclasses.replace(step, synchronizations=(one, dataclasses.replace(other, buckets=())))
        for step in second.steps
        for one, other in [step.synchronizations]
    ]
    for each in (second, dataclasses.replace(second, steps=tuple(steps))):
        split = explain_recordings([first, each]).split
        assert split.mean.step > 0
        assert [bucket.ready for bucket in split.buckets] == pytest.approx([0.005, 0.010, 0.015, 0.020])


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no recording in"):
        read_recordings(tmp_path)
    recordings = World(ranks=[Loop(), Loop(), Loop()], steps=3).record()
    write_all(tmp_path, recordings[1:2])
    with pytest.raises(ConfigurationError, match="rank 0 and rank 2"):
        read_recordings(tmp_path)
    write_all(tmp_path, World(ranks=[Loop(), Loop()], steps=3).record()[:1])
    with pytest.raises(ConfigurationError, match="2 and 3 ranks"):
        read_recordings(tmp_path)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_reads_a_run_or_a_folder_of_recordings(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from gradsync.tools.cli.main import app

    folder = tmp_path / "recording"
    write_all(folder, World(ranks=[Loop(), Loop(forward=0.05)]).record())
    for place in (tmp_path, folder):
        result = CliRunner().invoke(app, ["explain", str(place)])
        assert result.exit_code == 0
        assert "rank 1 is 400% slower in forward" in result.output
    result = CliRunner().invoke(app, ["explain", str(folder), "--model", "3"])
    assert isinstance(result.exception, ConfigurationError)


def test_a_terminal_gets_the_same_with_bars() -> None:
    from rich.console import Console

    from gradsync.tools.cli.explain import shown

    console = Console(record=True, width=100, file=io.StringIO())
    console.print(shown(explain_recordings(World(ranks=[Loop(), Loop(forward=0.05)]).record())))
    text = console.export_text()
    for words in (
        "waiting for a rank",
        "█",
        "layer3.weight",
        "rank 1 is 400% slower in forward",
        "→ look at what rank 1",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 100


# -- a real training --------------------------------------------------------------------------------------------------


class Sleepy(nn.Linear):
    seconds = 0.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().forward(hidden)


def train_with_a_sleep() -> tuple[str, str, str, list[int]]:
    import torch.distributed as dist

    model = nn.Sequential(*(Sleepy(32, 32) for _ in range(4)))
    model[2].seconds = 0.06 if dist.get_rank() == 1 else 0.0
    wrapper = DistributedDataParallel(model, bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.01)
    for _ in range(WARM_UP + FEWEST_STEPS):
        optimizer.zero_grad()
        wrapper(torch.ones(4, 32)).sum().backward()
        optimizer.step()
    explanation = wrapper.explain(all_ranks=True)
    alone = str(wrapper.explain())
    buckets = [step.collectives for merged in explanation.timeline.steps for step in merged.ranks]
    return explanation.advice[0].cause, explanation.advice[0].kind, alone, buckets


def test_a_sleep_in_one_layer_of_one_rank_is_the_first_advice(pair: RankPool) -> None:
    for cause, kind, alone, buckets in pair.run(train_with_a_sleep):
        assert kind == "slow rank"
        assert cause.startswith("rank 1 is")
        assert "forward" in cause
        assert "alone" in alone
        assert set(buckets) == {4}


@pytest.fixture(scope="module")
def pair() -> RankPool:
    return pool_of(2)
