"""The scoreboard of faults: what notes and output are taken for, moments from seeds, and a real fault."""

import json
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.errors import ConfigurationError
from gradsync.tools.bench.fault_outcomes import ElasticJudge, FaultOutcome, Judge, Limits
from gradsync.tools.bench.fault_program import CASES, RANKS, Fault, TogetherAgain, TrialSettings
from gradsync.tools.bench.fault_trials import SETUPS, Trial, outcomes
from gradsync.tools.bench.record import Cell
from gradsync.tools.bench.report import BenchScreen
from gradsync.tools.bench.runner import RunPlan, run
from gradsync.tools.bench.scenarios import find_scenarios
from gradsync.tools.bench.scenarios.faults import Faults
from gradsync.tools.bench.scenarios.peers import Peers
from tests.tools.bench_samples import Written, record_of, stored

pytestmark = pytest.mark.timeout(300)

INJURY = Fault(case="kill -9", victim=1, step=10, delay=0.0)
LIMITS = Limits(notice=30.0, going_on=60.0)


def event(what: str, at: float, rank: int, life: int = 0, **more: Any) -> dict[str, Any]:
    return {"what": what, "at": at, "rank": rank, "life": life, "process": 100 + rank, **more}


def steps(life: int, first: float, numbers: range, ranks: range = range(RANKS)) -> list[dict[str, Any]]:
    return [
        event("step", first + 0.1 * place, rank, life, step=number, skipped=False)
        for place, number in enumerate(numbers)
        for rank in ranks
    ]


def ends(life: int, at: float, *, digests: str = "aaa", finite: bool = True) -> list[dict[str, Any]]:
    return [event("ended", at, rank, life, digest=digests[rank], finite=finite, step=24) for rank in range(RANKS)]


FAULT = event("fault", 10.0, 1, step=10)
RESTARTED = [
    *steps(0, 9.0, range(1, 11)),
    FAULT,
    event("raised", 10.4, 0, text="CommunicatorLostError: rank 1 (process 101 on a) has ended"),
    *(event("began", 18.0, rank, 1, step=5) for rank in range(RANKS)),
    *steps(1, 18.5, range(6, 25)),
    *ends(1, 21.0),
]


def judged(
    events: Sequence[dict[str, Any]], output: str = "", *, fault: Fault = INJURY, judge: type[Judge] = Judge
) -> FaultOutcome:
    outcome = judge(fault, LIMITS).judge(events, output)
    assert outcome is not None
    return outcome


def test_a_rank_that_was_killed_is_noticed_named_and_made_good_for() -> None:
    outcome = judged(RESTARTED)
    assert outcome.noticed == pytest.approx(0.4)
    assert outcome.named
    # The one under way, and those since the checkpoint.
    assert outcome.lost == 6
    assert outcome.went_on == pytest.approx(8.5)


def test_without_a_fault_there_is_no_outcome() -> None:
    assert Judge(INJURY, LIMITS).judge(steps(0, 1.0, range(1, 25)), "") is None


def test_whoever_only_starts_ranks_again_has_noticed_then() -> None:
    outcome = judged([each for each in RESTARTED if each["what"] != "raised"], "exitcode: 1")
    assert outcome.noticed == pytest.approx(8.0)
    assert not outcome.named


@pytest.mark.parametrize(
    "output",
    ["gradsync: rank 1 was ended", "  rank      : 1 (local_rank: 1)", "failed (pid: 101)", "Ranks 2, 1 failed to pass"],
)
def test_ways_to_name_a_rank(output: str) -> None:
    others = [each for each in RESTARTED if each["what"] != "raised"]
    named = judged(others, output)
    assert named.named
    other = judged(others, output.replace("1", "0"))
    assert not other.named


@pytest.mark.parametrize(("case", "names"), [("exception", True), ("cut link", False)])
def test_a_traceback_names_only_who_raised_it_first(case: str, names: bool) -> None:
    fault = Fault(case=case, victim=1, step=10, delay=0.0)
    report = event("raised", 10.4, 0, text="RuntimeError: Timed out")
    outcome = judged([FAULT, report], "[rank1]: Traceback\n[rank0]: Traceback", fault=fault)
    assert outcome.named == names


def test_a_list_of_all_ranks_names_nobody() -> None:
    fault = Fault(case="NaN", victim=1, step=10, delay=0.0)
    report = [event("raised", 10.4, rank, text="RuntimeError: the norm is not finite") for rank in range(RANKS)]
    output = "[0] rank : 0 (local_rank: 0)\n[1] rank : 1 (local_rank: 1)\n[2] rank : 2 (local_rank: 2)"
    outcome = judged([FAULT, *report], output, fault=fault)
    assert not outcome.named


