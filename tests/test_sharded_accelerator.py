"""``Accelerator(shard_optimizer=True)`` trains as without it, saves the same checkpoint and goes on from either."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradsync import Accelerator, ConfigurationError, GradientAccumulationPlugin, ShardedOptimizer
from gradsync.communicator import choose_communicator
from tests.ranks import Ranks, ThreadRanks
from tests.test_sharded import assert_same, batch, groups_of, net, parameters_of

pytestmark = pytest.mark.timeout(120)


def prepare(shard: bool, **options: Any) -> tuple[Accelerator, nn.Module, Any, Any]:
    plugin = GradientAccumulationPlugin(num_steps=2, scheduler_steps="once")
    accelerator = Accelerator(
        communicator=choose_communicator(), gradient_accumulation_plugin=plugin, shard_optimizer=shard, **options
    )
    module = net()
    optimizer = torch.optim.AdamW(groups_of(module), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    return accelerator, *accelerator.prepare(module, optimizer, schedule)


def run(prepared: tuple[Accelerator, nn.Module, Any, Any], steps: range) -> list[torch.Tensor]:
    accelerator, model, optimizer, schedule = prepared
    assert isinstance(optimizer.optimizer, ShardedOptimizer) == accelerator.shard_optimizer
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


def train(shard: bool) -> list[torch.Tensor]:
    return run(prepare(shard), range(12))


@pytest.mark.parametrize("ranks", [("threads", 3), ("processes", 2)], indirect=True, ids="{0[0]}-{0[1]}".format)
def test_a_prepared_optimizer_may_be_shared_out(ranks: Ranks) -> None:
    assert_same(ranks.run(train, True), ranks.run(train, False)[0])


def train_and_save(shard: bool, folder: Path) -> None:
    prepared = prepare(shard)
    run(prepared, range(6))
    prepared[0].save_state(str(folder))


def load_and_train(shard: bool, folder: Path) -> list[torch.Tensor]:
    prepared = prepare(shard)
    prepared[0].load_state(str(folder))
    return run(prepared, range(6, 12))


@pytest.mark.parametrize("after", [False, True], ids=["to plain", "to sharded"])
@pytest.mark.parametrize("before", [False, True], ids=["from plain", "from sharded"])
def test_a_checkpoint_is_the_same_either_way(tmp_path: Path, before: bool, after: bool) -> None:
    ranks = ThreadRanks(2)
    ranks.run(train_and_save, before, tmp_path)
    assert_same(ranks.run(load_and_train, after, tmp_path), ranks.run(train, False)[0])


def test_an_optimizer_of_no_prepared_model_is_refused() -> None:
    def work() -> None:
        accelerator = Accelerator(communicator=choose_communicator(), shard_optimizer=True)
        with pytest.raises(ConfigurationError, match="one prepared model"):
            accelerator.prepare(torch.optim.SGD(net().parameters()))

    ThreadRanks(1).run(work)
