"""One faulty window after the other, on one rank, in whatever style they are written: each is told in its own place.

The rank raises before its backward or in it, abstains, or leaves its micro-batch empty; its user catches the error,
zeroes the gradients and goes on with the next window. The other ranks raise or skip that very window, nobody waits, and
a good window at the end has the right mean.
"""

import contextlib
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync import DistributedDataParallel, GradsyncError
from gradsync.communicator import choose_communicator
from tests.core.common import TINY, Line, gradients, still
from tests.fuse import Explosion, Fuse
from tests.laws import costly
from tests.ranks import pool_of

pytestmark = pytest.mark.timeout(60)

STYLES = ("iterator", "blocks", "no_sync")
# What a micro-batch of rank 1 does; those of the others are all of the first kind.
WORDS = ("backward", "nothing", "abstains", "abstains after forward")
ERRORS = ("raises", "raises after forward", "fails in backward")
Plan = Sequence[tuple[str, Sequence[str]]]


def act(model: DistributedDataParallel, way: str, x: float) -> None:
    loss = None if way in ("nothing", "abstains", "raises") else model(x)
    if way.startswith("raises"):
        raise ValueError("a bad batch")
    if way.startswith("abstains"):
        model.abstain("a bad batch")
    elif loss is not None:
        Fuse.apply(loss, way == "fails in backward").backward()


def run_window(model: DistributedDataParallel, style: str, ways: Sequence[str], x: float) -> None:
    if style == "iterator":
        for way in model.accumulate(ways):
            act(model, way, x)
        return
    for number, way in enumerate(ways):
        last = number == len(ways) - 1
        frame: Any = contextlib.nullcontext() if last else model.no_sync()
        with model.accumulate(last=last) if style == "blocks" else frame:
            act(model, way, x)


def train(plan: Plan, on_bad_step: Any) -> list[Any]:
    """What came of each window, and of a good one at the end."""
    logging.getLogger("gradsync").setLevel(logging.CRITICAL)
    try:
        return run_windows(plan, on_bad_step)
    finally:
        # These ranks run other tests, too.
        logging.getLogger("gradsync").setLevel(logging.NOTSET)


def run_windows(plan: Plan, on_bad_step: Any) -> list[Any]:
    rank = choose_communicator().rank
    model = DistributedDataParallel(Line(2, counts=True), bucket_cap_mb=TINY, on_bad_step=on_bad_step)
    optimizer = still(model)
    seen: list[Any] = []
    with warnings.catch_warnings():
        for style, ways in [*plan, ("no_sync", ["backward"])]:
            try:
                run_window(model, style, ways if rank == 1 else ["backward"] * len(ways), rank + 1.0)
                optimizer.step()
                means = gradients(model)
                seen.append("skipped" if model.step_was_skipped else means)
            except (GradsyncError, ValueError, Explosion) as error:
                seen.append(type(error).__name__)
            optimizer.zero_grad()
    return seen


def check(plan: Plan, on_bad_step: str | None) -> list[list[Any]]:
    results = pool_of(2).run(train, plan, on_bad_step, timeout=30.0)
    first, second = results
    assert first[-1] == second[-1] == [1.5, 2.5]
    for (_, ways), mine, other in zip(plan, first, second, strict=False):
        failed = ways[-1] in ERRORS
        assert (other in ("ValueError", "Explosion")) == failed
        if failed:
            assert mine == ("PeerFailedError" if on_bad_step is None else "skipped")
        else:
            assert mine == other
    return results


@pytest.mark.parametrize("second", STYLES)
@pytest.mark.parametrize("first", STYLES[:2])
@pytest.mark.parametrize("on_bad_step", [None, "skip"])
def test_an_error_after_an_error_is_told(first: str, second: str, on_bad_step: str | None) -> None:
    """Also before its backward, where nothing has shown by then that the window before is over, and in a first window,
    in which ranks have yet to learn whether they count."""
    check(
        [(first, ["backward", "raises"]), (second, ["fails in backward"]), (first, ["raises after forward"])],
        on_bad_step,
    )


@pytest.mark.parametrize("style", STYLES[:2])
def test_an_abstention_after_an_error_is_told(style: str) -> None:
    for way in ("raises", "fails in backward"):
        first, _ = check([(style, ["backward", way]), (style, ["abstains"]), (style, ["nothing"])], "skip")
        assert first[:-1] == ["skipped", "skipped", [1.0, 2.0]]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    plan = []
    for number in range(draw(st.integers(1, 4))):
        style = draw(st.sampled_from(STYLES))
        # Of an empty one nobody hears but in a block.
        unheard = ("nothing", "raises", "raises after forward") if style == "no_sync" else ()
        words, errors = ([way for way in ways if way not in unheard] for ways in (WORDS, ERRORS))
        ways = draw(st.lists(st.sampled_from(words), max_size=2))
        ways.append(draw(st.sampled_from([*words, *errors])))
        if number and style == "no_sync" and ways[0] == "abstains":
            # Without anything before it, nobody can know whether that is meant for a window that has failed.
            ways[0] = "abstains after forward"
        plan.append((style, ways))
    return plan


@costly
@given(plans(), st.sampled_from([None, "skip"]))
def test_every_window_is_told_in_its_own_place(plan: Plan, on_bad_step: str | None) -> None:
    check(plan, on_bad_step)
