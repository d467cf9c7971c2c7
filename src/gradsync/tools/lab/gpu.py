"""Several NCCL ranks on one GPU, to try multi-GPU code on a machine with only one.

::

    with SharedGpu(SharedGpuPlan(ranks=4)) as gpu:
        code = gpu.run(["python", "train.py"])

NCCL refuses two ranks of one *host* on one GPU. Each rank here therefore claims to be a separate host
(``NCCL_HOSTID``), which leaves NCCL its socket transport, over loopback. The ranks share the GPU in one of two ways:

- by time slices, the default. Kernels of different ranks never run at the same time, so a missing dependency between
  streams shows as a wrong result. Use this to find bugs.
- under MPS (``mps=True``), NVIDIA's multi-process service. Kernels of different ranks run side by side, as they do on
  several GPUs. Use this to measure; times are still those of one GPU and of sockets.

Alternatives considered: NCCL 2.30 accepts ``NCCL_MULTI_RANK_GPU_ENABLE=1``, but only under MPS, and torch ships older
versions. Gloo accepts ranks that share a GPU, but does not order anything by streams, which is what is being tested.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gradsync.base.environment import LOOPBACK
from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.tools.lab.host import free_port, run_at, run_program
from gradsync.tools.lab.system import LabError
from gradsync.tools.launch import RankPlace, die_with_parent, signals_raise

__all__ = ["SharedGpu", "SharedGpuPlan", "fork_gpu_ranks"]

MOST_RANKS = 16
MPS_CONTROL = "nvidia-cuda-mps-control"
START_SECONDS = 20.0
QUIT_SECONDS = 10.0
POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class SharedGpuPlan:
    """A plan for ``ranks`` processes on GPU number ``gpu``. NCCL uses at most ``channels`` channels; fewer leave more
    of the GPU to compute."""

    ranks: int = 2
    gpu: int = 0
    mps: bool = False
    channels: int = 2

    def __str__(self) -> str:
        return f"{self.ranks} ranks share one GPU {'under MPS' if self.mps else 'by time slices'}"

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ConfigurationError(f"1 to {MOST_RANKS} ranks can share a GPU here, got {self.ranks}")
        if self.gpu < 0:
            raise ConfigurationError(f"GPUs are numbered from 0, got {self.gpu}")
        if self.channels < 1:
            raise ConfigurationError(f"NCCL needs at least 1 channel, got {self.channels}")

    def variables(self, rank: int) -> dict[str, str]:
        """What a rank needs in its environment beside torchrun's variables, without those of MPS."""
        return {
            "CUDA_VISIBLE_DEVICES": _visible(self.gpu),
            "NCCL_HOSTID": f"gradsync-{os.getpid()}-{rank}",
            "NCCL_NET": "Socket",
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_MAX_NCHANNELS": str(self.channels),
            "GLOO_SOCKET_IFNAME": "lo",
        }


class SharedGpu:
    """Ranks that share a GPU, as long as the context lasts. With MPS it has a daemon of its own, which ends with it."""

    def __init__(self, plan: SharedGpuPlan) -> None:
        self.plan = plan
        self._stack = ExitStack()
        self._mps: dict[str, str] | None = None

    def __enter__(self) -> "SharedGpu":
        with ExitStack() as stack:
            stack.enter_context(signals_raise())
            self._mps = stack.enter_context(_mps_daemon()) if self.plan.mps else {}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._mps = None
        self._stack.close()

    def variables(self, rank: int) -> dict[str, str]:
        """The environment of one rank, beside torchrun's variables."""
        if self._mps is None:
            raise MisuseError("use a SharedGpu in a with statement")
        return self.plan.variables(rank) | self._mps

    def places(self) -> list[RankPlace]:
        """The ranks of one program. To NCCL and to the program each is alone on its host, with GPU 0."""
        master, ranks = (LOOPBACK, free_port(LOOPBACK)), self.plan.ranks
        return self.share([RankPlace(local=(rank, ranks), master=master) for rank in range(ranks)])

    def share(self, places: Sequence[RankPlace]) -> list[RankPlace]:
        """The ranks of ``places``, which are on one host, as ranks on this GPU."""
        return [
            replace(each, local=(0, 1), node=(rank, len(places)), more={**each.more, **self.variables(rank)})
            for rank, each in enumerate(places)
        ]

    def run(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 600.0) -> int:
        """Run ``command`` once per rank, and return its exit code, as :meth:`gradsync.lab.Lab.run` does."""
        return run_program(self.places(), command, env=env or {}, timeout=timeout)


def fork_gpu_ranks(gpu: SharedGpu, function: Callable[[], object], *, timeout: float = 600.0) -> None:
    """Call ``function()`` in one forked process per rank. This process must not have used a GPU before."""
    failure = run_at(gpu.places(), lambda place: function(), timeout)
    if failure is not None:
        raise LabError(f"{failure}. Its traceback is above, and the other ranks were ended")


@contextmanager
def _mps_daemon() -> Iterator[dict[str, str]]:
    """A private MPS daemon, and the variables of its clients: its own folders, so that it disturbs no other daemon."""
    control = shutil.which(MPS_CONTROL)
    if control is None:
        raise ConfigurationError(
            f"MPS needs {MPS_CONTROL}, which comes with NVIDIA's driver and is not in PATH. Go without --mps: the "
            "ranks then share the GPU by time slices"
        )
    with tempfile.TemporaryDirectory(prefix="gradsync-mps-") as folder:
        pipe, log = Path(folder) / "pipe", Path(folder) / "log"
        for each in (pipe, log):
            each.mkdir()
        variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
        # In the foreground: a child can be waited for, and dies with this process.
        daemon = subprocess.Popen(
            [control, "-f"],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
        try:
            _await_start(daemon, pipe, log)
            yield variables
        finally:
            _quit(control, variables, daemon)


def _await_start(daemon: "subprocess.Popen[bytes]", pipe: Path, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not (pipe / "control").exists():
        if daemon.poll() is not None or time.monotonic() > deadline:
            said = "".join(each.read_text(errors="replace") for each in sorted(log.glob("control.log")))
            raise LabError(
                f"the MPS daemon did not start: {said.strip()[-500:] or 'it does not say why'}. Is there an NVIDIA "
                "GPU, and may this user start MPS on it? Without --mps the ranks share the GPU by time slices"
            )
        time.sleep(POLL_SECONDS)


def _quit(control: str, variables: Mapping[str, str], daemon: "subprocess.Popen[bytes]") -> None:
    """Ask the daemon to end, with its servers; kill what is left."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [control],
            input=b"quit -t 1\n",
            env=os.environ | variables,
            capture_output=True,
            timeout=QUIT_SECONDS,
            check=False,
        )
    with suppress(subprocess.TimeoutExpired):
        daemon.wait(QUIT_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(daemon.pid, signal.SIGKILL)
    daemon.wait()


def _visible(gpu: int) -> str:
    """The name by which a rank sees only this GPU, which may already be one of those that are visible here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(gpu)
    names = [name for name in visible.split(",") if name.strip()]
    if gpu >= len(names):
        raise ConfigurationError(f"GPU {gpu} is not visible here: CUDA_VISIBLE_DEVICES is {visible!r}")
    return names[gpu]
