"""What an Accelerator writes beside checkpoints: models for others to load, and folders that name themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradsync import Accelerator
from gradsync.accelerator import ProjectConfiguration
from gradsync.errors import ConfigurationError
from tests.ranks import ThreadRanks

pytestmark = pytest.mark.timeout(120)


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
