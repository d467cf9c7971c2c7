"""Faults at random moments, one of each kind and hurried: ``make faults`` draws more, in their true times."""

import os
from pathlib import Path

import pytest

from tests.faults import ENDINGS, HARMLESS, LINKS, Times, check, draw, live_through, undisturbed
from tests.tools.test_lab import needs_lab

pytestmark = [pytest.mark.timeout(180), pytest.mark.program]

# A loaded machine takes its time to run a rank at all.
HURRIED = Times(warned=1.5, timeout=5.0, stopped=3.0, cut=2.0, noticed=20.0, off=4.0)


@pytest.mark.parametrize(
    "kind",
    [
        *ENDINGS,
        "SIGSTOP",
        "pause",
        *(pytest.param(kind, marks=needs_lab) for kind in LINKS),
    ],
)
def test_whatever_happens_to_a_rank_is_named_or_leaves_no_trace(kind: str, tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    fault = draw(kind, seed, HURRIED, hosts=(1,))
    expected = undisturbed(fault, tmp_path / "undisturbed", HURRIED) if kind in HARMLESS else ""
    check(fault, live_through(fault, tmp_path / "disturbed", HURRIED), HURRIED, expected)
