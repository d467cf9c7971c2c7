"""How a rank ends decides the exit code of the run and what is said of it, whoever is seen to end first."""

import re
import sys
from pathlib import Path

import pytest

from gradsync.health.watch import exit_causes
from gradsync.health.watch.exit_causes import exit_call, exit_status, exit_words
from tests.zygote import run_python

SCRIPT = """
import asyncio, atexit, contextlib, ctypes, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

how, when = sys.argv[1:]
rank = int(os.environ["RANK"])


def leave():
    if rank == 0:
        return
    if how == "slow end":
        atexit.register(time.sleep, 60)
    match how:
        case "exit" | "slow end": sys.exit(3)  # exits here
        case "words": raise SystemExit("no data")  # exits here
        case "true": sys.exit(True)  # exits here
        case "zero": sys.exit(0)  # exits here
        case "nothing": sys.exit()  # exits here
        case "return": sys.exit(0) if False else end()
        case "os._exit": os._exit(3)
        case "killed": os.kill(os.getpid(), 9)
        case "terminated": os.kill(os.getpid(), 15)
        case "crash": ctypes.string_at(0)
        case "raises": raise ValueError("no luck")
        case "cancelled": raise asyncio.CancelledError("not by an error")
        case "large": sys.exit(2**70)  # exits here


class End(Exception):
    pass


def end():
    raise End


def train():
    if when == "before":
        leave()
    dist.init_process_group("gloo")
    if when == "bare":
        for step in range(9):
            if step == 3:
                leave()
            dist.all_reduce(torch.ones(1000))
        return
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        if when == "between steps" and step == 3:
            leave()
        for micro_batch in range(2):
            if when == "in a window" and step == 3 and micro_batch == 1:
                leave()
            with model.no_sync() if micro_batch == 0 else contextlib.nullcontext():
                model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


with contextlib.suppress(End):
    train()
"""

EXIT = r"rank 1 failed first: it called sys\.exit\({}\) in line {} of .*script\.py\n"
ZERO = r"rank 1 ended first, with exit code 0: it called sys\.exit\({}\) in line {} of .*script\.py\n"
LINES = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if "# exits here" in line]
ENDS = [
    ("exit", "before", 3, EXIT.format(3, LINES[0])),
    ("exit", "between steps", 3, EXIT.format(3, LINES[0])),
    ("exit", "in a window", 3, EXIT.format(3, LINES[0])),
    ("exit", "bare", 3, EXIT.format(3, LINES[0])),
    # Its interpreter is long at its end when the others have failed, and the launcher ends it.
    ("slow end", "between steps", 3, EXIT.format(3, LINES[0])),
    ("words", "in a window", 1, EXIT.format("'no data'", LINES[1])),
    ("true", "between steps", 1, EXIT.format("True", LINES[2])),
    ("zero", "between steps", 1, ZERO.format("0", LINES[3])),
    ("nothing", "bare", 1, ZERO.format("", LINES[4])),
    ("return", "in a window", 1, r"rank 1 ended first, with exit code 0: it came to the end of its script\n"),
    ("os._exit", "between steps", 3, r"rank 1 failed with exit code 3, and left no error: it called os\._exit\(\)"),
    ("os._exit", "bare", 3, r"rank 1 failed with exit code 3, and left no error: it called os\._exit\(\)"),
    ("killed", "bare", 137, r"rank 1 was ended by signal 9 \(SIGKILL\); the others were stopped"),
    ("killed", "in a window", 137, r"rank 1 was ended by signal 9 \(SIGKILL\); the others were stopped"),
    ("terminated", "between steps", 143, r"rank 1 was ended by signal 15 \(SIGTERM\); the others were stopped"),
    ("crash", "between steps", 139, r"rank 1 was ended by signal 11 \(SIGSEGV\); the others were stopped"),
    ("large", "between steps", 255, EXIT.format(2**70, LINES[5])),
    # Python shows it: once is enough.
    ("cancelled", "between steps", 1, r"rank 1 failed first, with CancelledError; its own message is above\n"),
    ("raises", "bare", 1, r"rank 1 failed first:\nTraceback [^\0]*\nValueError: no luck\ngradsync: rank 0 then"),
]


def run(folder: Path, script: str, *arguments: str, ranks: int = 2) -> tuple[int, str]:
    (folder / "script.py").write_text(script)
    told = run_python("-m", "gradsync", "run", "--nproc", str(ranks), "script.py", *arguments, folder=folder)
    return told.returncode, told.stderr


