"""What an Accelerator saves: checkpoints that any other optimizer can load, and models for other programs."""

import json
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
from gradsync.accelerator import ProjectConfiguration
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


# -- what is written beside checkpoints -------------------------------------------------------------------------------


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def save_models(folder: str) -> list[str]:
    accelerator = Accelerator()
    model = accelerator.prepare(tied())
    accelerator.save_model(model, folder)
    accelerator.save_model(model, f"{folder}/shards", max_shard_size="0.08KB")
    accelerator.save({"a": torch.ones(2)}, f"{folder}/any.bin")
    return list(accelerator.get_state_dict(model))


def test_models_are_saved_as_the_hub_has_them(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    for names in ThreadRanks(3).run(save_models, str(tmp_path)):
        assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert sorted(safetensors.load_file(tmp_path / "model.safetensors")) == ["0.bias", "0.weight", "1.bias"]
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["1.bias"] == "model-00002-of-00002.safetensors"
    assert torch.equal(torch.load(tmp_path / "any.bin", map_location="cpu")["a"], torch.ones(2))


def test_checkpoints_may_name_themselves(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    for number in range(3):
        nn.init.constant_(model.weight, float(number))
        accelerator.save_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    nn.init.zeros_(model.weight)
    accelerator.load_state()
    assert model.weight.item() == 2.0
    assert accelerator.logging_dir == str(tmp_path)
    with pytest.raises(ConfigurationError, match="needs output_dir"):
        Accelerator(cpu=True).save_state()


def test_hooks_may_save_and_load_a_model_by_themselves(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    kept = {}

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        kept[folder] = {name: tensor.clone() for name, tensor in weights.pop().items()}

    def load(models: list[nn.Module], folder: str) -> None:
        models.pop().load_state_dict(kept[folder])

    hooks = [accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)]
    before = model.weight.item()
    accelerator.save_state(tmp_path)
    nn.init.constant_(model.weight, before + 1)
    accelerator.load_state(tmp_path)
    assert model.weight.item() == before
    for hook in hooks:
        hook.remove()
    with pytest.raises(ConfigurationError, match="0 models and this accelerator has prepared 1"):
        accelerator.load_state(tmp_path)
