"""Random programs that do everything at once, for as long as asked: ``make attack ARGS="--minutes 30"``.

A seed draws a program for 2 or 3 real processes over Gloo (:mod:`tests.attack_programs`):

- a training with a plain, sharded or overlapped optimizer, closures, clipping, scaling, schedulers, groups that are
  added later, and windows of all kinds;
- threads that read, save and evaluate meanwhile, signal handlers that save, and interrupts;
- a rank that raises, sleeps, or is killed.

One process computes the same training alone, in float64. Then

- all ranks end with its parameters and optimizer states, and with the same bits;
- whatever anybody has read is the state after a whole step, or was refused with a clear error;
- nothing hangs, and nothing is raised that was not planted; no thread, process or file is left.

The seed of a program that fails is printed with the command that runs it again. With ``--mutants`` repairs are taken
out, one by one, to show that the programs find each of them missing.
"""

import argparse
import collections
import contextlib
import importlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.attack_check import check
from tests.attack_disturbances import Outcome
from tests.attack_mutants import MUTANTS
from tests.attack_programs import Program, draw
from tests.attack_rank import attack
from tests.ranks import RankError, RankFailure, RankPool
from tests.soak import hunt

PROGRAM_SECONDS = 60.0
MUTANT_PROGRAMS = 900