@pytest.mark.parametrize("wrong", [{"digests": "aba"}, {"finite": False}])
def test_who_goes_on_with_wrong_numbers_has_lost_all(wrong: dict[str, Any]) -> None:
    events = [FAULT, *steps(0, 10.1, range(11, 25)), *ends(0, 12.0, **wrong)]
    outcome = Judge(INJURY, LIMITS).judge(events, "")
    assert outcome == FaultOutcome(noticed=None, named=False, lost=None, went_on=None)


def test_a_skipped_window_is_one_lost_step() -> None:
    events = [FAULT, *steps(0, 10.1, range(11, 25)), *ends(0, 12.0)]
    for each in events[1:4]:
        each["skipped"] = True
    report = event("warned", 10.2, 0, text="the gradient of 'weight' on rank 1 is not finite")
    outcome = judged([*events, report])
    assert (outcome.lost, outcome.named) == (1, True)
    assert outcome.went_on == pytest.approx(0.3)


@pytest.mark.parametrize(("case", "noticed"), [("NaN", 0.2), ("kill -9", None)])
def test_a_rank_with_wrong_numbers_may_say_so_itself(case: str, noticed: float | None) -> None:
    planned = Fault(case=case, victim=0, step=10, delay=0.0)
    fault, report = event("fault", 10.0, 0, step=10), event("warned", 10.2, 0, text="rank 0 is not finite")
    outcome = judged([fault, report, *steps(0, 10.1, range(11, 25)), *ends(0, 12.0)], fault=planned)
    assert outcome.noticed == (None if noticed is None else pytest.approx(noticed))
    assert outcome.named == (noticed is not None)


def without_the_victim(*, digests: str = "a-a", comes_back: str = "") -> list[dict[str, Any]]:
    """Window 12 is done again; the rank that was hurt may come back for the end."""
    others = [rank for rank in range(RANKS) if rank != INJURY.victim]
    again = [event("step", 12.0 + 0.01 * rank, rank, step=12, skipped=True) for rank in others]
    further = [step for rank in others for step in steps(0, 12.5, range(12, 25), range(rank, rank + 1))]
    ended = [event("ended", 15.0, rank, digest=digests[rank], finite=True, step=24) for rank in others]
    newcomer = [event("began", 14.0, INJURY.victim, 1, step=0)]
    if comes_back:
        newcomer.append(event("ended", 15.0, INJURY.victim, 1, digest=comes_back, finite=True, step=24))
    report = event("warned", 10.1, 0, text="rank 1 (process 101 on a) has ended")
    return [FAULT, report, *steps(0, 10.01, range(11, 12)), *again, *further, *newcomer, *ended]


@pytest.mark.parametrize("comes_back", ["", "a"])
def test_ranks_go_on_without_the_one_that_was_hurt(comes_back: str) -> None:
    outcome = judged(without_the_victim(comes_back=comes_back), judge=ElasticJudge)
    assert (outcome.named, outcome.lost) == (True, 1)
    assert outcome.noticed == pytest.approx(0.1)
    assert outcome.went_on == pytest.approx(2.5)


def test_what_the_rank_that_was_hurt_does_again_is_nothing_lost_where_others_have_gone_on() -> None:
    """It comes back from an old checkpoint, and takes over what the others have."""
    alone = [event("step", 14.1, INJURY.victim, 1, step=number, skipped=number == 5) for number in (5, 6)]
    outcome = judged([*without_the_victim(comes_back="a"), *alone], judge=ElasticJudge)
    assert outcome.lost == 1


def test_who_is_started_again_and_does_not_come_to_the_end_has_lost_all() -> None:
    outcome = judged([each for each in RESTARTED if each["what"] != "ended"])
    assert (outcome.lost, outcome.went_on) == (None, None)


@pytest.mark.parametrize("wrong", [{"digests": "a-b"}, {"comes_back": "b"}])
def test_those_who_go_on_without_it_must_agree(wrong: dict[str, str]) -> None:
    outcome = judged(without_the_victim(**wrong), judge=ElasticJudge)
    assert (outcome.lost, outcome.went_on) == (None, None)


@pytest.mark.parametrize("joins", [6, 20])
def test_whoever_fails_with_the_rank_is_started_again_and_has_lost_steps(joins: int) -> None:
    """torchft's wrapper raises where a collective of Gloo fails. The rank that was hurt may be back first."""
    others = [rank for rank in range(RANKS) if rank != INJURY.victim]
    events = [FAULT, *(event("raised", 10.1, rank, text="AssertionError") for rank in others)]
    for rank in range(RANKS):
        events += [*steps(1, 16.0, range(joins if rank in others else 6, 25), range(rank, rank + 1))]
    outcome = judged([*events, *ends(1, 20.0)], judge=ElasticJudge)
    assert (outcome.named, outcome.lost) == (False, 6)
    assert outcome.went_on == pytest.approx(6.0)


