"""`gradsync train`: the numbers of one process on any number of ranks, exact resuming, clear errors. Real processes."""

import html
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsync import Accelerator
from gradsync.errors import ConfigurationError
from gradsync.observe.recording import Recorder
from gradsync.tools.llm.run import run as run_here
from gradsync.tools.llm.run_folder import read_metrics
from gradsync.tools.llm.settings import TrainSettings
from gradsync.tools.llm.tokens import prepare_tokens
from gradsync.tools.llm.trainer import StepRecord, Trainer, make_accelerator
from tests.ranks import RankPool, pool_of
from tests.zygote import Forked, fork, run_python

# One worker runs them all: they share a run that takes long.
pytestmark = [pytest.mark.program, pytest.mark.timeout(400), pytest.mark.xdist_group("train")]

TEXT = "the quick brown fox jumps over the lazy dog, again and again and once more. " * 400


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "fox.txt"
    path.write_text("".join(TEXT[number % 97 :: 97] + "\n" for number in range(400)))
    return path


class Losses:
    """Hears of every step."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def began(self, trainer: Trainer, notes: list[str]) -> None:
        self.notes = notes

    def stepped(self, record: StepRecord) -> None:
        self.steps.append((record.loss, record.gradient_norm))

    def validated(self, step: int, loss: float) -> None:
        self.validation = loss

    def saved(self, step: int) -> None:
        pass


def settings_for(folder: Path, text: Path, **changes: Any) -> TrainSettings:
    return TrainSettings(
        **{
            "model": "nano",
            "data": str(text),
            "micro_batch": 2,
            "sequence_length": 32,
            "steps": 8,
            "warmup": 2,
            "run_folder": folder,
            **changes,
        }
    )


def trainer_of(settings: TrainSettings) -> tuple[Trainer, Accelerator]:
    recorder = Recorder()
    accelerator = make_accelerator(settings, recorder, cpu=True)
    return Trainer(settings, accelerator, recorder, prepare_tokens(settings.data)), accelerator


def train(settings: TrainSettings) -> tuple[list[tuple[float, float]], list[torch.Tensor], float]:
    """A run on the ranks of the caller; losses are those of rank 0."""
    torch.set_num_threads(1)
    trainer, accelerator = trainer_of(settings)
    losses = Losses()
    outcome = trainer.run(losses)
    assert outcome.proof.equal, outcome.proof
    parameters = [parameter.detach().clone() for parameter in trainer.plain_model.parameters()]
    accelerator.free_memory()
    assert outcome.validation_loss is not None
    return losses.steps, parameters, outcome.validation_loss


# -- the numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp64", 1e-10)])
def test_two_ranks_with_four_micro_batches_are_one_with_eight(
    tmp_path: Path, text: Path, precision: str, tolerance: float
) -> None:
    alone, _, validation = train(settings_for(tmp_path / "1", text, precision=precision, grad_accum=8))
    together, _, their_validation = pool_of(2).run(
        train, settings_for(tmp_path / "2", text, precision=precision, grad_accum=4)
    )[0]
    assert len(alone) == len(together) == 8
    for (loss, norm), (their_loss, their_norm) in zip(alone, together, strict=True):
        assert loss == pytest.approx(their_loss, abs=tolerance)
        assert norm == pytest.approx(their_norm, rel=100 * tolerance)
    assert validation == pytest.approx(their_validation, abs=tolerance)
    assert alone[-1][0] < alone[0][0]


@pytest.mark.parametrize(
    "ways",
    [
        {"overlap": "next-forward"},
        {"overlap": "auto", "shard_optimizer": True},
        {"on_bad_step": "skip", "replica_check": 2},
    ],
    ids=["overlapped", "sharded auto", "skip votes and fingerprints"],
)
def test_ways_of_training_come_to_the_same_losses(tmp_path: Path, text: Path, ways: dict[str, Any]) -> None:
    plain, _, _ = pool_of(2).run(train, settings_for(tmp_path / "1", text, precision="fp64"))[0]
    other, _, _ = pool_of(2).run(train, settings_for(tmp_path / "2", text, precision="fp64", **ways))[0]
    for (loss, norm), (their_loss, their_norm) in zip(plain, other, strict=True):
        assert loss == pytest.approx(their_loss, abs=1e-10)
        assert norm == pytest.approx(their_norm, rel=1e-8)


class Saves(Losses):
    """Of how many steps it had heard when a checkpoint was written."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int, int]] = []

    def saved(self, step: int) -> None:
        self.heard.append((step, len(self.steps)))


