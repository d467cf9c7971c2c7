"""Runs that are killed and go on lose nothing, and one that has lost something is found."""

import json
from pathlib import Path

import pytest

from tests import kills

pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("train")]


def test_a_course_is_drawn_from_its_seed_alone() -> None:
    assert kills.draw(7) == kills.draw(7)
    drawn = [life for seed in range(20) for life in kills.draw(seed).lives]
    assert {life.ranks for life in drawn} == {1, 2, 3}
    assert {life.victim for life in drawn if life.after is not None} == {None, 0, 1, 2}


@pytest.mark.program
def test_a_sharded_run_goes_on_elsewhere_and_what_is_lost_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed on two ranks, on to its end on three."""
    monkeypatch.setattr(kills, "STEPS", 40)
    expected = kills.train_undisturbed(tmp_path / "undisturbed")
    lives = kills.Life(ranks=2, sharded=True, after=1.0), kills.Life(ranks=3, sharded=True)
    kills.live_through(kills.Course(seed=0, lives=lives), tmp_path / "run", expected)
    with pytest.raises(AssertionError):
        kills.compare(kills.losses_of(tmp_path / "run"), {**expected, 17: expected[17] * (1 + 1e-7)})
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines() if json.loads(line).get("step") != 23]
    metrics.write_text("\n".join(lines) + "\n")
    with pytest.raises(AssertionError):
        kills.compare(kills.losses_of(tmp_path / "run"), expected)


@pytest.mark.program
@pytest.mark.parametrize(("launcher", "victims"), [("gradsync", [1, 0]), ("torchrun", [1])])
def test_ranks_that_are_started_again_go_on_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, victims: list[int]
) -> None:
    """Ranks are killed; the command ends well, and every loss is that of a run that nobody has killed."""
    monkeypatch.setattr(kills, "STEPS", 40)
    expected = kills.train_undisturbed(tmp_path / "undisturbed")
    said = kills.live_with_restarts(tmp_path / "run", launcher, victims)
    kills.compare(kills.losses_of(tmp_path / "run"), expected)
    assert said.count("resumed from step") == len(victims)
    if launcher == "gradsync":
        assert "gradsync: rank 1 was ended by signal 9 (SIGKILL); the others were stopped" in said
        assert "gradsync: all ranks are started again (restart 2 of 3)" in said