def test_a_training_ends_when_all_are_together_again_or_after_many_windows() -> None:
    together = TogetherAgain(fault=INJURY)
    for step in range(1, INJURY.step + 5):
        together.count(step, RANKS)
    assert (together.windows, together.together) == (4, 4)
    newcomer = TogetherAgain(fault=INJURY)
    newcomer.load_state_dict(together.state_dict())
    assert newcomer == together
    while not together.is_over:
        together.count(INJURY.step + 1, RANKS - 1)
    assert together.together == 4
    while not newcomer.is_over:
        newcomer.count(INJURY.step + 1, RANKS)
    assert newcomer.together == newcomer.windows < together.windows


@given(st.sampled_from(sorted(CASES)), st.integers(0, 1000))
def test_a_seed_is_a_moment(case: str, seed: int) -> None:
    fault = Fault.draw(case, seed, RANKS)
    assert fault == Fault.draw(case, seed, RANKS)
    assert 0 <= fault.victim < RANKS
    settings = TrialSettings(peer="DDP stock", folder="here", timeout=1.0, fault=fault)
    assert TrialSettings.read(settings.as_json()) == settings


def test_the_page_shows_what_did_not_come(tmp_path: Path) -> None:
    """A peer that notices nothing, and one that is not there."""
    (faults,) = find_scenarios("faults")
    parts = {
        "gradsync": {"named": 1.0, "left": 0.0, "noticed": 0.3, "lost": 3.0, "went on": 7.0},
        "DDP stock": {"named": 0.0, "left": 1.0},
    }
    records = [
        record_of(cell, {"gradsync": [0.3, 0.3], "DDP stock": [30.0, 30.0]}, parts=parts)
        for cell in faults.cells(quick=True)[:2]
    ]
    for record in records:
        record.absent["torchft"] = "not installed"
    (table,) = faults.tables(records)
    ours, theirs, absent = table.rows[:3]
    assert ours == ["gradsync", "kill -9", "2", "0.30", "0.30", "2 of 2", "3", "7.0", "nothing"]
    assert theirs[3:] == ["not within 20 s", "2 not noticed", "0 of 2", "all since", "never", "2 of 2"]
    assert absent[:3] == ["torchft", "kill -9", "not installed"]
    assert len(faults.pictures(records)) == 1
    assert faults.reading(records) == (
        "The rank is named: gradsync 4 of 4, DDP stock 0 of 4; training goes on, and right: gradsync 4 of 4, DDP stock "
        "0 of 4."
    )


def test_cases_and_peers_are_chosen_by_name(tmp_path: Path) -> None:
    plan = RunPlan(scenarios=[Faults()], out=tmp_path, cases=["NaN", "pause"], peers=["DDP stock"], minutes=4.0)
    cells = plan.cells(plan.scenarios[0])
    assert [cell.name for cell in cells] == ["pause", "NaN"]
    assert cells[0].options == {"peers": ["DDP stock"], "seconds": 120.0}
    with pytest.raises(ConfigurationError, match=r"faults has no case 'flood'\. It has: 'kill -9', "):
        RunPlan(scenarios=[Faults()], out=tmp_path, cases=["flood"])
    # As a command line cuts what it is given: both names have a comma of their own.
    peers = RunPlan(scenarios=[Peers()], out=tmp_path, cases=["memory", "naive", "2 hosts", "400 Mbit/s"])
    assert [cell.name for cell in peers.cells(peers.scenarios[0])] == ["2 hosts, 400 Mbit/s", "memory, naive"]
    many = RunPlan(scenarios=[Faults()], out=tmp_path, cases=["NaN"], jobs=3)
    assert many.cells(many.scenarios[0])[0].options == {"jobs": 3}
    # What is wished of trials is nothing to others: for them seconds are those that a model computes.
    whole = RunPlan(scenarios=[Peers()], out=tmp_path, peers=["DDP stock"], jobs=3, minutes=4.0)
    assert whole.cells(Peers()) == Peers().cells(quick=False)
    with pytest.raises(ConfigurationError, match="--jobs must be at least 1"):
        RunPlan(scenarios=[Faults()], out=tmp_path, jobs=0)
    with pytest.raises(ConfigurationError, match="--minutes must be above 0"):
        RunPlan(scenarios=[Faults()], out=tmp_path, minutes=0.0)


class Halves(Written):
    """Measures one round a run, of those that are not known."""

    name, in_trials = "halves", True


def test_a_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    plan = RunPlan(scenarios=[Halves()], out=tmp_path / "out", command="first")
    first = run(plan, BenchScreen())
    second = run(replace(plan, resumes=True, command="second"), BenchScreen())
    assert [each["command"] for each in second.folder.config["resumed"]] == ["second"]
    assert first.folder.config["command"] == second.folder.config["command"] == "first"
    for record in second.folder.records("halves"):
        assert record.outcome == "done"
        assert record.seconds("ours") == {0: 1.0, 1: 2.0}
    assert len(second.folder.records("halves")) == 2
    with pytest.raises(ConfigurationError, match="has results of halves, and none of faults"):
        run(replace(plan, resumes=True, scenarios=[Faults()]), BenchScreen())
    with pytest.raises(ConfigurationError, match="expected the folder of a benchmark"):
        run(replace(plan, resumes=True, out=tmp_path / "elsewhere"), BenchScreen())