def train_and_save(settings: TrainSettings) -> list[tuple[int, int]]:
    trainer, accelerator = trainer_of(settings)
    saves = Saves()
    trainer.run(saves)
    accelerator.free_memory()
    return saves.heard


def test_a_step_is_told_of_before_it_is_saved(tmp_path: Path, text: Path) -> None:
    """Or a run that resumes there, after it was killed, would never record it."""
    heard, _ = pool_of(2).run(train_and_save, settings_for(tmp_path / "run", text, checkpoint_every=3))
    assert heard == [(3, 3), (6, 6), (8, 8)]


def test_resuming_on_another_number_of_ranks_goes_on_with_the_same_windows(tmp_path: Path, text: Path) -> None:
    whole, _, _ = train(settings_for(tmp_path / "whole", text, precision="fp64", grad_accum=4, epochs=None, steps=8))
    folder = tmp_path / "parts"
    first = settings_for(folder, text, precision="fp64", grad_accum=4, steps=8, checkpoint_every=5)
    pool_of(2).run(train_until, settings_for(folder, text, precision="fp64", grad_accum=2, checkpoint_every=5), 5)
    rest, _, _ = train(settings_for(folder, text, precision="fp64", grad_accum=4, resume=True))
    assert first.steps == 8
    assert len(rest) == 3
    for (loss, _), (expected, _) in zip(rest, whole[5:], strict=True):
        assert loss == pytest.approx(expected, abs=1e-10)


def test_the_summary_of_a_resumed_run_counts_the_steps_that_it_ran(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run_here(settings_for(folder, text, steps=3), cpu=True)
    assert re.search(r"^ *steps +3 in \d+ s *$", capsys.readouterr().out, re.MULTILINE)
    run_here(settings_for(folder, text, steps=8, resume=True), cpu=True)
    assert re.search(r"^ *steps +5 in \d+ s, from step 3 to 8 *$", capsys.readouterr().out, re.MULTILINE)


def test_local_steps_end_in_one_model_and_go_on(tmp_path: Path, text: Path) -> None:
    """With a checkpoint in mid-cycle, for which ranks meet. ``train`` compares replicas."""
    local = {"reduction": "local:3", "grad_accum": 2, "checkpoint_every": 4}
    whole, parameters, _ = pool_of(2).run(train, settings_for(tmp_path / "whole", text, **local))[0]
    assert whole[-1][0] < whole[0][0]
    exact, others, _ = pool_of(2).run(train, settings_for(tmp_path / "exact", text, grad_accum=2))[0]
    # The first loss is that of the same weights on the same text.
    assert whole[0][0] == pytest.approx(exact[0][0], abs=1e-6)
    assert not all(map(torch.equal, parameters, others))
    pool_of(2).run(train_until, settings_for(tmp_path / "parts", text, **local), 5)
    rest, _, _ = pool_of(2).run(train, settings_for(tmp_path / "parts", text, **local, resume=True))[0]
    assert len(rest) == 4
    assert rest[0][0] == pytest.approx(whole[4][0], abs=1e-5)


def train_until(settings: TrainSettings, step: int) -> None:
    """Runs into a wall after `step` steps; the checkpoint of that step has been written."""
    trainer, accelerator = trainer_of(settings)
    ordinary = trainer._train_step

    def limited(*arguments: Any) -> Any:
        if trainer.step == step:
            raise KeyboardInterrupt
        return ordinary(*arguments)

    trainer._train_step = limited  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    accelerator.free_memory()


# -- the command ----------------------------------------------------------------------------------------------------


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "120"}