class Attacker:
    """Pools of ranks, kept from program to program, and what has happened in them."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}
        self._folder = tempfile.TemporaryDirectory()
        self.counts: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> "Attacker":
        self._variables = mock.patch.dict(os.environ, {"TMPDIR": self._folder.name})
        self._variables.start()
        self._shared = _shared_memory()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._variables.stop()
        self._folder.cleanup()

    def close(self) -> list[str]:
        """End the ranks: what they have left."""
        pids = [pid for pool in self._pools.values() for pid in pool.pids()]
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        # Where torch's compiler would keep what it compiles: it makes that when it is imported.
        files = [str(path) for path in Path(self._folder.name).rglob("*") if "torchinductor" not in path.name]
        files += sorted(_shared_memory() - self._shared)
        processes = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        return [f"files were left: {files}"] * bool(files) + [f"processes were left: {processes}"] * bool(processes)

    def run(self, program: Program, without: str | None = None) -> list[str]:
        """What went wrong in it."""
        pool = self._pools.setdefault(program.world_size, RankPool(program.world_size))
        try:
            told = pool.run(attack, program, without, timeout=PROGRAM_SECONDS, expect_errors=True)
        except RankFailure as failure:
            return str(failure).splitlines()
        wrong: list[str] = []
        outcomes: list[Outcome | None] = []
        may_die = program.end is not None and program.end.kind == "killed"
        for rank, each in enumerate(told):
            outcomes.append(None if isinstance(each, RankError) else each)
            if isinstance(each, RankError) and not (may_die and each.kind == "RankDied"):
                wrong.append(f"rank {rank} raised {each}\n{each.traceback}")
        wrong += check(program, outcomes)
        self._count(program, outcomes)
        if wrong:
            # Their group may be out of step.
            pool.kill()
        return wrong

    def _count(self, program: Program, outcomes: list[Outcome | None]) -> None:
        self.counts[program.optimizer.kind] += 1
        for outcome in filter(None, outcomes):
            self.counts["snapshots"] += len(outcome.snapshots)
            self.counts["refused"] += outcome.refused
            self.counts["interrupts"] += outcome.interrupted


def _shared_memory() -> set[str]:
    with contextlib.suppress(OSError):
        return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "gradsync" in name}
    return set()


def _again(seed: int, without: str | None) -> str:
    return f"make attack ARGS='--seed {seed}{f' --without {without}' if without else ''}'"


def _seeds(first: int, kinds: tuple[str, ...] | None) -> Iterator[int]:
    """From ``first`` on: those whose program has an optimizer of these kinds."""
    seed = first
    while True:
        if kinds is None or draw(seed).optimizer.kind in kinds:
            yield seed
        seed += 1


def hunt_programs(attacker: Attacker, options: argparse.Namespace) -> int:
    """Program after program, until the time is up or too much was found."""
    limit = f"{options.programs} programs" if options.programs else f"{options.minutes:g} minutes"
    print(f"attack: {limit}, seeds from {options.seeds_from}", flush=True)
    began = time.monotonic()
    count, failures = hunt(
        lambda seed: attacker.run(draw(seed), options.without),
        _seeds(options.seeds_from, (options.optimizer,) if options.optimizer else None),
        describe=draw,
        again=lambda seed: _again(seed, options.without),
        minutes=math.inf if options.programs else options.minutes,
        most=options.programs or math.inf,
    )
    shown = ", ".join(f"{number} {name}" for name, number in sorted(attacker.counts.items()))
    left_behind = attacker.close()
    print(
        *left_behind,
        f"attack: {count} programs in {time.monotonic() - began:.0f} s ({shown}), {failures} failed",
        sep="\n",
    )
    return int(failures > 0 or bool(left_behind))


def hunt_mutants(attacker: Attacker, options: argparse.Namespace) -> int:
    """Each repair, taken out, until a program finds it missing."""
    missed = []
    for name, mutant in MUTANTS.items():
        began, count, found = time.monotonic(), 0, None
        for seed in _seeds(options.seeds_from, mutant.kinds):
            if found is not None or count >= (options.programs or MUTANT_PROGRAMS):
                break
            count += 1
            wrong = attacker.run(draw(seed), name)
            if wrong and (other := attacker.run(draw(seed))):
                print(f"FAILED {draw(seed)}\n  with all repairs: {_again(seed, None)}\n  {other[0]}", flush=True)
            elif wrong:
                found = seed, wrong[0]
        seconds = f"{time.monotonic() - began:.0f} s"
        if found is None:
            missed.append(name)
            print(f"NOT FOUND {name}: {mutant.fault}: {count} programs were clean, {seconds}", flush=True)
        else:
            first = found[1].splitlines()[0]
            print(f"found     {name}: {mutant.fault}: in program {count} of {mutant.kinds}, {seconds}")
            print(f"          {first[:200]}\n          again with: {_again(found[0], name)}", flush=True)
    print(f"attack: {len(MUTANTS) - len(missed)} of {len(MUTANTS)} repairs that were taken out were found missing")
    return int(bool(missed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, metavar="M", help="how long (default: 5)")
    parser.add_argument("--programs", type=int, metavar="N", help="how many programs, instead of how long")
    parser.add_argument("--seeds-from", type=int, metavar="SEED", help="the first seed (default: the time)")
    parser.add_argument("--seed", type=int, help="run the program of this seed alone, and say all about it")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="with --seed: so many times (default: 1)")
    parser.add_argument("--optimizer", choices=("plain", "sharded", "overlapped"), help="only programs with this one")
    parser.add_argument(
        "--without", choices=sorted(MUTANTS), metavar="REPAIR", help=f"take out one of: {', '.join(MUTANTS)}"
    )
    parser.add_argument("--mutants", action="store_true", help="take out each repair, until a program finds it missing")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    with Attacker() as attacker:
        if options.seed is not None:
            program = draw(options.seed)
            print(program, flush=True)
            wrong: list[str] = []
            for _ in range(options.repeat):
                wrong = wrong or attacker.run(program, options.without)
            print("\n".join(wrong) or "clean")
            return int(bool(wrong))
        if options.mutants:
            options.seeds_from = options.seeds_from or 0
            return hunt_mutants(attacker, options)
        if options.seeds_from is None:
            options.seeds_from = int(time.time())
        return hunt_programs(attacker, options)


if __name__ == "__main__":
    # Under its own name, by which ranks find what they are to run.
    sys.exit(importlib.import_module("tests.attack").main())
