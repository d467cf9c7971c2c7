"""``dynamo_backend`` and ``TorchDynamoPlugin``: what is compiled, and that it trains as without a compiler."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from gradsync import Accelerator
from gradsync.accelerator import TorchDynamoPlugin
from gradsync.accelerator.compiling import chosen_compiler
from gradsync.errors import ConfigurationError
from tests.ranks import RankPool, pool_of

# One worker imports Accelerate for all of them.
pytestmark = [pytest.mark.timeout(120), pytest.mark.program, pytest.mark.xdist_group("packages")]

REGIONAL = TorchDynamoPlugin("aot_eager", fullgraph=True, use_regional_compilation=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(4, 8).double()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def compiled_parts(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if part._compiled_call_impl is not None]


def train(**options: Any) -> tuple[list[torch.Tensor], list[str], list[str], int]:
    """The parameters after four windows of two micro-batches, what was compiled, how many graphs, and what is saved."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        # The compiler looks for a gradient of what it is given, and torch warns where that is not a leaf.
        warnings.simplefilter("ignore", UserWarning)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        module = Blocks()
        model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(accelerator.process_index)
        for _ in range(8):
            with accelerator.accumulate(model):
                data = torch.randn(3, 4, generator=generator, dtype=torch.float64)
                accelerator.backward(model(data).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    bare = accelerator.unwrap_model(model)
    parameters = [parameter.detach().clone() for parameter in module.parameters()]
    return parameters, compiled_parts(bare), [*bare.state_dict()], graphs


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"dynamo_backend": "aot_eager"}, [""]),
        ({"dynamo_plugin": REGIONAL}, ["embed", "blocks.0", "blocks.1", "blocks.2"]),
        ({"dynamo_plugin": TorchDynamoPlugin("aot_eager", mode="default", options={})}, [""]),
    ],
    ids=["whole", "regional", "options"],
)
def test_a_compiled_model_trains_as_an_uncompiled_one(
    world_size: int, sharded: bool, options: dict[str, Any], parts: list[str]
) -> None:
    ranks: RankPool = pool_of(world_size)
    expected = ranks.run(train)[0][0]
    for parameters, compiled, names, graphs in ranks.run(train, shard_optimizer=sharded, **options):
        torch.testing.assert_close(parameters, expected, rtol=1e-12, atol=1e-12)
        assert compiled == parts
        # Blocks of one kind share a graph.
        assert 1 <= graphs <= len(parts)
        assert names == [*Blocks().state_dict()]


def test_what_the_user_has_compiled_is_left_alone() -> None:
    model = Blocks()
    model.blocks[1].compile(backend="aot_eager")
    Accelerator(cpu=True, dynamo_backend="aot_eager").prepare(model)
    assert compiled_parts(model) == ["blocks.1"]


@pytest.mark.parametrize("way", ["argument", "handler"])
@pytest.mark.parametrize("backend", ["no", "NO", None, "eager", "INDUCTOR"])
def test_objects_of_accelerate_mean_the_same(backend: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND", raising=False)
    plugin = pytest.importorskip("accelerate").utils.TorchDynamoPlugin(backend=backend, dynamic=True)
    by_argument = way == "argument"
    chosen = chosen_compiler(None, plugin if by_argument else None, None if by_argument else [plugin])
    assert chosen.name == str(backend or "no").lower()
    assert (chosen.dynamic, chosen.fullgraph, chosen.use_regional_compilation) == (True, False, False)


def test_what_accelerate_launch_sets_is_used_unless_an_argument_says_otherwise() -> None:
    variables = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "True"}
    launched = chosen_compiler(None, None, None, variables)
    assert (launched.name, launched.use_regional_compilation, launched.fullgraph) == ("inductor", True, None)
    assert chosen_compiler("no", None, None, variables).name == "no"
    assert chosen_compiler(None, None, None, {}).name == "no"


def test_two_compilers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two compilers were asked for, 'aot_eager' and 'inductor'"):
        Accelerator(cpu=True, dynamo_plugin=REGIONAL, dynamo_backend="inductor")
    Accelerator(cpu=True, dynamo_plugin=REGIONAL, dynamo_backend="no")


def test_settings_of_another_kind_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="a TorchDynamoPlugin was expected"):
        Accelerator(cpu=True, dynamo_plugin="inductor")