def command(*arguments: object) -> list[str]:
    return ["-m", "gradsync", "train", "--cpu", *map(str, arguments)]


def run(tmp_path: Path, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_python(*command(*arguments), variables=environment(tmp_path), timeout=150, folder=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    return done


LENGTH = ("--steps", 36, "--checkpoint-every", 8, "--lr", 3e-3)
SMALL = ("--model", "nano", "--batch", 2, "--length", 32, "--grad-accum", 4, "--nproc", 2)


def digest(folder: Path) -> str:
    value: str = json.loads((folder / "summary.json").read_text())["digest"]
    return value


def wait_for_step(folder: Path, step: int, process: Forked) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        metrics = folder / "metrics.jsonl"
        if metrics.exists() and any(record.get("step", 0) >= step for record in read_metrics(metrics)):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} never came")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, str]:
    """A run of 36 steps with a checkpoint every 8."""
    folder = tmp_path_factory.mktemp("whole")
    done = run(folder, *SMALL, "--data", text, *LENGTH, "--run-folder", folder / "run")
    return folder / "run", done.stdout


def test_a_run_leaves_everything_behind(uninterrupted: tuple[Path, str]) -> None:
    folder, output = uninterrupted
    assert "all 2 replicas hold the same parameters" in output
    assert json.loads((folder / "config.json").read_text())["ranks"] == 2
    steps = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, 37))
    assert sum(record["loss"] for record in steps[-5:]) < 0.8 * sum(record["loss"] for record in steps[:5])
    assert all(set(record["seconds"]) >= {"forward", "backward", "synchronization", "update"} for record in steps)
    assert (folder / "report.html").stat().st_size > 10_000
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000032", "step-00000036"]


def end_at(step: int, number: int, folder: Path, *options: Any) -> tuple[int, str]:
    """Run ``command`` until ``step`` is done, and end it by the signal: its exit code and what it wrote."""
    log = folder.parent / "output"
    with log.open("wb") as output:
        process = fork(
            "tests.nursery:as_python",
            command(*options),
            output=output,
            variables=environment(folder.parent),
            folder=folder.parent,
        )
    try:
        wait_for_step(folder, step, process)
        if number == signal.SIGKILL:
            # Launcher and ranks, somewhere in a window.
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        code = process.wait(timeout=100)
    finally:
        process.kill_all()
    return code, log.read_text()


def test_a_run_that_was_ended_goes_on_bit_for_bit(tmp_path: Path, text: Path, uninterrupted: tuple[Path, str]) -> None:
    """Ended three times: asked to, killed, and by Ctrl-C. Each time what it had by then is gone on with."""
    folder = tmp_path / "run"
    options = (*SMALL, "--data", text, *LENGTH, "--run-folder", folder)
    for step, number, code in ((5, signal.SIGTERM, 143), (13, signal.SIGKILL, None), (22, signal.SIGINT, 130)):
        returned, output = end_at(step, number, folder, *options)
        if code is not None:
            assert returned == code, output
            assert "Traceback" not in output
            assert "all 2 replicas hold the same parameters" in output
        assert "--resume" not in options or re.search(r"resumed from step \d+", output), output
        options = (*options, "--resume") if "--resume" not in options else options
    done = run(tmp_path, *options)
    assert re.search(r"resumed from step (2[2-9]|3\d)", done.stdout)
    assert digest(folder) == digest(uninterrupted[0])
    steps = [record["step"] for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "step"]
    assert steps == list(range(1, 37))


