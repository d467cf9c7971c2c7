"""How a process was started, how it meets the others, and what a world of ranks does then."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync.accelerator import world as world_module
from gradsync.accelerator.world import DistributedType, World, connect
from gradsync.base.environment import ProcessEnvironment, first_host, read_environment
from gradsync.communicator import InProcessWorld, ProcessGroupCommunicator, choose_communicator
from tests.ranks import RankPool, Ranks, ThreadRanks
from tests.scripts import free_port
from tests.zygote import program

pytestmark = pytest.mark.timeout(120)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "4711",
}
# What `env` shows in a job script that asked for four tasks on two nodes, and in a task of `srun -n 4` inside it.
BATCH = {
    "SLURM_JOB_ID": "200505",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "node[10,20]",
}
SRUN = BATCH | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
SRUN_PORT = 15000 + (8 * 200505) % 15000


def mpi(prefix: str, rank: int = 1, size: int = 2, local_rank: int = 1, local_size: int = 2) -> dict[str, str]:
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"{prefix}_COMM_WORLD_{name}": str(value) for name, value in values.items()}


HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PAIR = ProcessEnvironment(rank=1, world_size=2, local_rank=1, local_world_size=2, launcher="mpirun")


def place(*numbers: int, launcher: Any = "torchrun", addr: str = "127.0.0.1", port: int = 29500) -> ProcessEnvironment:
    rank, world_size, local_rank, local_world_size = numbers
    return ProcessEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=addr,
        master_port=port,
        launcher=launcher,
    )


# -- reading ----------------------------------------------------------------------------------------------------------

READINGS = {
    "nothing": ({}, ProcessEnvironment()),
    "torchrun": (TORCHRUN, place(5, 8, 1, 4, addr="head", port=4711)),
    "torchrun inside a Slurm step": (SRUN | TORCHRUN, place(5, 8, 1, 4, addr="head", port=4711)),
    "torchrun inside mpirun": (mpi("OMPI") | TORCHRUN, place(5, 8, 1, 4, addr="head", port=4711)),
    "by hand on one machine": (
        {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "77"},
        place(1, 3, 1, 3, addr="localhost", port=77),
    ),
    "by hand with a local rank": (
        {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "MASTER_ADDR": "::1"},
        place(1, 3, 2, 3, addr="::1"),
    ),
    "by hand alone": ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "head"}, place(0, 1, 0, 1, addr="head")),
    "a single one in WORLD_SIZE": ({"WORLD_SIZE": "1"}, ProcessEnvironment()),
    "Open MPI": (mpi("OMPI"), PAIR),
    "Open MPI on two nodes": (
        mpi("OMPI", 3, 4, 1, 2) | {"MASTER_ADDR": "head", "MASTER_PORT": "9"},
        place(3, 4, 1, 2, launcher="mpirun", addr="head", port=9),
    ),
    "Open MPI inside a Slurm step": (SRUN | mpi("OMPI"), PAIR),
    "MVAPICH": (mpi("MV2"), PAIR),
    "MPICH or Intel MPI": (HYDRA, PAIR),
    "MPICH inside a Slurm step": (SRUN | HYDRA, PAIR),
    "srun with PMI for MPI programs": (
        SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"},
        place(3, 4, 1, 2, launcher="srun", addr="node10", port=SRUN_PORT),
    ),
    "srun": (SRUN, place(3, 4, 1, 2, launcher="srun", addr="node10", port=SRUN_PORT)),
    "srun with an address": (
        SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "9", "WORLD_SIZE": "4"},
        place(3, 4, 1, 2, launcher="srun", addr="head", port=9),
    ),
    "srun on one node": (
        SRUN | {"SLURM_TASKS_PER_NODE": "4", "SLURM_JOB_NODELIST": "node10"},
        place(3, 4, 1, 4, launcher="srun", port=SRUN_PORT),
    ),
    "srun with uneven nodes": (
        SRUN | {"SLURM_TASKS_PER_NODE": "1,3", "SLURM_LOCALID": "2"},
        place(3, 4, 2, 3, launcher="srun", addr="node10", port=SRUN_PORT),
    ),
    "srun of a step that is smaller than its job": (
        SRUN
        | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "node[20-21]"}
        | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0"},
        place(1, 2, 0, 1, launcher="srun", addr="node20", port=SRUN_PORT),
    ),
    "the second step of a job": (
        SRUN | {"SLURM_STEP_ID": "1"},
        place(3, 4, 1, 2, launcher="srun", addr="node10", port=SRUN_PORT + 1),
    ),
    "a job script": (BATCH, ProcessEnvironment()),
    "the batch step, where it has a number": (BATCH | {"SLURM_STEP_ID": "4294967291"}, ProcessEnvironment()),
    "salloc's interactive step": (BATCH | {"SLURM_STEP_ID": "4294967290"}, ProcessEnvironment()),
}


@pytest.mark.parametrize(("variables", "expected"), READINGS.values(), ids=READINGS.keys())
def test_the_launcher_says_who_is_who(variables: Mapping[str, str], expected: ProcessEnvironment) -> None:
    assert read_environment(variables) == expected


def test_the_processes_own_variables_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read_environment() == read_environment(TORCHRUN)


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


ERRORS = {
    "rank too large": (
        TORCHRUN | {"RANK": "8"},
        "RANK must be less than WORLD_SIZE, but RANK is 8 and WORLD_SIZE is 8",
    ),
    "local rank too large": (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK is 4 and LOCAL_WORLD_SIZE is 4"),
    "more local than all": (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE must be at most WORLD_SIZE.* is 9"),
    "no number": (TORCHRUN | {"RANK": "first"}, "RANK must be a whole number of at least 0, got 'first'"),
    "negative": (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK must be a whole number of at least 0, got '-1'"),
    "RANK alone": ({"RANK": "0"}, "WORLD_SIZE is not set"),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "2"}, "WORLD_SIZE is '2', but RANK is not set"),
    "no local rank": (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is not set"),
    "no local ones at all": (without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "LOCAL_RANK is not set"),
    "no address": (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set, but WORLD_SIZE is 8 .* several nodes"),
    "a port too large": (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT must be in 1..65535, got 65536"),
    "port 0": (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT must be in 1..65535, got 0"),
    "MPI on two nodes": (mpi("OMPI", 3, 4, 1, 2), "MASTER_ADDR is not set, but OMPI_COMM_WORLD_SIZE is 4"),
    "PMI without local ones": (without(HYDRA, "MPI_LOCALRANKID"), "MPI_LOCALRANKID is not set"),
    "MVAPICH without a size": (without(mpi("MV2"), "MV2_COMM_WORLD_SIZE"), "MV2_COMM_WORLD_SIZE is not set"),
    "Slurm without a layout": (without(SRUN, "SLURM_TASKS_PER_NODE"), "SLURM_TASKS_PER_NODE is not set"),
    "a bad layout": (SRUN | {"SLURM_TASKS_PER_NODE": "2(3)"}, r"SLURM_TASKS_PER_NODE must look like .* got '2\(3\)'"),
    "uneven nodes, unknown which": (
        without(SRUN | {"SLURM_TASKS_PER_NODE": "1,3"}, "SLURM_NODEID"),
        "SLURM_NODEID is not set",
    ),
    "a node too many": (
        SRUN | {"SLURM_TASKS_PER_NODE": "1,3", "SLURM_NODEID": "2"},
        "SLURM_NODEID is 2, but SLURM_TASKS_PER_NODE is '1,3': 2 nodes",
    ),
    "no job": (without(SRUN, "SLURM_JOB_ID"), "SLURM_JOB_ID is not set"),
    "no node list": (without(SRUN, "SLURM_JOB_NODELIST"), "MASTER_ADDR is not set, but SLURM_NTASKS is 4"),
    "a bad node list": (SRUN | {"SLURM_JOB_NODELIST": "node[1"}, r"node list cannot be read: 'node\[1'"),
}


@pytest.mark.parametrize(("variables", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_what_cannot_be_is_named(variables: Mapping[str, str], message: str) -> None:
    with pytest.raises(gradsync.ConfigurationError, match=message):
        read_environment(variables)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("gpu5", "gpu5"),
        ("gpu5,node[01-03]", "gpu5"),
        ("node[01-03,07],gpu5", "node01"),
        ("node[07,01-03]", "node07"),
        ("rack[2-3]n[010-012]", "rack2n010"),
        ("a-b-c[4].example.org,x", "a-b-c4.example.org"),
        (" node-1 ", "node-1"),
    ],
)
def test_the_first_host_of_a_node_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


@pytest.mark.parametrize("node_list", ["", ",a", "a[1", "a]1", "a[]", "a b", "a[1[2]]"])
def test_a_node_list_that_cannot_be_read(node_list: str) -> None:
    with pytest.raises(gradsync.ConfigurationError, match="Set MASTER_ADDR"):
        first_host(node_list)


def test_jobs_on_one_node_choose_different_ports() -> None:
    jobs = [
        SRUN | {"SLURM_JOB_ID": str(7_000_000 + job), "SLURM_STEP_ID": str(step)}
        for job in range(100)
        for step in (0, 1)
    ]
    ports = [read_environment(job).master_port for job in jobs]
    assert len(set(ports)) == len(ports)
    assert all(1024 < port < 32768 for port in ports)


# -- real processes ---------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys, warnings
import torch, torch.distributed as dist
from gradsync.accelerator import world as module
from gradsync.base.environment import read_environment
from gradsync.accelerator.world import connect
from gradsync.accelerator.operations import gather

votes, vote = [], module.agree_on_backend

def counted(store, *arguments):
    backend = vote(store, *arguments)
    votes.append(store.add("ranks", 0))
    return backend

module.agree_on_backend = counted
out, cpu = sys.argv[1], sys.argv[2] == "cpu"
sums = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for attempt in range(2):  # a world may be closed and made again
        world = connect(read_environment(), cpu=cpu)
        token = torch.tensor([world.process_index + 1.0])
        world.communicator.all_reduce(token).wait()
        sums.append(token.item())
        guest = connect(read_environment(), cpu=cpu)
        guest.close()
        kept = dist.is_initialized()
        own = torch.full((2,), float(world.process_index), device=world.device)
        gathered = gather(own, communicator=world.communicator)
        world.wait_for_everyone()
        world.close()
        world.close()
answer = {
    "rank": world.process_index, "size": world.num_processes, "local": world.local_process_index, "sums": sums,
    "launcher": world.environment.launcher, "device": str(world.device), "type": world.distributed_type,
    "kept": kept, "closed": not dist.is_initialized(), "gathered": gathered.tolist(),
    "gathered on": str(gathered.device), "votes": votes, "warnings": [str(each.message) for each in caught],
}
with open(f"{out}/{world.process_index}.json", "w") as file:
    json.dump(answer, file)
"""

