"""Ranks that are lost and replaced: who takes part, who knows most, and that nothing is lost or counted twice."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from gradsync import Accelerator, Elastic
from gradsync.accelerator.elasticity import refuse_nccl
from gradsync.accelerator.numbered_windows import NumberedWindows
from gradsync.accelerator.saving import heal
from gradsync.errors import ConfigurationError, GradsyncError, MisuseError
from gradsync.health.elastic import (
    LIGHTHOUSE,
    ElasticMember,
    LighthouseMembership,
    MemberStatus,
    in_order,
    require_torchft,
)
from gradsync.testing import run_ranks
from gradsync.tools.cli.launching import run_elastic_ranks_of
from gradsync.tools.llm.run_folder import read_metrics
from gradsync.tools.llm.settings import TrainSettings
from tests.elastic_soak import TOLERANCE, Plan, soak, worst_difference
from tests.on_gpu import computes_on_cpu
from tests.roll_call import RollCall, RollCallMembership, join_roll_call

STANDING = MemberStatus(
    step=0, generation=0, since=0, waited=0.0, meeting_place=("127.0.0.1", 1), launched=0, host="a", process=1
)


def member(identity: str, **standing: int) -> ElasticMember:
    return ElasticMember(identity=identity, status=dataclasses.replace(STANDING, **standing))


def has_torchft() -> bool:
    try:
        require_torchft()
    except ConfigurationError:
        return False
    return True


# -- who takes part ----------------------------------------------------------------------------------------------------


def test_number_0_is_one_that_knows_most_and_has_been_there_longest() -> None:
    members = [
        member("newcomer", launched=0),
        member("late", step=7, since=3, launched=1, generation=4),
        member("first", step=7, since=1, launched=2, generation=4),
        member("behind", step=6, since=1, launched=3, generation=4),
    ]
    assert [each.identity for each in in_order(members)] == ["first", "late", "behind", "newcomer"]
    assert in_order(members[::-1]) == in_order(members)


def test_a_standing_survives_json_and_one_of_another_version_is_refused() -> None:
    told = json.loads(json.dumps(dataclasses.asdict(STANDING)))
    assert MemberStatus.read(told) == STANDING
    with pytest.raises(GradsyncError, match="same version"):
        MemberStatus.read({"step": 3})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ranks": 0}, "ranks must be a whole number of at least 1"),
        ({"min_ranks": True}, "min_ranks must be a whole number"),
        ({"ranks": 2, "min_ranks": 3}, "min_ranks is 3"),
        ({"timeout": 0.0}, "timeout must be more than 0"),
        ({"look_every": float("nan")}, "look_every must be more than 0"),
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Elastic(**wrong)  # type: ignore[arg-type]


def test_without_a_lighthouse_it_is_said_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIGHTHOUSE, raising=False)
    with pytest.raises(ConfigurationError, match="TORCHFT_LIGHTHOUSE=http://HOST:PORT"):
        Accelerator(cpu=True, elastic=Elastic())


@pytest.mark.skipif(has_torchft(), reason="torchft is installed")
def test_without_torchft_it_is_said_how_to_get_it_and_what_to_do_without() -> None:
    with pytest.raises(ConfigurationError, match=r"gradsync\[elastic\].*--max-restarts"):
        LighthouseMembership("http://127.0.0.1:1")


@pytest.mark.skipif(not has_torchft(), reason="torchft is not installed")
def test_the_address_of_a_lighthouse_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="http://HOST:PORT"):
        LighthouseMembership("here")


def test_nccl_is_refused_with_the_reason() -> None:
    assert refuse_nccl("gloo") == "gloo"
    with pytest.raises(ConfigurationError, match=r"NCCL watchdog ends the processes.*--max-restarts"):
        refuse_nccl("cpu:gloo,cuda:nccl")


@pytest.mark.parametrize(
    "other", [{"shard_optimizer": True}, {"overlap": "next-forward"}, {"reduction": "local:4"}], ids=str
)
def test_what_cannot_lose_a_rank_is_refused(other: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="exclude each other"):
        TrainSettings(run_folder=Path("run"), elastic=True, **other)  # type: ignore[arg-type]


# -- one rank alone ----------------------------------------------------------------------------------------------------


@pytest.fixture
def roll_call() -> "RollCall":
    call = RollCall()
    yield call  # type: ignore[misc]
    call.close()


def test_a_rank_alone_counts_its_windows_and_refuses_two_steps_in_one(roll_call: RollCall) -> None:
    accelerator = Accelerator(cpu=True, elastic=Elastic(ranks=1, join=join_roll_call(roll_call.port)))
    model, optimizer = accelerator.prepare(plain := nn.Linear(2, 1), torch.optim.SGD(plain.parameters(), lr=0.1))
    seen = []
    for attempt in accelerator.elastic.attempts(3):
        with attempt as step:
            seen.append(step)
            for batch in accelerator.window([torch.ones(1, 2)], model):
                accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [0, 1, 2]
    assert accelerator.elastic.step == 3
    (attempt,) = [next(accelerator.elastic.attempts(4))]
    with pytest.raises(MisuseError, match="two optimizer steps"), attempt:
        optimizer.step()
        optimizer.step()
    accelerator.elastic.close()


def test_attempts_that_are_used_wrongly_say_so(roll_call: RollCall) -> None:
    accelerator = Accelerator(cpu=True, elastic=Elastic(ranks=1, join=join_roll_call(roll_call.port)))
    elastic = accelerator.elastic
    assert list(elastic.attempts(0)) == []
    with pytest.raises(MisuseError, match="was not entered"):
        for _ in elastic.attempts(3):
            pass
    with pytest.raises(MisuseError, match="inside an attempt"), next(elastic.attempts(3)):
        next(elastic.attempts(3))
    with pytest.raises(MisuseError, match="inside another one"), next(elastic.attempts(3)), elastic._attempt():
        pass
    assert elastic.step == 0
    elastic.close()
    elastic.close()
    with pytest.raises(MisuseError, match="takes part no longer"):
        next(elastic.attempts(3))


def test_a_window_that_an_error_has_ended_is_done_again_from_its_beginning(roll_call: RollCall) -> None:
    accelerator = Accelerator(cpu=True, elastic=Elastic(ranks=1, join=join_roll_call(roll_call.port)))
    plain = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1, affine=False)).double()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    before, seen = [each.clone() for each in plain.buffers()], []
    for attempt in accelerator.elastic.attempts(2):
        try:
            with attempt as step:
                seen.append(step)
                assert all(each.grad is None for each in plain.parameters())
                assert len(seen) > 2 or all(map(torch.equal, plain.buffers(), before))
                for batch in accelerator.window([torch.randn(4, 2, dtype=torch.float64)], model):
                    accelerator.backward(model(batch).square().sum())
                if len(seen) == 1:
                    raise ValueError("of this rank alone")
                optimizer.step()
                optimizer.zero_grad()
        except ValueError:
            continue
    assert seen == [0, 0, 1]
    accelerator.elastic.close()


def test_a_disk_that_is_full_when_ranks_have_met_is_no_lost_rank(roll_call: RollCall) -> None:
    accelerator = Accelerator(cpu=True, elastic=Elastic(ranks=1, join=join_roll_call(roll_call.port)))

    def listener(_: object) -> None:
        raise OSError("No space left on device")

    accelerator.elastic.on_meeting(listener)
    with pytest.raises(GradsyncError, match="generation 1 has met, and then: No space left"):
        next(accelerator.elastic.attempts(1))
    accelerator.elastic.close()


def test_ranks_are_not_replaced_for_ever(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("gradsync.tools.cli.launching.MOST_REPLACED", 1)
    monkeypatch.setenv(LIGHTHOUSE, "http://127.0.0.1:1")
    assert run_elastic_ranks_of("no_such_module", [], nproc=1, ranks=1, min_ranks=1) == 1
    assert "1 ranks have been replaced in this run, so it ends" in capsys.readouterr().err


def test_what_an_elastic_accelerator_cannot_do_is_said(roll_call: RollCall) -> None:
    elastic = Elastic(ranks=1, join=join_roll_call(roll_call.port))
    accelerator = Accelerator(cpu=True, elastic=elastic)
    samples = list(range(8))
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 8, 8)
    drawing = torch.utils.data.RandomSampler(samples, replacement=True)
    for loader, words in (
        (DataLoader(samples, sampler=sampler), "a WeightedRandomSampler deals samples"),
        (DataLoader(samples, batch_sampler=[[1, 2]]), "a batch_sampler deals samples"),
        (DataLoader(samples, sampler=drawing), "with replacement"),
        (DataLoader([]), "is empty"),
        (DataLoader(Endless()), "Endless has no numbers for its samples"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            accelerator.prepare(loader)
    with pytest.raises(MisuseError, match=r"loader\.window\(step\)"):
        iter(accelerator.prepare(DataLoader(samples)))
    with pytest.raises(MisuseError, match="cannot be pickled"):
        accelerator.__reduce__()
    accelerator.elastic.close()
    with pytest.raises(ConfigurationError, match="exclude each other"):
        Accelerator(cpu=True, elastic=elastic, shard_optimizer=True)
    with pytest.raises(MisuseError, match="the ranks it began with"):
        _ = Accelerator(cpu=True).elastic


class Endless(torch.utils.data.IterableDataset[int]):
    """Samples that come one after the other."""

    def __iter__(self) -> Iterator[int]:
        yield from range(100)


class Place:
    """A rank, for who asks only that."""

    device = torch.device("cpu")

    def __init__(self, rank: int, ranks: int) -> None:
        self.process_index, self.num_processes = rank, ranks


@given(
    samples=st.integers(1, 30),
    size=st.integers(1, 40),
    batch=st.integers(1, 7),
    ranks=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    shuffle=st.booleans(),
)
def test_windows_by_number_take_every_sample_once_an_epoch_whoever_asks(
    samples: int, size: int, batch: int, ranks: list[int], shuffle: bool
) -> None:
    loader = DataLoader(range(samples), batch_size=batch, shuffle=shuffle)  # type: ignore[arg-type]
    alone = NumberedWindows(loader, Place(0, 1), size=size, seed=5)  # type: ignore[arg-type]
    seen = []
    for number, count in enumerate(ranks):
        taken = []
        for rank in range(count):
            batches = list(NumberedWindows(loader, Place(rank, count), size=size, seed=5).window(number))  # type: ignore[arg-type]
            assert all(0 < len(each) <= batch for each in batches)
            taken += [int(sample) for each in batches for sample in each]
        assert taken == [int(sample) for each in alone.window(number) for sample in each]
        seen += taken
    for begin in range(0, len(seen) - samples + 1, samples):
        assert sorted(seen[begin : begin + samples]) == list(range(samples))


@pytest.mark.timeout(60)
def test_beside_a_process_group_elastic_ranks_are_refused(tmp_path: Path, roll_call: RollCall) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(ConfigurationError, match="whose ranks cannot change"):
            Accelerator(cpu=True, elastic=Elastic(join=join_roll_call(roll_call.port)))
    finally:
        torch.distributed.destroy_process_group()


# -- healing -----------------------------------------------------------------------------------------------------------


def test_a_rank_that_lags_behind_gets_the_whole_state_of_rank_0_and_the_others_keep_theirs() -> None:
    def rank() -> tuple[list[torch.Tensor], int]:
        accelerator = Accelerator(cpu=computes_on_cpu())
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(0 if accelerator.process_index == 1 else 2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            scheduler.step()
            model[1].running_mean += 1
        # At wrapping rank 0's parameters are taken; of optimizers and schedulers nobody has heard then.
        accelerator.prepare(model, optimizer, scheduler)
        heal(accelerator.prepared, accelerator.communicator, [1])
        state = [value.clone() for value in model.state_dict().values()]
        moments = [value for one in optimizer.state_dict()["state"].values() for value in one.values()]
        return [*state, *(torch.as_tensor(each).clone() for each in moments)], scheduler.last_epoch

    first, healed, third = run_ranks(rank, 3)
    assert len(first[0]) > 7
    for state, epoch in (healed, third):
        assert epoch == first[1]
        assert all(torch.equal(one, other) for one, other in zip(first[0], state, strict=True))


# -- ranks that are killed --------------------------------------------------------------------------------------------


@pytest.mark.program
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("reduction", "ranks", "hosts"), [("mean", 3, 0), ("mean", 3, 2), ("low-rank:2", 2, 0)])
def test_killed_ranks_are_replaced_and_every_window_is_that_of_one_process(
    tmp_path: Path, reduction: str, ranks: int, hosts: int
) -> None:
    if hosts and os.geteuid() != 0:
        pytest.skip("a lab needs root")
    plan = Plan(steps=60, kills=2, ranks=ranks, seed=1, pause=0.02, reduction=reduction, limit=240, hosts=hosts)
    told, killed = soak(plan, tmp_path)
    assert killed >= 1
    assert max(each["step"] for each in told) == plan.steps
    assert len({each["generation"] for each in told if each["generation"]}) > 1
    if reduction == "mean":
        assert worst_difference(told, plan.steps) < TOLERANCE
    # A window that was done again counts once in what forwards have changed.
    assert all(each["buffer"] <= 24 * each["step"] for each in told)


@pytest.mark.program
@pytest.mark.timeout(240)
def test_when_the_rank_that_records_is_killed_another_one_goes_on_with_the_record(
    tmp_path: Path, roll_call: RollCall
) -> None:
    folder, steps, text = tmp_path / "run", 40, tmp_path / "text.txt"
    text.write_text("a rank is lost, the others go on; " * 500)

    def start(rank: int, *more: str) -> subprocess.Popen[bytes]:
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.elastic_run", str(roll_call.port), str(text), str(folder), str(steps), *more],
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if rank == 1 else None,
        )

    ranks = [start(0), start(1)]
    try:
        metrics = folder / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count('"step"') > 10):
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.01)
        ranks[0].kill()
        _, said = ranks[1].communicate(timeout=120)
        assert ranks[1].returncode == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    records = read_metrics(folder)
    done = [record["step"] for record in records if record["kind"] == "step"]
    assert done == sorted(set(done))
    # The communicator may take along what it still owed of the last step before the loss; nothing else is missing.
    assert len(set(range(1, steps + 1)) - set(done)) <= 2
    assert any("1 ranks go on, after 2" in record.get("text", "") for record in records)
    assert json.loads((folder / "summary.json").read_text())["step"] == steps
    # By the next number, since number 0 cannot say so: at once, unless it was the store of number 0 that has failed.
    words = said.decode()
    assert f"rank 0 (process {ranks[0].pid} on " in words, words
    assert "generation 2: 1 ranks go on with step " in words, words


# -- the launcher ------------------------------------------------------------------------------------------------------


def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, **options: int) -> int:
    (tmp_path / "worker.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    # None is asked: these ranks do not train.
    monkeypatch.setenv(LIGHTHOUSE, "http://127.0.0.1:1")
    return run_elastic_ranks_of("worker", [str(tmp_path)], **{"nproc": 2, "ranks": 2, "min_ranks": 1} | options)


def test_a_rank_that_is_killed_is_started_again_and_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """
import os, signal, sys, time
lives = os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(f"{sys.argv[1]}/lives", "a") as file:
    file.write(f"{os.environ['RANK']} {lives} {os.environ['WORLD_SIZE']}\\n")