@pytest.mark.program
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("how", "when", "code", "words"), ENDS, ids=[f"{how}, {when}" for how, when, _, _ in ENDS])
def test_the_code_and_the_cause_are_those_of_the_rank_that_ended_first(
    how: str, when: str, code: int, words: str, tmp_path: Path
) -> None:
    found, said = run(tmp_path, SCRIPT, how, when)
    assert found == code, said
    assert re.search(f"gradsync: {words}", said), said
    assert "rank 0 failed first" not in said
    if how in ("exit", "slow end", "words", "true", "zero", "nothing", "return", "raises"):
        assert "os._exit" not in said


# Rank 0 loses rank 1 and ends in ways of its own, which do not look like the loss of a rank.
LOSING = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist

how, rank = sys.argv[1], int(os.environ["RANK"])
lost = pathlib.Path("lost")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(10))
if rank == 1:
    if how == "finally":
        try:
            sys.exit(3)
        finally:
            # As many scripts end: the others fail before anybody can know why.
            dist.destroy_process_group()
            while not lost.exists():
                time.sleep(0.01)
            time.sleep(1)
    os.kill(os.getpid(), 9)
try:
    dist.all_reduce(torch.ones(10))
except RuntimeError:
    lost.touch()
    if how in ("exits", "finally"):
        sys.exit(5)
    if how == "_exit":
        os._exit(5)
raise ValueError("some words of its own")
"""


@pytest.mark.program
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("how", "code"), [("raises", 137), ("exits", 137), ("_exit", 137), ("finally", 3)])
def test_a_rank_that_only_lost_another_one_is_not_the_cause(how: str, code: int, tmp_path: Path) -> None:
    found, said = run(tmp_path, LOSING, how)
    assert found == code, said
    cause = "failed first: it called sys.exit(3)" if how == "finally" else "was ended by signal 9 (SIGKILL)"
    assert f"gradsync: rank 1 {cause}" in said
    assert "rank 0 failed first" not in said


# Rank 1 ends with 0 before the others have failed; these are ended by the launcher, and one of them says so by a code.
ENDED = """
import os, signal, sys, time
import torch.distributed as dist

rank = int(os.environ["RANK"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
if rank == 1:
    sys.exit(3)
time.sleep(60)
"""


@pytest.mark.program
@pytest.mark.timeout(150)
def test_a_rank_that_the_launcher_ends_is_never_the_cause(tmp_path: Path) -> None:
    code, said = run(tmp_path, ENDED, ranks=3)
    assert code == 3, said
    assert "gradsync: rank 1 failed first: it called sys.exit(3) in line 8 of" in said
    assert "gradsync: rank 0 then called sys.exit(7) in line 6 of" in said


@pytest.mark.parametrize(
    ("argument", "status"),
    [
        (None, 0),
        (0, 0),
        (False, 0),
        (True, 1),
        (3, 3),
        (-1, 255),
        (256, 0),
        (2**70, 255),
        ("text", 1),
        ("", 1),
        (2.5, 1),
        ((), 1),
    ],
)
def test_a_status_is_what_python_makes_of_it(argument: object, status: int) -> None:
    error = SystemExit()
    error.code = argument  # type: ignore[assignment]
    assert exit_status(error) == status


def test_the_line_is_that_of_the_script_and_not_of_a_library() -> None:
    import argparse

    with pytest.raises(SystemExit) as caught:
        argparse.ArgumentParser(add_help=False).exit(4)
    line = caught.traceback[0].lineno + 1
    assert exit_call(caught.value) == f"sys.exit(4) in line {line} of {__file__}"
    assert exit_words(caught.value) == f"called sys.exit(4) in line {line} of {__file__}"
    assert exit_call(SystemExit("x" * 10_000)).startswith("sys.exit('xxx")
    assert len(exit_call(SystemExit("x" * 10_000))) < 200


def test_calls_of_exit_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(exit_causes, "_recorded", [])
    exit_causes.patch_sys_exit()
    with pytest.raises(SystemExit) as caught:
        sys.exit("no data")
    assert caught.value.code == "no data"
    assert re.fullmatch(r"sys\.exit\('no data'\) in line \d+ of .*test_exit_causes\.py", exit_causes.recorded_exit())
    exit_causes.forget_exit()
    assert exit_causes.recorded_exit() == ""
