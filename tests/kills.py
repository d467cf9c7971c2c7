"""Trainings that are killed at random moments and go on, on other numbers of ranks: ``make kills ARGS="--seeds 20"``.

A seed draws the lives of one run of ``gradsync train``: for each how many ranks it has, whether the optimizer is shared
out over them, and when it is ended by SIGKILL, the launcher with all ranks or one of the ranks alone. The last life is
left to end by itself. Nothing may be lost: every life goes on from the newest checkpoint that the one before has left,
and the losses of all steps are those of a run that nobody has killed (in float64, so that the number of ranks does not
show).
"""

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsync.tools.llm.run_folder import read_metrics

__all__ = ["Course", "Life", "compare", "draw", "live_through", "live_with_restarts", "losses_of", "train_undisturbed"]

STEPS = 120
CHECKPOINT_EVERY = 5
# Micro-batches of all ranks together: as many for each of one, two or three.
WINDOW = 6
TOLERANCE = 1e-9
LIFE_SECONDS = 150.0
TEXT = "the quick brown fox jumps over the lazy dog, again and again and once more. " * 400


@dataclass(frozen=True, kw_only=True)
class Life:
    """One start of the command. It is killed ``after`` so many seconds of training, or of ``setting_up``, if at all."""

    ranks: int
    sharded: bool
    after: float | None = None
    setting_up: bool = False
    # Which rank alone; all of them, and the launcher, if None.
    victim: int | None = None

    def __str__(self) -> str:
        kind = "sharded" if self.sharded else "plain"
        fate = "to its end"
        if self.after is not None:
            fate = f"{'all' if self.victim is None else f'rank {self.victim}'} killed after {self.after:.2f} s"
            fate += " of setting up" if self.setting_up else ""
        return f"{self.ranks} {kind}, {fate}"


@dataclass(frozen=True, kw_only=True)
class Course:
    """The lives of one run."""

    seed: int
    lives: tuple[Life, ...]


def draw(seed: int, *, kills: int = 3) -> Course:
    """The lives of a seed: mostly sharded, on 1, 2 and 3 ranks."""
    chance = random.Random(seed)
    lives = []
    for number in range(kills + 1):
        ranks = chance.randint(1, 3)
        after = chance.uniform(0.0, 3.0) if number < kills else None
        victim = chance.randrange(ranks) if after is not None and chance.random() < 0.5 else None
        setting_up, sharded = chance.random() < 0.2, chance.random() < 0.8
        lives.append(Life(ranks=ranks, sharded=sharded, after=after, victim=victim, setting_up=setting_up))
    return Course(seed=seed, lives=tuple(lives))


def command(folder: Path, life: Life, *, resume: bool) -> list[str]:
    options = ["--model", "nano", "--batch", "1", "--length", "32", "--precision", "fp64"]
    options += ["--grad-accum", str(WINDOW // life.ranks)]
    options += ["--steps", str(STEPS), "--checkpoint-every", str(CHECKPOINT_EVERY), "--validate-every", "1000"]
    options += ["--data", str(folder.parent / "fox.txt"), "--run-folder", str(folder), "--nproc", str(life.ranks)]
    options += ["--shard-optimizer"] if life.sharded else []
    options += ["--resume"] if resume else []
    return [sys.executable, "-m", "gradsync", "train", "--cpu", *options]


def steps_in(folder: Path) -> list[dict[str, Any]]:
    """What the run has recorded of its steps."""
    path = folder / "metrics.jsonl"
    return [each for each in read_metrics(path) if each["kind"] == "step"] if path.exists() else []


def losses_of(folder: Path) -> dict[int, float]:
    """By step. The last word on a step counts, as for whoever reads the file."""
    return {each["step"]: each["loss"] for each in steps_in(folder)}


@contextlib.contextmanager
def started(told: list[str], folder: Path) -> "Iterator[tuple[subprocess.Popen[bytes], Path]]":
    """The command, and the file with what it writes. Nothing of the run is left when the context ends."""
    log = folder.parent / "output"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache_of(folder))}
    with log.open("wb") as output:
        process = subprocess.Popen(told, stdout=output, stderr=subprocess.STDOUT, env=variables)
    try:
        yield process, log
    finally:
        _kill(folder, None)
        process.wait()


def cache_of(folder: Path) -> Path:
    """What tells the processes of a run from all others."""
    return folder.parent / f"cache-{folder.name}"


def prepare(folder: Path) -> None:
    text = folder.parent / "fox.txt"
    if not text.exists():
        text.write_text("".join(TEXT[number % 97 :: 97] + "\n" for number in range(400)))


def train_undisturbed(folder: Path) -> dict[int, float]:
    """The losses of a plain optimizer on one rank."""
    prepare(folder)
    life = Life(ranks=1, sharded=False)
    began, said = live(life, folder, resume=False)
    assert began == 0, said
    return losses_of(folder)