if os.environ["RANK"] == "1" and lives == "0":
    os.kill(os.getpid(), signal.SIGKILL)
while len(open(f"{sys.argv[1]}/lives").readlines()) < 3:
    time.sleep(0.01)
"""
    assert launched(monkeypatch, tmp_path, program, ranks=5) == 0
    assert sorted((tmp_path / "lives").read_text().splitlines()) == ["0 0 5", "1 0 5", "1 1 5"]
    assert "rank 1 was ended by signal 9 (SIGKILL); the others go on" in capfd.readouterr().err


def test_ranks_that_fail_at_once_are_not_started_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launched(monkeypatch, tmp_path, "raise SystemExit(7)") == 7
    assert "in a row have failed soon after their start" in capfd.readouterr().err


def test_what_ranks_refuse_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert launched(monkeypatch, tmp_path, "raise SystemExit(2)") == 2


def test_who_has_not_come_when_the_run_is_over_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gradsync.tools.cli.launching.GRACE_SECONDS", 0.5)
    program = "import os, time\nif os.environ['RANK'] == '1': time.sleep(1000)\n"
    assert launched(monkeypatch, tmp_path, program) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [({"ranks": 1}, "--elastic-ranks is 1"), ({"min_ranks": 3}, "--min-ranks is 3")],
)
def test_impossible_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        launched(monkeypatch, tmp_path, "", **options)


def test_the_roll_call_answers_all_alike_and_forgets_who_is_gone(roll_call: RollCall) -> None:
    first, second = RollCallMembership(roll_call.port), RollCallMembership(roll_call.port)
    second.close()
    assert [each.identity for each in first.ask(STANDING, 10)] == [first.identity]
    first.close()
