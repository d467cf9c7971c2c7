"""Recording on a CUDA device: marks are events, and tell where the device's time went. Skipped where there is none."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from gradsync import DistributedDataParallel
from gradsync.observe.explain import explain_recordings
from gradsync.observe.explain.explanation import Explanation
from gradsync.observe.recording import Recorder
from gradsync.observe.recording.files import read_recordings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Cycles of a device's clock: some hundredths of a second.
LONG = 100_000_000
# More than the turns of all others that use the device meanwhile.
LONGER = 5 * LONG


class Slow(nn.Linear):
    """Takes the device a while in its forward; the host is not held."""

    cycles = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        return super().forward(hidden)


def train(model: nn.Sequential, recorder: Recorder | None = None, steps: int = 8) -> DistributedDataParallel:
    wrapper = DistributedDataParallel(model.cuda(), bucket_cap_mb=0.005, observer=recorder)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        wrapper(torch.ones(4, 32, device="cuda")).sum().backward()
        optimizer.step()
    return wrapper


def slow_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Slow(32, 32) for _ in range(4)))


def adds_up(explanation: Explanation) -> None:
    for place, parts in enumerate(explanation.split.ranks.values()):
        steps = [merged.ranks[place].seconds for merged in explanation.timeline.steps]
        assert parts.step == pytest.approx(sum(steps) / len(steps), rel=0.01)
        assert min(dataclasses.astuple(parts)) >= 0.0


def test_the_device_s_time_is_split_and_not_the_host_s(nccl: None) -> None:
    model = slow_model()
    model[2].cycles = LONG
    explanation = train(model, Recorder()).explain()
    adds_up(explanation)
    parts = explanation.split.mean
    assert parts.forward > 0.5 * parts.step
    assert {step.collectives for merged in explanation.timeline.steps for step in merged.ranks} == {4}


def test_who_does_not_ask_is_not_recorded(nccl: None) -> None:
    assert train(slow_model()).replica.recorder is None


def two_ranks(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["GRADSYNC_RECORD"] = f"{folder}/recordings"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.cuda.set_device(0)
    model = slow_model()
    model[2].cycles = LONGER if rank == 1 else 0
    # Of fewer steps nothing is concluded.
    explanation = train(model, steps=12).explain(all_ranks=True)
    Path(folder, f"said-{rank}").write_text(f"{explanation.advice[0].kind}: {explanation.advice[0].cause}")
    dist.destroy_process_group()


def test_a_slow_device_is_the_first_advice_and_files_tell_the_same(tmp_path: Path) -> None:
    mp.spawn(two_ranks, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        said = (tmp_path / f"said-{rank}").read_text()
        assert said.startswith("slow rank: rank 1 is"), said
        assert "forward" in said
    recordings = read_recordings(tmp_path / "recordings")
    explanation = explain_recordings(recordings)
    adds_up(explanation)
    assert explanation.advice[0].cause.startswith("rank 1 is")