def live_through(course: Course, folder: Path, expected: dict[int, float]) -> list[int]:
    """The steps from which the lives went on. AssertionError if anything was lost."""
    prepare(folder)
    went_on = []
    for life in course.lives:
        kept = newest_checkpoint(folder)
        had_begun = folder.exists() and any(folder.iterdir())
        began, output = live(life, folder, resume=had_begun)
        assert began >= kept, f"{life}: went on from step {began}, and step {kept} had been saved\n{output}"
        went_on.append(began)
    compare(losses_of(folder), expected)
    return went_on


def compare(losses: dict[int, float], expected: dict[int, float]) -> None:
    """AssertionError if a step is missing, or its loss is another."""
    assert losses.keys() == expected.keys(), f"steps {sorted(losses.keys() ^ expected.keys())} are on one side only"
    for step, loss in losses.items():
        assert abs(loss - expected[step]) <= TOLERANCE * abs(expected[step]), (step, loss, expected[step])


def newest_checkpoint(folder: Path) -> int:
    """The step of the newest one that is whole: what is being written has another name."""
    names = [path.name for path in (folder / "checkpoints").glob("step-*")]
    return max((int(name.removeprefix("step-")) for name in names if name[5:].isdigit()), default=0)


def live(life: Life, folder: Path, *, resume: bool) -> tuple[int, str]:
    """The step from which it went on, and what it wrote."""
    known = len(steps_in(folder))
    with started(command(folder, life, resume=resume), folder) as (process, log):
        if life.after is not None:
            _await_ranks(process, folder, life.ranks)
            while not life.setting_up and len(steps_in(folder)) <= known and process.poll() is None:
                time.sleep(0.02)
            time.sleep(life.after)
            _kill(folder, life.victim)
        code = process.wait(timeout=LIFE_SECONDS)
    said = log.read_text()
    # One that is to be killed may have come to its end before.
    assert code == 0 or life.after is not None, said
    told = re.search(r"resumed from step (\d+)", said)
    # Killed before it could say so, it has lost nothing either: the checkpoints are as they were.
    return (int(told[1]) if told else newest_checkpoint(folder) if life.after is not None else 0), said


def live_with_restarts(folder: Path, launcher: str, victims: list[int]) -> str:
    """What one command wrote that was allowed three restarts, and whose ``victims`` were killed one after the other."""
    prepare(folder)
    told = command(folder, Life(ranks=2, sharded=False), resume=False)
    if launcher == "torchrun":
        options = told[told.index("train") :]
        place = options.index("--nproc")
        del options[place : place + 2]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
        told = [sys.executable, *torchrun, "-m", "gradsync", *options]
    else:
        told += ["--max-restarts", "3"]
    with started(told, folder) as (process, log):
        for victim in victims:
            known, saved = len(steps_in(folder)), newest_checkpoint(folder)
            _await_ranks(process, folder, 2)
            deadline = time.monotonic() + LIFE_SECONDS
            # Not before it has come further than the life before it.
            while newest_checkpoint(folder) <= saved or len(steps_in(folder)) <= known:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            _kill(folder, victim)
        code = process.wait(timeout=LIFE_SECONDS)
    assert code == 0, log.read_text()
    return log.read_text()


def _await_ranks(process: "subprocess.Popen[bytes]", folder: Path, count: int) -> None:
    """Until so many run. A single one needs no launcher, and is the command itself."""
    deadline = time.monotonic() + LIFE_SECONDS
    while (
        len(_processes(folder).keys() - {None}) < count > 1 and process.poll() is None and time.monotonic() < deadline
    ):
        time.sleep(0.02)


def _processes(folder: Path) -> dict[int | None, int]:
    """Those of the run, by rank; the launcher has none. Each was told the folder of the run's cache."""
    mark, found = f"XDG_CACHE_HOME={cache_of(folder)}", {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            told = (path / "environ").read_text().split("\0")
            if mark in told:
                rank = next((int(each.removeprefix("RANK=")) for each in told if each.startswith("RANK=")), None)
                found[rank] = int(path.name)
    return found


def _kill(folder: Path, victim: int | None) -> None:
    processes = _processes(folder)
    if victim is not None:
        alone = len(processes) == 1
        processes = {rank: number for rank, number in processes.items() if alone or rank == victim}
    for number in processes.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kills", type=int, default=3, help="of each run")
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as name:
        expected = train_undisturbed(Path(name) / "undisturbed")
        for seed in range(options.first, options.first + options.seeds):
            course = draw(seed, kills=options.kills)
            print(f"seed {seed}: {'; '.join(map(str, course.lives))}", flush=True)
            try:
                went_on = live_through(course, Path(name) / f"run-{seed}", expected)
            except AssertionError as error:
                failed.append(seed)
                print(f"seed {seed} FAILED: {error}", flush=True)
            else:
                print(f"seed {seed}: went on from steps {went_on[1:]}, losses as undisturbed", flush=True)
    print(
        f"{options.seeds - len(failed)} of {options.seeds} runs lost nothing"
        + (f"; failed: {failed}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
