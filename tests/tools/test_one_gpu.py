"""Commands whose ranks share one GPU on request: what is asked for, what is refused, and runs. Without a GPU, CPU ranks
are started in the same way."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync.accelerator.world import agree_on_backend
from gradsync.base.environment import ProcessEnvironment
from gradsync.lab import SharedGpuPlan
from gradsync.observe.recording import find_recordings
from gradsync.tools.cli.launching import GpuChoice
from gradsync.tools.doctor.checks import MIB, Status
from gradsync.tools.doctor.network import measured

pytestmark = pytest.mark.timeout(120)

SMALL = ["--model", "nano", "--batch", "2", "--length", "32", "--steps", "5", "--warmup", "1", "--validate-every", "5"]
PLACES = """
import os
with open(os.path.join({folder!r}, os.environ["RANK"]), "w") as file:
    print(*(os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", "NCCL_NET")), file=file)
"""


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """In this process, which only counts them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


# -- the choice -------------------------------------------------------------------------------------------------------


def test_how_many_ranks_there_are_without_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    see_gpus(monkeypatch, 8)
    assert GpuChoice().default_ranks == 8
    assert GpuChoice(cpu=True).default_ranks == 3
    assert GpuChoice(one_gpu=True).default_ranks == 2
    see_gpus(monkeypatch, 0)
    assert GpuChoice().default_ranks == 3


def test_ranks_share_a_gpu_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 1)
    assert GpuChoice().sharing(4) is None
    assert GpuChoice(one_gpu=True).sharing(4) == SharedGpuPlan(ranks=4)
    assert GpuChoice(one_gpu=True, mps=True).sharing(3) == SharedGpuPlan(ranks=3, mps=True)
    assert str(SharedGpuPlan(ranks=3, mps=True)) == "3 ranks share one GPU under MPS"
    assert str(SharedGpuPlan()) == "2 ranks share one GPU by time slices"


@pytest.mark.parametrize(
    ("gpus", "choice", "ranks", "said"),
    [
        (0, GpuChoice(), 4, ""),
        (4, GpuChoice(), 4, ""),
        (1, GpuChoice(cpu=True), 4, ""),
        (1, GpuChoice(one_gpu=True), 4, ""),
        (1, GpuChoice(), 2, "2 ranks need 2 GPUs, and there is 1: say --one-gpu to share one"),
        (2, GpuChoice(), 3, "3 ranks need 3 GPUs, and there are 2: say --one-gpu to share one"),
    ],
)
def test_more_ranks_than_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, choice: GpuChoice, ranks: int, said: str
) -> None:
    see_gpus(monkeypatch, gpus)
    assert choice.too_many(ranks) == said


@pytest.mark.parametrize(
    ("gpus", "arguments", "expected"),
    [
        (1, "train --nproc 2", "2 ranks need 2 GPUs, and there is 1: say --one-gpu to share one, or --cpu to use none"),
        (0, "train --one-gpu", "--one-gpu needs a GPU, and torch sees none here"),
        (1, "train --one-gpu --cpu", "--one-gpu puts all ranks on a GPU, and --cpu none"),
        (1, "train --mps", "--mps says how ranks share a GPU: give --one-gpu, too"),
        (1, "train --one-gpu --nproc 17", "1 to 16 ranks can share a GPU here, got 17"),
        (0, "run --one-gpu script.py", "--one-gpu needs a GPU, and torch sees none here"),
        (1, "run --one-gpu --nproc 0 script.py", "it does not go with --nproc 0"),
        (1, "run --mps script.py", "--mps says how ranks share a GPU: give --one-gpu, too"),
        (0, "doctor --one-gpu", "--one-gpu needs a GPU, and torch sees none here"),
        (1, "doctor --mps", "--mps says how ranks share a GPU: give --one-gpu, too"),
    ],
)
def test_what_cannot_be_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    gpus: int,
    arguments: str,
    expected: str,
    run_main: Callable[..., int],
) -> None:
    (tmp_path / "script.py").write_text("")
    monkeypatch.chdir(tmp_path)
    see_gpus(monkeypatch, gpus)
    assert run_main(*arguments.split()) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert len(shown.splitlines()) == 1


