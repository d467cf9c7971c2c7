"""Ranks that share one GPU: the plan and the MPS daemon with a stand-in for NVIDIA's program, and the real ones where
there is a GPU."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import gradsync
from gradsync.errors import ConfigurationError, MisuseError
from gradsync.lab import LabError
from gradsync.tools.cli.main import app
from gradsync.tools.lab import gpu as gpu_module
from gradsync.tools.lab.gpu import MPS_CONTROL, SharedGpu, SharedGpuPlan, fork_gpu_ranks
from tests.processes import eventually, is_running

VISIBLE = "CUDA_VISIBLE_DEVICES"
MPS_PIPE, MPS_LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the lab makes its folders. No test may leave one."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


# -- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "1 to 16 ranks can share a GPU here, got 0"),
        ({"ranks": 17}, "1 to 16 ranks can share a GPU here, got 17"),
        ({"channels": 0}, "at least 1 channel, got 0"),
        ({"gpu": -1}, "numbered from 0, got -1"),
    ],
)
def test_impossible_plans_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SharedGpuPlan(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("visible", "gpu", "name"),
    [(None, 0, "0"), (None, 3, "3"), ("5", 0, "5"), ("2,GPU-8f,7", 1, "GPU-8f")],
)
def test_a_rank_sees_one_gpu_of_those_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpu: int, name: str
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    assert SharedGpuPlan(gpu=gpu).variables(0)[VISIBLE] == name


@pytest.mark.parametrize(("gpu", "visible"), [(2, "4,5"), (0, ""), (1, "4,")])
def test_a_gpu_that_is_not_visible_is_refused(monkeypatch: pytest.MonkeyPatch, gpu: int, visible: str) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    with pytest.raises(ConfigurationError, match=rf"GPU {gpu} is not visible here: {VISIBLE} is '{visible}'"):
        SharedGpuPlan(gpu=gpu).variables(0)


def test_each_rank_is_a_host_to_nccl_and_the_rest_is_the_same() -> None:
    first, second = (SharedGpuPlan(channels=3).variables(rank) for rank in range(2))
    assert first.pop("NCCL_HOSTID") != second.pop("NCCL_HOSTID")
    assert first == second
    assert (first["NCCL_NET"], first["NCCL_SOCKET_IFNAME"], first["NCCL_MAX_NCHANNELS"]) == ("Socket", "lo", "3")


def test_ranks_are_alone_on_their_hosts() -> None:
    with SharedGpu(SharedGpuPlan(ranks=3)) as gpu:
        variables = [place.variables for place in gpu.places()]
    assert [(each["RANK"], each["LOCAL_RANK"], each["WORLD_SIZE"]) for each in variables] == [
        (str(rank), "0", "3") for rank in range(3)
    ]
    assert len({each["NCCL_HOSTID"] for each in variables}) == 3
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in variables}) == 1
    assert MPS_PIPE not in variables[0]


def test_it_is_for_a_with_statement() -> None:
    gpu = SharedGpu(SharedGpuPlan())
    for _ in range(2):
        with pytest.raises(MisuseError, match="with statement"):
            gpu.variables(0)
        with gpu:
            assert gpu.variables(0)


# -- programs and functions, which need no GPU to be run as ranks -----------------------------------------------------

SAY = "import os; print(*(os.environ[name] for name in {names!r}), file=open({folder!r} + os.environ['RANK'], 'w'))"


def test_a_program_runs_once_per_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "7")
    say = SAY.format(names=["LOCAL_RANK", "WORLD_SIZE", VISIBLE, "MINE"], folder=f"{tmp_path}/")
    with SharedGpu(SharedGpuPlan(ranks=3)) as gpu:
        assert gpu.run([sys.executable, "-c", say], env={"MINE": "yes", VISIBLE: "9"}, timeout=60) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["0 3 7 yes\n"] * 3


def test_ranks_that_take_too_long_are_ended() -> None:
    with SharedGpu(SharedGpuPlan(ranks=2)) as gpu, pytest.raises(LabError, match="allow more time"):
        gpu.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.5)


def test_a_function_is_forked_once_per_rank_and_its_failure_is_named(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / os.environ["RANK"]).touch()
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("on purpose")
        time.sleep(60)

    with SharedGpu(SharedGpuPlan(ranks=2)) as gpu, pytest.raises(LabError, match="rank 1"):
        fork_gpu_ranks(gpu, work, timeout=60)
    assert {path.name for path in tmp_path.iterdir()} >= {"1"}


# -- the daemon, with a stand-in for NVIDIA's program -----------------------------------------------------------------

# With -f it is the daemon: it says its folders and its processes, and does as its kind says. Without, it passes on what
# it is asked to do.
STAND_IN = """
import os, pathlib, subprocess, sys, time
pipe, log = (pathlib.Path(os.environ[name]) for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"))
told, kind = pathlib.Path({told!r}), {kind!r}
if sys.argv[1:] != ["-f"]:
    asked = sys.stdin.read()
    with open(told / "asked", "a") as file:
        file.write(asked)
    if kind == "quits" and asked.startswith("quit"):
        (pipe / "quit").touch()
    sys.exit()
server = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
(told / "pids").write_text(f"{{os.getpid()}} {{server.pid}}")
if kind == "fails":
    (log / "control.log").write_text("no CUDA device, says the stand-in")
    server.kill()
    sys.exit(1)
if kind != "never starts":
    (pipe / "control").touch()
while not (pipe / "quit").exists():
    time.sleep(0.01)
server.kill()
server.wait()
"""


class StandIn:
    """What a stand-in for the daemon was told, and which processes it had."""

    def __init__(self, told: Path) -> None:
        self._told = told

    @property
    def asked(self) -> str:
        path = self._told / "asked"
        return path.read_text() if path.exists() else ""

    @property
    def running(self) -> list[int]:
        return [pid for pid in map(int, (self._told / "pids").read_text().split()) if is_running(pid)]


@pytest.fixture
def stand_in_kind() -> str:
    return "quits"


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in_kind: str) -> StandIn:
    folder, told = tmp_path / "bin", tmp_path / "told"
    folder.mkdir()
    told.mkdir()
    program = folder / MPS_CONTROL
    program.write_text(f"#!{sys.executable} -S\n" + STAND_IN.format(told=str(told), kind=stand_in_kind))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return StandIn(told)


def stand_in(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("stand_in_kind", [kind])


def test_without_the_program_mps_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(ConfigurationError, match=rf"MPS needs {MPS_CONTROL}.*not in PATH\. Go without --mps"),
        SharedGpu(SharedGpuPlan(mps=True)),
    ):
        pass


def test_the_daemon_is_private_and_ends_with_the_context(daemon: StandIn, temporary: Path) -> None:
    with SharedGpu(SharedGpuPlan(mps=True)) as gpu:
        folders = {Path(gpu.variables(rank)[name]).parent for rank in range(2) for name in (MPS_PIPE, MPS_LOG)}
        assert {folder.parent for folder in folders} == {temporary}
        assert len(folders) == 1
        assert len(daemon.running) == 2
        assert MPS_PIPE in gpu.places()[1].variables
    assert daemon.asked == "quit -t 1\n"
    assert not daemon.running
    with pytest.raises(MisuseError):
        gpu.variables(0)


@stand_in("ignores quit")
def test_a_daemon_that_does_not_quit_is_killed_with_its_servers(
    daemon: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_module, "QUIT_SECONDS", 0.3)
    with SharedGpu(SharedGpuPlan(mps=True)):
        assert len(daemon.running) == 2
    assert eventually(lambda: not daemon.running)


@stand_in("never starts")
def test_a_daemon_that_never_starts_is_given_up(daemon: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "START_SECONDS", 0.5)
    monkeypatch.setattr(gpu_module, "QUIT_SECONDS", 0.3)
    with pytest.raises(LabError, match="the MPS daemon did not start: it does not say why"):
        SharedGpu(SharedGpuPlan(mps=True)).__enter__()
    assert eventually(lambda: not daemon.running)


@stand_in("fails")
def test_what_a_daemon_wrote_when_it_failed_is_shown(daemon: StandIn) -> None:
    with pytest.raises(LabError, match=r"did not start: no CUDA device, says the stand-in\. Is there an NVIDIA GPU"):
        SharedGpu(SharedGpuPlan(mps=True)).__enter__()
    assert eventually(lambda: not daemon.running)


def test_signals_are_as_before(daemon: StandIn) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with SharedGpu(SharedGpuPlan(mps=True)):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


LAUNCHER = """
import sys, time
from gradsync.tools.lab.gpu import SharedGpu, SharedGpuPlan
with SharedGpu(SharedGpuPlan(mps=True)) as gpu:
    print("up", flush=True)
    gpu.run([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
"""


@pytest.mark.program
def test_a_launcher_that_is_terminated_leaves_nothing(daemon: StandIn, temporary: Path) -> None:
    variables = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], env=variables, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    with launcher:
        assert launcher.stdout.readline() == b"up\n"
        launcher.terminate()
        assert launcher.wait(30) != 0
    assert eventually(lambda: not daemon.running)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_runs_a_program_and_passes_its_code(tmp_path: Path) -> None:
    say = SAY.format(names=["WORLD_SIZE", "NCCL_MAX_NCHANNELS"], folder=f"{tmp_path}/") + "; raise SystemExit(3)"
    arguments = ["lab", "gpu", "--ranks", "2", "--channels", "4", "--timeout", "60", "--"]
    result = CliRunner().invoke(app, [*arguments, sys.executable, "-c", say])
    assert result.exit_code == 3
    assert {path.read_text() for path in tmp_path.iterdir()} == {"2 4\n"}


# -- on a GPU ---------------------------------------------------------------------------------------------------------

ADD = """
import os
import torch
import torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
rank, size = dist.get_rank(), dist.get_world_size()
tensor = torch.full((100_000,), rank + 1.0, device="cuda")
for _ in range(3):
    dist.all_reduce(tensor)
    tensor /= size
torch.cuda.synchronize()
expected = (size + 1) / 2
assert tensor.unique().tolist() == [expected], tensor.unique()
open(os.environ["FOLDER"] + f"/{rank}", "w").write(f"{torch.cuda.device_count()} {os.environ['LOCAL_RANK']}")
dist.destroy_process_group()
"""


def children() -> set[int]:
    """All living processes that come from this one."""
    found, level = set[int](), {os.getpid()}
    while level:
        level = {
            int(child)
            for pid in level
            for tasks in Path(f"/proc/{pid}/task").glob("*/children")
            for child in tasks.read_text().split()
        }
        found |= level
    return {pid for pid in found if is_running(pid)}


@pytest.mark.gpu
@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mps", [False, True], ids=["slices", "mps"])
def test_nccl_ranks_add_up_on_one_gpu_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, mps: bool
) -> None:
    if torch.cuda.device_count() == 0:
        pytest.skip("needs a CUDA device")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(gradsync.__file__).parents[1]), *sys.path]))
    before = children()
    program = textwrap.dedent(ADD)
    command = ["lab", "gpu", "--ranks", str(ranks), "--timeout", "120", *(["--mps"] if mps else []), "--"]
    # In a process of its own, as a user's: it must not have used the GPU before.
    result = subprocess.run(
        [sys.executable, "-m", "gradsync", *command, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"TMPDIR": str(tempfile.gettempdir())},
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {str(rank): "1 0" for rank in range(ranks)}
    assert eventually(lambda: children() <= before), children() - before
