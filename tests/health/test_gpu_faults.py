"""Faults of NCCL ranks that share a GPU, one of each kind. ``python -m tests.faults --device cuda --seeds 5`` has more.

Skipped where there is no CUDA device. Ranks are processes of their own, which are killed and stopped; each has a limit,
and none is left behind.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync.tools.lab.gpu import SharedGpuPlan
from tests.faults import CUDA_KINDS, Times, check, check_survived, draw, live_through, survive
from tests.faulty import WAITS
from tests.ranks import nccl_pool_of
from tests.scripts import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("GRADSYNC_FAULTS_SEED", "0"))
# Other tests share the GPU and its host meanwhile. ``python -m tests.faults --device cuda`` has one fault after the
# other, and holds them to the second that is promised.
TIMES = Times(noticed=5.0)


@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_whatever_happens_to_a_rank_is_named_and_nobody_is_left_in_the_device(kind: str, tmp_path: Path) -> None:
    fault = draw(kind, SEED + CUDA_KINDS.index(kind), TIMES, device="cuda")
    check(fault, live_through(fault, tmp_path / "run", TIMES), TIMES)


def test_what_is_survived_leaves_replicas_equal(tmp_path: Path) -> None:
    check_survived(*survive(2, tmp_path / "run", TIMES), TIMES)


@pytest.mark.parametrize("waits", WAITS, ids=["synchronize", "item", "gradsync"])
def test_a_script_ends_soon_after_a_rank_was_killed(tmp_path: Path, waits: str) -> None:
    """With an interpreter of its own, which runs destructors, and which destroys its group whatever has happened."""
    fault = replace(draw("kill -9", SEED, TIMES, device="cuda"), victim=1, waits=waits)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(fault.ranks)}
    with ExitStack() as stack:
        ranks = []
        for rank in range(fault.ranks):
            variables = os.environ | meeting | SharedGpuPlan(ranks=fault.ranks).variables(rank)
            variables |= {"RANK": str(rank), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
            output = stack.enter_context((tmp_path / f"output-{rank}").open("wb"))
            command = [sys.executable, "-m", "tests.faulty", json.dumps(asdict(fault)), str(tmp_path)]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=output))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        for rank in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(90)
        ended = time.monotonic()
    struck = float((tmp_path / "struck").read_text())
    said = [(tmp_path / f"output-{rank}").read_text(errors="replace")[-3000:] for rank in (0, 2)]
    assert [ranks[0].returncode, ranks[2].returncode] == [1, 1], said
    assert ended - struck < 20.0, said
    for rank in (0, 2):
        left = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert "rank 1 (process " in left["message"], left
        assert left["at"] - struck < TIMES.noticed, left


# -- what a step costs, and what it does not do -----------------------------------------------------------------------


def step_without_a_sync(name: str) -> tuple[int, bool]:
    """Steps in which the host must not wait for the device; and how the gate was closed by a flag."""
    model = gradsync.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))))
    optimizer: Any = getattr(torch.optim, name)(model.parameters(), lr=1e-3, fused=True)
    inputs = torch.randn(32, 64)
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    for step in range(8):
        # The first windows learn, and load kernels.
        torch.cuda.set_sync_debug_mode("error" if step >= 6 else "default")
        try:
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(inputs).square().mean().backward()
    # As when the watch aborts a collective after the host has gone on.
    flag = model.communicator.failure_flags[0]
    flag.fill_(1.0)
    optimizer.step()
    torch.cuda.synchronize()
    flag.fill_(0.0)
    is_same = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    dist.barrier()
    return model.synchronizer.synchronizations, is_same


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adam"])
def test_a_fused_step_is_gated_on_the_device_without_a_wait_of_the_host(name: str) -> None:
    assert nccl_pool_of(2, "slices").run(step_without_a_sync, name) == [(9, True)] * 2


def list_what_is_under_way() -> tuple[int, int]:
    """How many collectives the watch sees while the device is busy, and when it is idle."""
    model = gradsync.DistributedDataParallel(torch.nn.Linear(64, 64))
    model(torch.randn(4, 64)).square().mean().backward()
    outstanding = model.communicator.state.outstanding
    assert outstanding is not None
    torch.cuda.synchronize()
    # torch's watchdog looks each tenth of a second.
    time.sleep(1.0)
    outstanding.oldest()
    idle = len(outstanding)
    torch.cuda._sleep(2_000_000_000)
    tensor = torch.ones(8)
    model.communicator.all_reduce(tensor).wait()
    found = outstanding.oldest()
    torch.cuda.synchronize()
    return 0 if found is None else 1, idle


def test_the_watch_sees_what_the_device_has_yet_to_finish() -> None:
    assert nccl_pool_of(2, "slices").run(list_what_is_under_way) == [(1, 0)] * 2