class OnHosts(Written):
    """Of which the lab is wanted."""

    name = "on-hosts"

    def cells(self, *, quick: bool) -> list[Cell]:
        return [Cell(name="one", ranks=2, hosts=2, rounds=2)]


def test_a_run_goes_on_after_half_a_line(tmp_path: Path) -> None:
    """As a full disk leaves it: else it would be one line with the first that follows."""
    plan = RunPlan(scenarios=[Written()], out=tmp_path / "out")
    path = run(plan, BenchScreen()).folder.path / "written.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: -len('{"kind": "done"}\n') - 5])
    records = run(replace(plan, resumes=True), BenchScreen()).folder.records("written")
    assert [(record.outcome, record.rounds) for record in records] == [("done", 2), ("done", 2)]


def test_a_run_goes_on_with_the_settings_it_was_begun_with(tmp_path: Path) -> None:
    plan = RunPlan(scenarios=[Written(), Halves()], out=tmp_path / "out")
    before = run(plan, BenchScreen()).folder
    written = (before.path / "written.jsonl").read_text()
    with pytest.raises(ConfigurationError, match=r"results of 'one' with other settings \(rounds 2, asked for 3\)"):
        run(replace(plan, resumes=True, rounds=3), BenchScreen())
    run(replace(plan, resumes=True), BenchScreen())
    assert (before.path / "written.jsonl").read_text() == written


def test_what_cannot_be_gone_on_with_stays_what_it_is(tmp_path: Path) -> None:
    plan = RunPlan(scenarios=[OnHosts()], out=tmp_path / "out", no_lab="no hosts here")
    stored(plan.out, {"on-hosts": [record_of(plan.cells(plan.scenarios[0])[0], {"ours": [1.0]})]})
    (record,) = run(replace(plan, resumes=True), BenchScreen()).folder.records("on-hosts")
    assert (record.outcome, record.rounds) == ("done", 1)


class Pretended(Trial):
    """A trial that ends when two others are under way as well, or when it is not wanted any more."""

    together = threading.Barrier(3)
    given_up: ClassVar[list[int]] = []

    def run(self, is_wanted: Callable[[], bool] = lambda: True) -> FaultOutcome | None:
        if self.seed < 3:
            self.together.wait(60.0)
            return FaultOutcome(noticed=float(self.seed), named=True, lost=0, went_on=1.0)
        while is_wanted():
            time.sleep(0.01)
        self.given_up.append(self.seed)
        return None


def test_trials_at_once_come_as_they_end_and_nobody_waits_for_those_that_are_not_read() -> None:
    planned = [Pretended(peer="gradsync", seed=seed, case="NaN", lab=None) for seed in range(9)]
    coming = outcomes(planned, 3, time.monotonic() + 60.0)
    found = [next(coming) for _ in range(3)]
    assert sorted(trial.seed for trial, _ in found) == [0, 1, 2]
    assert all(outcome is not None and outcome.noticed == trial.seed for trial, outcome in found)
    assert isinstance(coming, Generator)
    coming.close()
    assert set(Pretended.given_up) <= {3, 4, 5}


@pytest.mark.parametrize("jobs", [1, 2])
def test_after_the_deadline_only_the_first_seeds_begin(jobs: int) -> None:
    class Known(Trial):
        def run(self, is_wanted: Callable[[], bool] = lambda: True) -> FaultOutcome | None:
            return None

    planned = [Known(peer=peer, seed=seed, case="NaN", lab=None) for seed in range(2) for peer in ("one", "other")]
    found = outcomes(planned, jobs, time.monotonic() - 1.0)
    assert sorted((trial.peer, trial.seed) for trial, _ in found) == [("one", 0), ("other", 0)]


@pytest.mark.program
@pytest.mark.parametrize("peer", ["gradsync", "gradsync elastic"])
def test_a_real_fault_is_named_gone_on_after_and_leaves_nothing(peer: str) -> None:
    absent = SETUPS[peer].absent("kill -9")
    if absent is not None:
        pytest.skip(f"{peer}: {absent}")
    outcome = Trial(peer=peer, case="kill -9", seed=3, limits=Limits(start=200.0)).run()
    assert outcome is not None
    assert outcome.named, outcome.output
    assert outcome.noticed is not None
    assert outcome.lost is not None
    assert outcome.left == ()
    assert json.loads(json.dumps(vars(outcome)))["named"]