def test_every_flipped_byte_is_noticed(tmp_path: Path, text: Path, uninterrupted: tuple[Path, str]) -> None:
    """In each file of the newest checkpoint in turn; the previous one is used."""
    whole = uninterrupted[0]
    settings = settings_for(tmp_path / "run", text, grad_accum=4, resume=True)
    for name in sorted(path.name for path in (whole / "checkpoints" / "step-00000036").iterdir()):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "run")
        victim = tmp_path / "run" / "checkpoints" / "step-00000036" / name
        content = bytearray(victim.read_bytes())
        content[len(content) // 3] ^= 0x10
        victim.write_bytes(content)
        for step, notes in pool_of(2).run(loaded_step, settings):
            assert step == 32, name
            assert any("step-00000036" in note for note in notes), notes


def loaded_step(settings: TrainSettings) -> tuple[int, list[str]]:
    trainer, accelerator = trainer_of(settings)
    accelerator.free_memory()
    return trainer.step, trainer.notes


@pytest.mark.parametrize("small_disk", ["4m"], indirect=True)
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, text: Path, small_disk: Path) -> None:
    options = (*SMALL, "--data", text, "--checkpoint-every", 5, "--run-folder", small_disk / "run", "--nproc", 1)
    run(tmp_path, *options, "--steps", 5)
    ballast, used = small_disk / "ballast", sum(path.stat().st_size for path in small_disk.rglob("*"))
    ballast.write_bytes(b"x" * (4 * 2**20 - used - 600_000))
    done = run(tmp_path, *options, "--steps", 10, "--resume", code=1)
    assert "Traceback" not in done.stderr
    assert "space" in done.stderr
    ballast.unlink()
    assert [path.name for path in (small_disk / "run" / "checkpoints").iterdir()] == ["step-00000005"]
    run(tmp_path, *options, "--steps", 10, "--resume")


def test_bad_input_of_a_run_with_ranks(tmp_path: Path) -> None:
    """Found by the ranks, said once. What is found before is in test_option_errors.py."""
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "precious").write_text("do not touch")
    done = run(tmp_path, *SMALL, "--run-folder", "occupied", code=2)
    assert done.stderr.count("occupied") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "occupied" / "precious").read_text() == "do not touch"


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, text: Path, uninterrupted: tuple[Path, str]) -> None:
    shutil.copytree(uninterrupted[0], tmp_path / "run")
    settings = settings_for(tmp_path / "run", text, model="tiny", resume=True)
    with pytest.raises(ConfigurationError, match="--model nano"):
        loaded_step(settings)


def test_a_model_of_transformers(tmp_path: Path, text: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    config.save_pretrained(tmp_path / "model")
    losses, _, _ = train(settings_for(tmp_path / "run", text, model=str(tmp_path / "model"), learning_rate=1e-2))
    assert losses[-1][0] < losses[0][0]


# -- what is slow -----------------------------------------------------------------------------------------------------


def train_with_a_slow_rank(settings: TrainSettings) -> list[str]:
    """All of a run, with rank 1 sleeping in every step. What was logged for people, who have it on their screen."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    said: list[str] = []
    logging.getLogger("gradsync").addHandler(Listener(logging.WARNING))
    ordinary = Trainer._train_step

    def late(self: Trainer, *arguments: Any) -> Any:
        # Longer than a busy machine takes for the step itself, as a rule.
        time.sleep(0.5 if self.accelerator.process_index == 1 else 0.2)
        return ordinary(self, *arguments)

    Trainer._train_step = late  # type: ignore[method-assign]
    run_here(settings, cpu=True)
    return said


@pytest.mark.program
def test_a_slow_rank_is_on_the_screen_and_in_the_report(tmp_path: Path, text: Path) -> None:
    pool = RankPool(2)
    try:
        said, _ = pool.run(train_with_a_slow_rank, settings_for(tmp_path / "run", text, steps=30))
    finally:
        pool.close()
    words = next(each for each in said if each.startswith("rank 1 ") and "longer than the other rank" in each)
    notes = [each for each in read_metrics(tmp_path / "run" / "metrics.jsonl") if each["kind"] == "note"]
    assert words in [each["text"] for each in notes]
    assert words in html.unescape((tmp_path / "run" / "report.html").read_text())
