"""Prepared optimizers that work behind the next forward train as plain ones, and their checkpoints are the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradsync import (
    Accelerator,
    ConfigurationError,
    GradientAccumulationPlugin,
    OverlappedOptimizer,
    ShardedOptimizer,
)
from gradsync.communicator import InProcessWorld, choose_communicator
from tests.optim.training import assert_same, batch, groups_of, net, parameters_of
from tests.ranks import Ranks, ThreadRanks

pytestmark = pytest.mark.timeout(120)


KINDS = {"plain": {}, "sharded": {"shard_optimizer": True}, "overlapped": {"overlap": "next-forward"}}
CLASSES = {"plain": torch.optim.AdamW, "sharded": ShardedOptimizer, "overlapped": OverlappedOptimizer}


def prepare(kind: str) -> tuple[Accelerator, nn.Module, Any, Any]:
    plugin = GradientAccumulationPlugin(num_steps=2, scheduler_steps="once")
    options: Any = KINDS[kind]
    accelerator = Accelerator(communicator=choose_communicator(), gradient_accumulation_plugin=plugin, **options)
    module = net()
    optimizer = torch.optim.AdamW(groups_of(module), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    prepared = accelerator.prepare(module, optimizer, schedule)
    assert type(prepared[1].optimizer) is CLASSES[kind]
    return accelerator, *prepared


def run(prepared: tuple[Accelerator, nn.Module, Any, Any], steps: range) -> list[torch.Tensor]:
    accelerator, model, optimizer, schedule = prepared
    for step in steps:
        for micro in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch(accelerator.process_index, step, micro)).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return parameters_of(model)


def train(kind: str) -> list[torch.Tensor]:
    return run(prepare(kind), range(12))


@pytest.mark.parametrize("kind", ["sharded", "overlapped"])
@pytest.mark.parametrize("ranks", [("threads", 3), ("processes", 2)], indirect=True, ids="{0[0]}-{0[1]}".format)
def test_a_prepared_optimizer_may_work_behind_the_next_forward(ranks: Ranks, kind: str) -> None:
    assert_same(ranks.run(train, kind), ranks.run(train, "plain")[0])


def train_and_save(kind: str, folder: Path) -> None:
    prepared = prepare(kind)
    run(prepared, range(6))
    prepared[0].save_state(str(folder))


def load_and_train(kind: str, folder: Path) -> list[torch.Tensor]:
    prepared = prepare(kind)
    prepared[0].load_state(str(folder))
    return run(prepared, range(6, 12))


@pytest.mark.breadth
@pytest.mark.parametrize("after", KINDS, ids="to {}".format)
@pytest.mark.parametrize("before", KINDS, ids="from {}".format)
def test_a_checkpoint_is_the_same_either_way(tmp_path: Path, before: str, after: str) -> None:
    ranks = ThreadRanks(2)
    ranks.run(train_and_save, before, tmp_path)
    assert_same(ranks.run(load_and_train, after, tmp_path), ranks.run(train, "plain")[0])


@pytest.mark.parametrize("kind", ["sharded", "overlapped"])
def test_an_optimizer_of_no_prepared_model_is_refused(kind: str) -> None:
    def work() -> None:
        options: Any = KINDS[kind]
        accelerator = Accelerator(communicator=choose_communicator(), **options)
        with pytest.raises(ConfigurationError, match="one prepared model"):
            accelerator.prepare(torch.optim.SGD(net().parameters()))

    ThreadRanks(1).run(work)


def test_what_excludes_each_other_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="exclude each other"):
        Accelerator(communicator=InProcessWorld(1).communicator(0), shard_optimizer=True, overlap="backward")
    with pytest.raises(ConfigurationError, match="got 'always'"):
        Accelerator(communicator=InProcessWorld(1).communicator(0), overlap="always")  # type: ignore[arg-type]