# -- runs, without a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.program
def test_ranks_of_a_script_are_alone_on_their_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run_main: Callable[..., int]
) -> None:
    see_gpus(monkeypatch, 1)
    (tmp_path / "script.py").write_text(PLACES.format(folder=str(tmp_path)))
    code = run_main("run", "--nproc", "3", "--one-gpu", str(tmp_path / "script.py"))
    assert code == 0, capfd.readouterr().err
    assert [(tmp_path / str(rank)).read_text().split() for rank in range(3)] == [["3", "0", "3", "Socket"]] * 3


@pytest.mark.program
def test_a_script_that_may_want_more_gpus_is_run_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run_main: Callable[..., int]
) -> None:
    see_gpus(monkeypatch, 1)
    (tmp_path / "script.py").write_text("import os; assert 'NCCL_HOSTID' not in os.environ")
    assert run_main("run", "--nproc", "2", str(tmp_path / "script.py")) == 0
    assert "warning: if the script wants a GPU per rank: 2 ranks need 2 GPUs" in capfd.readouterr().err


@pytest.mark.program
def test_a_training_whose_ranks_share_a_gpu_can_be_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run_main: Callable[..., int]
) -> None:
    see_gpus(monkeypatch, 1)
    folder = tmp_path / "run"
    code = run_main("train", "--one-gpu", *SMALL, "--run-folder", str(folder))
    assert code == 0, capfd.readouterr().err
    assert json.loads((folder / "summary.json").read_text())
    assert len(find_recordings(folder / "recording")) == 2
    capfd.readouterr()
    assert run_main("explain", str(folder)) == 0
    assert "2 ranks" in capfd.readouterr().out


def test_ranks_of_different_hosts_may_share_a_gpu_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    same = SimpleNamespace(uuid="the only one")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: same)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    def backend(*hosts: str) -> str:
        """What the last of the ranks finds, when the others have said what they have."""
        store: Any = dist.HashStore()
        for host in hosts[:-1]:
            if store.add(f"gpu the only one {host}", 1) > 1:
                store.add("ranks without a gpu of their own", 1)
            store.add("ranks", 1)
        monkeypatch.setenv("NCCL_HOSTID", hosts[-1])
        place = ProcessEnvironment(rank=1, world_size=2, local_rank=1, local_world_size=2)
        return agree_on_backend(store, place, torch.device("cuda", 0))

    assert backend("a", "b") == "cpu:gloo,cuda:nccl"
    assert backend("a", "a") == "gloo"


def test_the_doctor_does_not_judge_a_shared_gpu() -> None:
    slow = {str(4 * 1024): 0.5, str(MIB): 0.5}
    assert measured("nccl", 2, slow).status is Status.WARN
    finding = measured("nccl", 2, slow, sharing=SharedGpuPlan(mps=True))
    assert finding.status is Status.PASS
    assert finding.detail.splitlines()[:2] == ["all-reduce between 2 ranks", "2 ranks share one GPU under MPS"]


# -- with a GPU -------------------------------------------------------------------------------------------------------


def gradsync_command(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """In a process of its own, as a user's."""
    return subprocess.run(
        [sys.executable, "-m", "gradsync", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(gradsync.__file__).parents[1]), *sys.path])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize("more", [[], ["--mps"]], ids=["slices", "mps"])
def test_a_training_on_one_gpu(tmp_path: Path, more: list[str]) -> None:
    if torch.cuda.device_count() == 0:
        pytest.skip("needs a CUDA device")
    result = gradsync_command(
        tmp_path, "train", "--nproc", "2", "--one-gpu", *more, *SMALL, "--run-folder", str(tmp_path / "run")
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Gloo" not in result.stderr
    explained = gradsync_command(tmp_path, "explain", str(tmp_path / "run"))
    assert explained.returncode == 0, explained.stderr


@pytest.mark.gpu
@pytest.mark.timeout(240)
def test_the_doctor_measures_nccl_on_one_gpu(tmp_path: Path) -> None:
    if torch.cuda.device_count() == 0:
        pytest.skip("needs a CUDA device")
    result = gradsync_command(tmp_path, "doctor", "--one-gpu", "--json", "--timeout", "60")
    findings = {each["name"]: each for each in json.loads(result.stdout)["findings"]}
    assert "2 ranks share one GPU by time slices" in findings["nccl link"]["detail"], result.stdout
