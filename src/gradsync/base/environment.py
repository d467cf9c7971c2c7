"""How this process was launched: reads the environment variables of torchrun, mpirun and srun. Opens no connection."""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gradsync.base.errors import ConfigurationError

__all__ = ["RESTART_COUNT", "ProcessEnvironment", "first_host", "read_environment", "times_restarted"]

Launcher = Literal["torchrun", "mpirun", "srun", "none"]

# torchrun's count of how often the ranks have been started again.
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = (LOOPBACK, "localhost", "::1")
DEFAULT_PORT = 29500
# Below what Linux hands out to outgoing connections (32768 and up), above what services like to use.
FIRST_JOB_PORT, JOB_PORTS = 15000, 15000
# Slurm numbers the steps that srun starts from 0; the batch script, salloc's shell and the like count down from 2**32.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True, kw_only=True)
class ProcessEnvironment:
    """This process's rank and world size, and the rendezvous address of the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = LOOPBACK
    master_port: int = DEFAULT_PORT
    launcher: Launcher = "none"


class _Names(NamedTuple):
    """The environment variables in which a launcher passes rank, world size and address."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


TORCHRUN = _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = _Names(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
MVAPICH = _Names(*(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
HYDRA = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def read_environment(variables: Mapping[str, str] = os.environ) -> ProcessEnvironment:
    """What the launcher passes in the environment.

    The innermost launcher counts: torchrun may run inside mpirun or srun, and mpirun inside a Slurm job, whose
    processes then carry the variables of both.
    """
    if "RANK" in variables:
        return _torchrun(variables)
    for names in (OPEN_MPI, MVAPICH):
        if names.rank in variables:
            return _place(variables, "mpirun", names, default_port=_port_of_mpirun(variables))
    by_srun = _started_by_srun(variables)
    # srun sets PMI_RANK too, for MPI programs, but none of the local ones.
    if HYDRA.rank in variables and (HYDRA.local_rank in variables or not by_srun):
        return _place(variables, "mpirun", HYDRA)
    if by_srun:
        return _srun(variables)
    # Job scripts set WORLD_SIZE for their srun lines; with nothing that sets a rank it is a forgotten launcher.
    if variables.get("WORLD_SIZE", "1").strip() != "1":
        raise ConfigurationError(
            f"WORLD_SIZE is {variables['WORLD_SIZE']!r}, but RANK is not set. Start the script with torchrun, mpirun "
            "or srun, which set both, or unset WORLD_SIZE to run one process"
        )
    return ProcessEnvironment()


def times_restarted() -> int:
    """How often torchrun, or ``gradsync train``, has started the ranks again after a failure."""
    count = os.environ.get(RESTART_COUNT, "0")
    return int(count) if count.isdecimal() else 0


def _port_of_mpirun(variables: Mapping[str, str]) -> int:
    """Jobs that share a node need different ports. All ranks of a job know the name that Open MPI gives it."""
    name = variables.get("PMIX_NAMESPACE")
    return DEFAULT_PORT if name is None else FIRST_JOB_PORT + zlib.crc32(name.encode()) % JOB_PORTS


def _torchrun(variables: Mapping[str, str]) -> ProcessEnvironment:
    # Set by hand, as torch's own env:// wants them, there may be no local ones.
    local: dict[str, str] = {}
    if variables.get("WORLD_SIZE", "").strip() == "1":
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    elif "LOCAL_WORLD_SIZE" not in variables and variables.get("MASTER_ADDR", LOOPBACK) in LOOPBACK_NAMES:
        # All must be on this machine to find each other.
        names = {"LOCAL_RANK": "RANK", "LOCAL_WORLD_SIZE": "WORLD_SIZE"}
        local = {name: variables[source] for name, source in names.items() if source in variables}
    return _place(local | dict(variables), "torchrun", TORCHRUN)


def _started_by_srun(variables: Mapping[str, str]) -> bool:
    """Whether this process is a task of a step that srun made.

    A job script and the shell of salloc also have the job's SLURM_NTASKS, and even SLURM_PROCID, without being one of
    its tasks. They have no step number, or one of the special ones.
    """
    step = variables.get("SLURM_STEP_ID", "").strip()
    return "SLURM_PROCID" in variables and step.isdecimal() and int(step) < FIRST_SPECIAL_STEP


def _srun(variables: Mapping[str, str]) -> ProcessEnvironment:
    # The step's own numbers where there are any: the job may be larger than the step.
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    layouts = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    layout = next((name for name in layouts if name in variables), "SLURM_TASKS_PER_NODE")
    given = dict(variables)
    if layout in variables:
        given[layout] = str(_tasks_on_this_node(variables, layout))
    job, step = _number(variables, "SLURM_JOB_ID"), _number(variables, "SLURM_STEP_ID")
    # All ranks know the job, and jobs that share a node have neighbouring numbers. Room for the steps of one job.
    port = FIRST_JOB_PORT + (8 * job + step) % JOB_PORTS
    nodes = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    node_list = next((variables[name] for name in nodes if name in variables), None)
    names = _Names("SLURM_PROCID", tasks, "SLURM_LOCALID", layout)
    return _place(given, "srun", names, node_list=node_list, default_port=port)


def _tasks_on_this_node(variables: Mapping[str, str], name: str) -> int:
    """``2(x3),1`` is three nodes with two tasks and a fourth with one."""
    counts: list[int] = []
    for part in variables[name].split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise ConfigurationError(f"{name} must look like '4' or '2(x3),1', got {variables[name]!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(set(counts)) == 1:
        return counts[0]
    node = _number(variables, "SLURM_NODEID")
    if node >= len(counts):
        raise ConfigurationError(f"SLURM_NODEID is {node}, but {name} is {variables[name]!r}: {len(counts)} nodes")
    return counts[node]


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list: ``node01`` of ``node[01-03,07],gpu5``."""
    match = re.match(r"((?:[^\s,\[\]]|\[[^\s\[\]]+\])+)(?:,|$)", node_list.strip())
    if match is None:
        raise ConfigurationError(
            f"this Slurm node list cannot be read: {node_list!r}. Set MASTER_ADDR to the host of rank 0"
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[1])


def _place(
    variables: Mapping[str, str],
    launcher: Launcher,
    names: _Names,
    *,
    node_list: str | None = None,
    default_port: int = DEFAULT_PORT,
) -> ProcessEnvironment:
    numbers = [_number(variables, name) for name in names]
    # A rank is below the number of ranks; there may be as many on this node as there are at all.
    for small, large, limit in ((0, 1, "less than"), (2, 3, "less than"), (3, 1, "at most")):
        least, most = numbers[small], numbers[large]
        if least > most or (least == most and limit == "less than"):
            what = f"{names[small]} must be {limit} {names[large]}"
            raise ConfigurationError(f"{what}, but {names[small]} is {least} and {names[large]} is {most}")
    _, world_size, _, local_world_size = numbers
    master = variables.get("MASTER_ADDR", "").strip()
    if not master:
        if local_world_size == world_size:
            master = LOOPBACK
        elif node_list is not None:
            master = first_host(node_list)
        else:
            raise ConfigurationError(
                f"MASTER_ADDR is not set, but {names.world_size} is {world_size} and {names.local_world_size} is "
                f"{local_world_size}: there are several nodes. Set MASTER_ADDR to the host of rank 0 on all of them"
            )
    port = _number(variables, "MASTER_PORT") if "MASTER_PORT" in variables else default_port
    if not 0 < port < 65536:
        raise ConfigurationError(f"MASTER_PORT must be in 1..65535, got {port}")
    place = dict(zip(names._fields, numbers, strict=True))
    return ProcessEnvironment(**place, master_addr=master, master_port=port, launcher=launcher)


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name)
    if text is None:
        raise ConfigurationError(
            f"{name} is not set, though other variables of the same launcher are. Start the script with torchrun, "
            f"mpirun or srun, or set {name} as well"
        )
    if not text.strip().isdecimal():
        raise ConfigurationError(f"{name} must be a whole number of at least 0, got {text!r}")
    return int(text)
