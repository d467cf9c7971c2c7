"""gradsync in the Trainer of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gradsync.transformers
from gradsync.errors import ConfigurationError
from tests.scripts import run_scripts

pytestmark = [pytest.mark.program, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
LANGUAGE_MODEL = ROOT / "examples" / "integrations" / "transformers_language_model.py"
CLASSIFICATION = ROOT / "examples" / "integrations" / "transformers_classification.py"
# Most of the time that a script takes to begin.
PRELOADED = ("transformers.trainer", "transformers.models.llama.modeling_llama")
# Of a log: what tells how long something took.
TIMES = ("runtime", "per_second", "preparation_time")


def trained(example: Path, folder: Path, *options: str, ranks: int = 2) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The parameters that an example ends with, and what it has logged."""
    pytest.importorskip("transformers")
    folder.mkdir(exist_ok=True)
    saved = folder / "saved.pt"
    arguments = ["--folder", str(folder), "--save", str(saved), *options]
    ran = run_scripts([example], ranks=ranks, folder=folder, arguments=arguments, timeout=250, preload=PRELOADED)[
        example
    ]
    assert ran.error is None, ran.error
    found = torch.load(saved)
    log = [{name: value for name, value in entry.items() if not name.endswith(TIMES)} for entry in found["log"]]
    return found["parameters"], log


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def stock_language_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(LANGUAGE_MODEL, tmp_path_factory.mktemp("stock"), "--stock")


def test_a_language_model_trains_to_the_bits_of_the_stock_trainer(stock_language_model: Any, tmp_path: Path) -> None:
    """Parameters, and every loss, norm and learning rate that was logged."""
    parameters, log = trained(LANGUAGE_MODEL, tmp_path)
    assert largest_difference(parameters, stock_language_model[0]) == 0.0
    assert log == stock_language_model[1]
    assert len([entry for entry in log if "loss" in entry]) == 18


def test_ranks_that_count_their_own_tokens_average_over_all_of_them(stock_language_model: Any, tmp_path: Path) -> None:
    """As one process does, and the Trainer that gathers the numbers of tokens. Stock, the ranks count the same."""
    ours, _ = trained(LANGUAGE_MODEL, tmp_path / "ours", "--own-tokens")
    stock, _ = trained(LANGUAGE_MODEL, tmp_path / "stock", "--own-tokens", "--stock")
    alone, _ = trained(LANGUAGE_MODEL, tmp_path / "alone", "--stock", "--accumulate", "4", ranks=0)
    assert largest_difference(ours, alone) < 1e-6
    assert largest_difference(ours, stock_language_model[0]) < 1e-6
    assert largest_difference(stock, alone) > 1e-3


def test_a_classifier_evaluates_and_goes_on_with_the_bits_of_the_stock_trainer(tmp_path: Path) -> None:
    """Two epochs by the stock Trainer and the third by ours; also what TensorBoard was told."""
    pytest.importorskip("tensorboard")
    report = ("--report-to", "tensorboard")
    parameters, log = trained(CLASSIFICATION, tmp_path / "stock", "--stock")
    trained(CLASSIFICATION, tmp_path / "ours", "--stock", "--epochs", "3", "--stop-after", "2")
    resumed, log_of_ours = trained(CLASSIFICATION, tmp_path / "ours", "--resume", *report)
    assert largest_difference(resumed, parameters) == 0.0
    # The mean loss of a run is that of the steps in it.
    assert [entry for entry in log_of_ours if "train_loss" not in entry] == [
        entry for entry in log if "train_loss" not in entry
    ]
    assert len([entry for entry in log if "eval_accuracy" in entry]) == 3
    assert list((tmp_path / "ours").glob("**/events.out.tfevents.*"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What small trainings came to on each rank."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("small")
    script = ROOT / "tests" / "trainer_script.py"
    ran = run_scripts(
        [script], ranks=2, folder=folder, arguments=[str(folder / "out")], timeout=250, preload=PRELOADED
    )[script]
    assert ran.error is None, ran.error
    return [json.loads((folder / f"out.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("training", ["plain", "twice", "bf16", "rank 1 has no tokens"])
def test_where_stock_is_exact_ours_has_its_bits(training: str, small: list[dict[str, Any]]) -> None:
    for rank in small:
        assert rank[f"ours, {training}"] == rank[f"stock, {training}"]


@pytest.mark.parametrize("training", ["evaluated first", "unfrozen"])
def test_where_the_stock_replicas_drift_apart_ours_agree(training: str, small: list[dict[str, Any]]) -> None:
    first, second = small
    assert first[f"stock, {training}"] != second[f"stock, {training}"]
    assert first[f"ours, {training}"] == second[f"ours, {training}"]


def test_an_evaluation_before_training_changes_nothing(small: list[dict[str, Any]]) -> None:
    assert small[0]["ours, evaluated first"] == small[0]["ours, plain"]


def test_a_rank_that_has_no_tokens_counts_for_nothing(small: list[dict[str, Any]]) -> None:
    """Not even where the ranks do not know each other's numbers, and its loss would be divided by zero."""
    for rank in small:
        expected = rank["ours, rank 1 has no tokens"]
        assert rank["ours, rank 1 has no tokens and says so"] == pytest.approx(expected, abs=1e-5)


def test_a_trainer_that_has_trained_is_refused(small: list[dict[str, Any]]) -> None:
    assert "the model of this Trainer is already wrapped, in DistributedDataParallel" in small[0]["too late"]


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"needs a transformers\.Trainer, got Linear"):
        gradsync.transformers.use(torch.nn.Linear(1, 1))