# Two votes a connection: those of the first are not counted again in the second.
EXPECTED = {"size": 2, "sums": [3.0, 3.0], "votes": [2, 2], "kept": True, "closed": True, "gathered": [0, 0, 1, 1]}
ON_CPU = EXPECTED | {"device": "cpu", "gathered on": "cpu", "type": "MULTI_CPU", "warnings": []}


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def clean_environment() -> dict[str, str]:
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "MPI_", "MV2_", "SLURM_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return kept | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run_all(folder: Path, *commands: tuple[list[str], dict[str, str]]) -> list[dict[str, Any]]:
    """Run the commands at once, each with its own variables, and read what the two ranks have written."""
    python, needed = program()
    processes = [
        subprocess.Popen(
            [python, *arguments],
            # What torchrun starts its ranks with, and where it leaves its logs.
            env=clean_environment() | needed | {"PYTHON_EXEC": python, "TMPDIR": str(folder)} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for arguments, variables in commands
    ]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    answers: list[dict[str, Any]] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return answers


def check(answers: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for rank, answer in enumerate(answers):
        assert {"rank": rank, "local": rank} | expected == {key: answer[key] for key in ("rank", "local", *expected)}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def torchrun(script: str, tmp_path: Path, device: str) -> list[dict[str, Any]]:
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    return run_all(tmp_path, ([*arguments, script, str(tmp_path), device], {}))


def test_ranks_of_torchrun_meet(script: str, tmp_path: Path) -> None:
    check(torchrun(script, tmp_path, "cpu"), ON_CPU | {"launcher": "torchrun"})


def test_ranks_of_srun_meet_without_an_address(script: str, tmp_path: Path) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "node[1]"}
    free = (job for job in range(os.getpid(), os.getpid() + 100) if is_free(15000 + 8 * job % 15000))
    step["SLURM_JOB_ID"] = str(next(free))
    ranks = [step | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"} for rank in ("0", "1")]
    answers = run_all(tmp_path, *(([script, str(tmp_path), "cpu"], variables) for variables in ranks))
    check(answers, ON_CPU | {"launcher": "srun"})


def test_ranks_of_mpirun_meet(script: str, tmp_path: Path) -> None:
    port = {"MASTER_PORT": str(free_port())}
    ranks = [mpi("OMPI", rank, 2, rank, 2) | port for rank in range(2)]
    answers = run_all(tmp_path, *(([script, str(tmp_path), "cpu"], variables) for variables in ranks))
    check(answers, ON_CPU | {"launcher": "mpirun"})


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs a machine with one GPU")
def test_two_ranks_share_a_gpu(script: str, tmp_path: Path) -> None:
    answers = torchrun(script, tmp_path, "gpu")
    check(answers, EXPECTED | {"device": "cuda:0", "gathered on": "cuda:0", "type": "MULTI_GPU"})
    assert [len(answer["warnings"]) for answer in answers] == [2, 0]
    assert "1 of 2 ranks have no GPU of their own" in answers[0]["warnings"][0]


def test_a_meeting_that_fails_says_where() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError) as caught:
            connect(place(0, 2, 0, 2, port=port), cpu=True)
    assert f"rank 0 of 2 (started by torchrun) met the others at tcp://127.0.0.1:{port}" in caught.value.__notes__[0]
    assert not dist.is_initialized()


# -- connecting -------------------------------------------------------------------------------------------------------


def test_a_world_of_one_has_no_process_group() -> None:
    world = connect(ProcessEnvironment(), cpu=True)
    assert not dist.is_initialized()
    assert (world.process_index, world.num_processes, world.local_process_index) == (0, 1, 0)
    assert (world.is_main_process, world.is_local_main_process, world.is_last_process) == (True, True, True)
    assert world.device == torch.device("cpu")
    assert world.distributed_type == DistributedType.NO
    token = torch.ones(1)
    world.communicator.all_reduce(token).wait()
    assert token.item() == 1.0
    world.wait_for_everyone()
    world.close()


def describe_world() -> dict[str, Any]:
    world = connect(ProcessEnvironment(), cpu=True)
    world.wait_for_everyone()
    world.close()
    still_works = torch.ones(1)
    choose_communicator().all_reduce(still_works).wait()
    return {
        "place": (world.process_index, world.num_processes, world.local_process_index),
        "environment": (world.environment.rank, world.environment.world_size, world.environment.local_world_size),
        "flags": (world.is_main_process, world.is_local_main_process, world.is_last_process),
        "type": str(world.distributed_type),
        "sum": still_works.item(),
    }


def test_ranks_that_are_there_already_are_used_and_left_alone(ranks: Ranks) -> None:
    """Threads have an ambient communicator, processes a group; no launcher's variables say anything about them."""
    size = ranks.world_size
    for rank, described in enumerate(ranks.run(describe_world)):
        assert described == {
            "place": (rank, size, rank),
            "environment": (rank, size, size),
            "flags": (rank == 0, rank == 0, rank == size - 1),
            "type": "NO" if size == 1 else "MULTI_CPU",
            "sum": size,
        }


def meet_on_two_hosts(hosts: list[str]) -> tuple[int, int]:
    own = SimpleNamespace(gethostname=lambda: hosts[choose_communicator().rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world_module, "socket", own)
        world = connect(ProcessEnvironment(), cpu=True)
    return world.local_process_index, world.environment.local_world_size


@pytest.mark.cpu_ranks("has hosts for two and for four ranks")
def test_local_ranks_are_those_on_the_same_host(process_ranks: RankPool) -> None:
    hosts = ["a", "b", "a", "a"][: process_ranks.world_size]
    expected = [(0, 1), (0, 1)] if process_ranks.world_size == 2 else [(0, 3), (0, 1), (1, 3), (2, 3)]
    assert process_ranks.run(meet_on_two_hosts, hosts) == expected


def keep_the_launchers_local_rank() -> tuple[int, str]:
    group = ProcessGroupCommunicator(dist.distributed_c10d._get_default_group())
    # Two machines with one rank each, says the launcher; the hosts' names would say otherwise.
    world = connect(place(group.rank, group.world_size, 0, 1), cpu=True)
    return world.local_process_index, world.environment.launcher


def test_a_launcher_that_fits_the_group_is_believed(process_ranks: RankPool) -> None:
    assert process_ranks.run(keep_the_launchers_local_rank) == [(0, "torchrun")] * process_ranks.world_size


def test_a_communicator_may_be_given() -> None:
    mine = InProcessWorld(1).communicator(0)
    assert connect(ProcessEnvironment(), cpu=True, communicator=mine).communicator is mine


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Pretend; returns the list of devices that were made current."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"id{device.index}"))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    return current


@pytest.mark.parametrize(("local_rank", "index"), [(0, 0), (1, 1), (3, 1)])
def test_a_rank_takes_the_gpu_of_its_local_number(two_gpus: list[torch.device], local_rank: int, index: int) -> None:
    world = connect(ProcessEnvironment(local_rank=local_rank))
    assert world.device == torch.device("cuda", index)
    assert two_gpus == [torch.device("cuda", index)]


def test_cpu_leaves_the_gpus_alone(two_gpus: list[torch.device]) -> None:
    assert connect(ProcessEnvironment(), cpu=True).device == torch.device("cpu")
    assert two_gpus == []


def choose_backends(devices: list[str]) -> list[str]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    chosen = [""] * len(devices)

    def choose(rank: int) -> None:
        mine = place(rank, len(devices), rank, len(devices))
        chosen[rank] = world_module.agree_on_backend(store, mine, torch.device(devices[rank]))

    threads = [threading.Thread(target=choose, args=(rank,), daemon=True) for rank in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return chosen


def test_ranks_with_a_gpu_each_use_nccl(two_gpus: list[torch.device]) -> None:
    assert choose_backends(["cuda:0", "cuda:1"]) == ["cpu:gloo,cuda:nccl"] * 2


@pytest.mark.parametrize(("devices", "lacking"), [(["cuda:0", "cuda:1", "cuda:0"], 1), (["cuda:0", "cpu"], 1)])
def test_one_rank_without_its_own_gpu_takes_all_to_gloo(
    two_gpus: list[torch.device], devices: list[str], lacking: int
) -> None:
    with pytest.warns(UserWarning, match=f"{lacking} of {len(devices)} ranks have no GPU of their own"):
        assert choose_backends(devices) == ["gloo"] * len(devices)


def test_ranks_on_the_cpu_use_gloo_without_a_word() -> None:
    assert choose_backends(["cpu", "cpu"]) == ["gloo", "gloo"]


def test_distributed_types_are_equal_to_their_names() -> None:
    gpu = World(InProcessWorld(2).communicator(0), torch.device("cuda", 0), ProcessEnvironment())
    assert gpu.distributed_type == "MULTI_GPU"
    assert str(gpu.distributed_type) == "MULTI_GPU"
    assert gpu.distributed_type != DistributedType.MULTI_CPU


# -- what only some ranks do, and in which order ----------------------------------------------------------------------


def world_of(rank: int, size: int, local_rank: int = 0) -> World:
    """One end of a world nobody else has joined: for what needs no collective."""
    return World(
        InProcessWorld(size).communicator(rank), torch.device("cpu"), ProcessEnvironment(local_rank=local_rank)
    )


def enter_in_order(events: list[str], local_rank_of: list[int] | None) -> None:
    world = connect(ProcessEnvironment(), cpu=True)
    if local_rank_of is not None:
        own = local_rank_of[world.process_index]
        world = World(world.communicator, world.device, ProcessEnvironment(local_rank=own))
    first = world.main_process_first() if local_rank_of is None else world.local_main_process_first()
    with first:
        leads = world.is_main_process if local_rank_of is None else world.is_local_main_process
        if leads:
            time.sleep(0.05)  # long enough for the others, if they did not wait
        events.append("first" if leads else "other")


@pytest.mark.cpu_ranks("its ranks share a list")
def test_the_main_process_goes_first(thread_ranks: ThreadRanks) -> None:
    events: list[str] = []
    thread_ranks.run(enter_in_order, events, None)
    assert events == ["first"] + ["other"] * (thread_ranks.world_size - 1)


def test_the_first_of_every_node_go_first() -> None:
    events: list[str] = []
    ThreadRanks(4).run(enter_in_order, events, [0, 1, 0, 1])
    assert events == ["first", "first", "other", "other"]


def fail_first() -> str:
    world = connect(ProcessEnvironment(), cpu=True)
    try:
        with world.main_process_first():
            if world.is_main_process:
                raise OSError("no space left")
    except OSError as error:
        return str(error)
    finally:
        world.wait_for_everyone()  # and the ranks are in step
    return "entered"


def test_a_failure_of_the_first_releases_the_others(ranks: Ranks) -> None:
    assert ranks.run(fail_first) == ["no space left"] + ["entered"] * (ranks.world_size - 1)


def arrive_late(arrived: list[int]) -> int:
    world = connect(ProcessEnvironment(), cpu=True)
    time.sleep(0.02 * world.process_index)
    arrived.append(world.process_index)
    world.wait_for_everyone()
    return len(arrived)


@pytest.mark.cpu_ranks("its ranks share a list")
def test_waiting_for_everyone(thread_ranks: ThreadRanks) -> None:
    size = thread_ranks.world_size
    assert thread_ranks.run(arrive_late, []) == [size] * size


def who_runs(world: World) -> list[str]:
    ran: list[str] = []

    def note(name: str) -> str:
        """Takes notes."""
        ran.append(name)
        return name

    for decorator, name in [
        (world.on_main_process, "main"),
        (world.on_local_main_process, "local main"),
        (world.on_last_process, "last"),
        (world.on_process(process_index=1), "one"),
    ]:
        decorated = decorator(note)
        assert decorated.__doc__ == "Takes notes."
        assert decorated(name) == (name if name in ran else None)
    return ran


@pytest.mark.parametrize(
    ("rank", "size", "local_rank", "expected"),
    [
        (0, 4, 0, ["main", "local main"]),
        (1, 4, 1, ["one"]),
        (2, 4, 0, ["local main"]),
        (3, 4, 1, ["last"]),
        (0, 1, 0, ["main", "local main", "last", "one"]),
    ],
)
def test_decorated_functions_run_on_their_rank_only(rank: int, size: int, local_rank: int, expected: list[str]) -> None:
    assert who_runs(world_of(rank, size, local_rank)) == expected


def test_only_the_main_process_prints(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        world_of(rank, 2).print("rank", rank, sep="=", end="!")
    assert capsys.readouterr().out == "rank=0!"


# -- shares -----------------------------------------------------------------------------------------------------------


def shares(inputs: Any, size: int, padding: bool = False) -> list[Any]:
    result = []
    for rank in range(size):
        with world_of(rank, size).split_between_processes(inputs, apply_padding=padding) as share:
            result.append(share)
    return result


@pytest.mark.parametrize(
    ("inputs", "size", "padding", "expected"),
    [
        ([1, 2, 3, 4], 2, False, [[1, 2], [3, 4]]),
        ([1, 2, 3, 4, 5], 3, False, [[1, 2], [3, 4], [5]]),
        ([1, 2, 3, 4, 5], 3, True, [[1, 2], [3, 4], [5, 5]]),
        ([1, 2, 3, 4], 3, True, [[1, 2], [3, 4], [4, 4]]),
        ((1, 2, 3), 2, False, [(1, 2), (3,)]),
        ((1, 2, 3), 2, True, [(1, 2), (3, 3)]),
        ([1], 3, False, [[1], [], []]),
        ([1], 3, True, [[1], [1], [1]]),
        ([], 2, True, [[], []]),
        ({}, 2, True, [{}, {}]),
        ({"a": [1, 2, 3], "b": ("x", "y", "z")}, 2, False, [{"a": [1, 2], "b": ("x", "y")}, {"a": [3], "b": ("z",)}]),
        ({"a": [1, 2, 3]}, 2, True, [{"a": [1, 2]}, {"a": [3, 3]}]),
    ],
)
def test_inputs_are_shared_out(inputs: Any, size: int, padding: bool, expected: list[Any]) -> None:
    before = json.dumps(inputs)
    assert shares(inputs, size, padding) == expected
    assert json.dumps(inputs) == before


def test_tensors_are_shared_out_by_rows() -> None:
    rows = torch.arange(6.0).view(3, 2)
    assert [share.tolist() for share in shares(rows, 2)] == [[[0, 1], [2, 3]], [[4, 5]]]
    assert [share.tolist() for share in shares({"x": rows}, 2, padding=True)[1].values()] == [[[4, 5], [4, 5]]]
    assert [tuple(share.shape) for share in shares(rows[:0], 2, padding=True)] == [(0, 2), (0, 2)]


def test_a_world_of_one_keeps_what_it_is_given() -> None:
    inputs = object()
    assert shares(inputs, 1) == [inputs]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("text", "got str"),
        (torch.ones(()), "got Tensor"),
        ({"a": [1], "b": 2}, "got int"),
        ({"a": [1], "b": [1, 2]}, "equally long, got lengths {'a': 1, 'b': 2}"),
    ],
)
def test_what_cannot_be_shared_out(inputs: Any, message: str) -> None:
    with pytest.raises(gradsync.ConfigurationError, match=message):
        shares(inputs, 2)


# -- runs that share a store ------------------------------------------------------------------------------------------


def run_ids(store: Any, order: list[int], world_size: int, seconds: float = 20.0) -> list[Any]:
    """What each rank finds, or raises: started in this ``order``, each when the one before has had its time."""

    def rank(number: int, delay: float) -> Any:
        threading.Event().wait(delay)
        try:
            return world_module.run_id(store, number, world_size, timedelta(seconds=seconds))
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(order)) as pool:
        found = {number: pool.submit(rank, number, 0.05 * place) for place, number in enumerate(order)}
        return [found[number].result() for number in sorted(found)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_ranks_of_a_run_find_one_id_and_another_one_in_the_next(order: list[int]) -> None:
    store = dist.HashStore()
    runs = [run_ids(store, order, 3) for _ in range(3)] + [run_ids(store, order[::-1], 3)]
    assert all(len(set(run)) == 1 for run in runs)
    assert len({run[0] for run in runs}) == 4


def test_a_run_in_which_not_all_ranks_came_does_not_matter() -> None:
    store = dist.HashStore()
    first, second = run_ids(store, [0, 1], 3, seconds=0.5)
    assert isinstance(first, gradsync.GradsyncError)
    assert "rank 2 did not come" in str(first)
    assert isinstance(second, str)
    ids = run_ids(store, [2, 0, 1], 3)
    assert len(set(ids)) == 1
    assert ids[0] != second
