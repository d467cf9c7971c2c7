"""The path of a gradient is as docs/architecture.md draws it: which calls, in which files, and no others."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import gradsync
from gradsync import DistributedDataParallel
from gradsync.communicator import choose_communicator
from gradsync.testing import run_ranks

PACKAGE = Path(gradsync.__file__).parent
DOCUMENT = PACKAGE.parents[1] / "docs" / "architecture.md"
# What a stop asks on its way, and does not pass the gradient on with.
QUESTIONS = {"averages", "world_size", "rank", "device", "collective_divides", "now", "describe"}
# Nor is the mark by which an interrupt is noticed.
QUESTIONS |= {"__enter__", "__exit__"}
# Observers are not stages.
ONLOOKERS = {"core/engine/observer.py", "observe/recording/marks.py", "observe/recording/recorder.py"}


def documented() -> list[tuple[str, str]]:
    """The numbered table of the path: file and function."""
    rows = re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert rows, "docs/architecture.md has no table of the path"
    return [(file, function.partition("(")[0].rpartition(".")[2]) for file, function in rows]


class Recorder:
    """Every function of the package that is entered between a hook and the call of the communicator, in order."""

    def __init__(self) -> None:
        self.paths: list[list[tuple[str, str]]] = []
        self._path: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)):
            return
        path = Path(code.co_filename).relative_to(PACKAGE)
        entry = ("communicator/" if path.parts[0] == "communicator" else str(path), code.co_name)
        if entry[0] == "core/engine/ready_hooks.py":
            self._path = []
        self._path.append(entry)
        if code.co_name == "all_reduce":
            self.paths.append(self._path)
            self._path = []


def train(counted: bool) -> list[list[tuple[str, str]]]:
    """The paths of a fourth backward; of a gradient that is counted, or seen with the others of its chunk."""
    recorder = Recorder()
    # One layer without bias a bucket: the last gradient of each is the one that starts it.
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    model = DistributedDataParallel(module, bucket_cap_mb=64 * 64 * 4 / 2**20)
    for step in range(5):
        model.zero_grad(set_to_none=not counted)
        loss = model(torch.ones(2, 64) * (choose_communicator().rank + step)).square().mean()
        if step == 4:
            # Hooks run on the thread that calls backward, where there is but one device.
            sys.setprofile(recorder)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
    return recorder.paths


def paths(counted: bool) -> list[list[tuple[str, str]]]:
    """Those that a hook has begun and ended, without questions. The last bucket is started when backward has ended."""
    recorded = run_ranks(train, 2, counted)[0]
    begun = [way for way in recorded if way[0][0] == "core/engine/ready_hooks.py"]
    ended = [way for way in begun if ("core/engine/backward.py", "backward_ended") not in way]
    assert len(begun) == len(ended) + 1
    return [[step for step in way if step[1] not in QUESTIONS and step[0] not in ONLOOKERS] for way in ended]


def test_the_path_is_the_documented_one() -> None:
    table = documented()
    assert len(table) <= 9
    assert len({file for file, _ in table}) <= 5
    assert len(paths(counted=False)) == 3
    for way in paths(counted=False):
        assert way == table


def test_the_path_of_a_counted_gradient_has_as_many_calls() -> None:
    table = documented()
    assert len(paths(counted=True)) == 3
    for way in paths(counted=True):
        assert len(way) == len(table)
        assert {file for file, _ in way} == {file for file, _ in table}
