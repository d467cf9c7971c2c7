"""The models of `gradsync train`: their shapes, that they see no future, that they learn, and what is refused."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gradsync.errors import ConfigurationError
from gradsync.tools.llm.model import GPT, IGNORED, SIZES, CausalLM, GPTConfig, build_model, count_targets, loss_of

TINY_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def small() -> GPT:
    return GPT(GPTConfig(vocab_size=11, sequence_length=8, layers=2, heads=2, width=8)).double()


# -- the GPT ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "millions"), [("nano", 0.1), ("tiny", 0.45), ("mini", 5.0)])
def test_named_sizes_are_about_as_large_as_they_say(name: str, millions: float) -> None:
    model = build_model(name, vocab_size=256, sequence_length=128)
    assert model.parameter_count == pytest.approx(millions * 1e6, rel=0.25)
    assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 256)


def test_gpt2_has_the_parameters_of_gpt2() -> None:
    with torch.device("meta"):
        assert build_model("gpt2", vocab_size=50257, sequence_length=1024).parameter_count == 124_439_808


def test_no_position_sees_what_follows() -> None:
    torch.manual_seed(0)
    model = small()
    tokens = torch.randint(0, 11, (1, 8))
    before = model(tokens)
    for place in range(8):
        changed = tokens.clone()
        changed[0, place] = (tokens[0, place] + 1) % 11
        differs = (model(changed) != before).any(dim=-1)[0]
        assert not differs[:place].any()
        assert differs[place:].all()


def test_positions_matter() -> None:
    torch.manual_seed(0)
    logits = small()(torch.zeros(1, 8, dtype=torch.int64))
    assert not torch.allclose(logits[0, 0], logits[0, 7])


def test_the_head_is_the_embedding() -> None:
    model = small()
    # Token 5 is in no input: only the head reaches its row.
    model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    gradient = model.token_embedding.weight.grad
    assert gradient is not None
    assert gradient[5].abs().sum() > 0


def test_the_initial_loss_is_that_of_a_guess_and_projections_are_scaled() -> None:
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=256, sequence_length=64)
    tokens = torch.randint(0, 256, (8, 65))
    assert loss_of(model(tokens[:, :-1]), tokens[:, 1:]).item() == pytest.approx(math.log(256), abs=0.1)
    weights = dict(model.named_parameters())
    assert weights["blocks.0.mlp.input.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert weights["blocks.1.mlp.output.weight"].std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.1)
    assert weights["blocks.1.attention.output.weight"].std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.1)


def train(model: CausalLM, tokens: torch.Tensor, steps: int) -> tuple[float, float]:
    """The first and the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]


def test_nano_learns_a_repeating_pattern() -> None:
    torch.manual_seed(0)
    pattern = torch.randint(0, 256, (10,))
    tokens = torch.stack([pattern.roll(shift).repeat(3)[:25] for shift in range(4)])
    first, last = train(build_model("nano", vocab_size=256, sequence_length=24), tokens, steps=60)
    assert first > 5.0
    assert last < 0.3


# -- loss -------------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_what_counts() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[1, IGNORED, 4], [IGNORED, IGNORED, 0]])
    by_hand = [-logits[row, place].log_softmax(-1)[targets[row, place]] for row, place in ((0, 0), (0, 2), (1, 2))]
    assert loss_of(logits, targets).item() == pytest.approx(sum(by_hand).item() / 3, rel=1e-14)
    assert count_targets(targets) == 3


def test_weighted_means_of_micro_batches_are_the_mean_of_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 4, 5, dtype=torch.float64)
    targets = torch.randint(0, 5, (6, 4)).masked_fill(torch.rand(6, 4) < 0.4, IGNORED)
    parts = [(logits[rows], targets[rows]) for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    total = sum(loss_of(*part).item() * count_targets(part[1]) for part in parts)
    assert total / count_targets(targets) == pytest.approx(loss_of(logits, targets).item(), rel=1e-13)


def test_the_loss_of_bfloat16_logits_is_computed_in_float32() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 16, 64).bfloat16(), torch.randint(0, 64, (4, 16))
    loss = loss_of(logits, targets)
    assert loss.dtype == torch.float32
    exact = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)


def test_nothing_to_predict_is_zero_and_not_nan() -> None:
    logits = torch.randn(1, 2, 3, requires_grad=True)
    targets = torch.full((1, 2), IGNORED)
    loss = loss_of(logits, targets)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(1, 2, 3))
    assert count_targets(targets) == 0


# -- transformers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def config_folder(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(TINY_GPT2))
    return tmp_path


@pytest.mark.xdist_group("packages")
@pytest.mark.program
def test_a_config_alone_is_built_with_random_weights_and_learns(config_folder: Path) -> None:
    torch.manual_seed(0)
    model = build_model(str(config_folder), vocab_size=256, sequence_length=32)
    assert model.training
    assert all(name.startswith("model.transformer.") for name, _ in model.named_parameters())
    assert model(torch.zeros(2, 32, dtype=torch.int64)).shape == (2, 32, 300)
    first, last = train(model, torch.arange(33).repeat(4, 1), steps=30)
    assert last < first - 0.3


@pytest.mark.xdist_group("packages")
def test_a_folder_with_weights_keeps_them_and_float32_whatever_they_were_saved_in(config_folder: Path) -> None:
    torch.manual_seed(0)
    built = build_model(str(config_folder), vocab_size=256, sequence_length=32)
    saved = config_folder / "saved"
    built.model.bfloat16().save_pretrained(saved)
    for name in (str(saved), f"hf:{saved}"):
        loaded = build_model(name, vocab_size=256, sequence_length=32)
        state, expected = loaded.state_dict(), built.state_dict()
        assert state.keys() == expected.keys()
        assert all(state[key].dtype == torch.float32 for key in state)
        assert all(torch.equal(state[key], expected[key].float()) for key in state)
        assert loaded.training


@pytest.mark.parametrize(
    ("vocab_size", "sequence_length", "message"),
    [
        (301, 32, r"vocabulary of 300, the data one of 301.*own tokenizer"),
        (256, 33, r"positions for 32 tokens, the sequences have 33.*at most 32"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    config_folder: Path, vocab_size: int, sequence_length: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_model(str(config_folder), vocab_size=vocab_size, sequence_length=sequence_length)


@pytest.mark.xdist_group("packages")
def test_what_transformers_cannot_read_is_named(config_folder: Path) -> None:
    (config_folder / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="transformers cannot load a config of"):
        build_model(str(config_folder), vocab_size=256, sequence_length=32)


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["huge", "hf:", "", "no/such/folder"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{', '.join(SIZES)}; hf:NAME"):
        build_model(name, vocab_size=256, sequence_length=8)


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        build_model(str(tmp_path), vocab_size=256, sequence_length=8)


def test_too_long_a_batch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="positions for 8 tokens, the batch has 9"):
        small()(torch.zeros(1, 9, dtype=torch.int64))
