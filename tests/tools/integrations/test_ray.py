"""gradsync in the TorchTrainer of Ray Train, on a real cluster of two nodes, which are processes of this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.program, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "integrations"
# Ray gives its workers a low priority, and stops waiting for them: on a busy machine too soon.
PATIENCE = {"RAY_worker_niceness": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a cluster with a CPU on each of two nodes."""
    utilities = pytest.importorskip("ray.cluster_utils")
    variables = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", **PATIENCE}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(EXAMPLES)])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
        cluster = utilities.Cluster()
        try:
            try:
                cluster.add_node(**node, include_dashboard=False)
                cluster.add_node(**node)
            except Exception as error:
                if "timed out during startup" not in str(error):
                    raise
                pytest.skip("Ray gives a node 30 s to start, which is not enough on this machine as busy as it is")
            cluster.wait_for_nodes()
            yield cluster.address
        finally:
            cluster.shutdown()


def fit(address: str, example: str, folder: Path, *options: str) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The parameters of the last checkpoint, and what was reported in each epoch."""
    saved = folder / "saved.pt"
    command = [str(EXAMPLES / f"{example}.py"), "--folder", str(folder), "--save", str(saved), *options]
    ran = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = torch.load(saved)
    return found["parameters"], found["metrics"]


@pytest.fixture(scope="module")
def over_torch(address: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], list[Any]]:
    return fit(address, "ray_regression", tmp_path_factory.mktemp("stock"), "--stock")


def test_the_example_trains_to_the_bits_of_torch(over_torch: Any, address: str, tmp_path: Path) -> None:
    """Parameters, and the loss that was reported in each epoch."""
    stock, reported_by_stock = over_torch
    ours, reported = fit(address, "ray_regression", tmp_path / "ours")
    assert {name for name in stock if not torch.equal(stock[name], ours[name])} == set()
    assert {entry["wrapper"] for entry in reported} == {"gradsync.parallel.data_parallel"}
    assert {entry["wrapper"] for entry in reported_by_stock} == {"torch.nn.parallel.distributed"}
    assert [entry["loss"] for entry in reported] == [entry["loss"] for entry in reported_by_stock]


def test_a_killed_rank_is_named_and_ray_goes_on(over_torch: Any, address: str, tmp_path: Path) -> None:
    """From the checkpoint of the second epoch, to the bits of torch's class, with which nobody is killed."""
    stock, _ = over_torch
    ours, reported = fit(address, "ray_regression", tmp_path / "ours", "--kill")
    assert "rank 1" in (tmp_path / "ours" / "named.txt").read_text()
    assert {name for name in stock if not torch.equal(stock[name], ours[name])} == set()
    assert [entry["epoch"] for entry in reported] == [0, 1, 2, 3]


def test_the_classifier_trains_to_the_bits_of_torch(address: str, tmp_path: Path) -> None:
    """With BatchNorm, accumulation and clipping; also the losses, rates and accuracies that were reported."""
    stock, reported_by_stock = fit(address, "ray_image_classifier", tmp_path / "stock", "--stock")
    ours, reported = fit(address, "ray_image_classifier", tmp_path / "ours")
    assert {name for name in stock if not torch.equal(stock[name], ours[name])} == set()
    assert {entry.pop("wrapper") for entry in reported} == {"gradsync.parallel.data_parallel"}
    assert {entry.pop("wrapper") for entry in reported_by_stock} == {"torch.nn.parallel.distributed"}
    for one, other in zip(reported, reported_by_stock, strict=True):
        assert {name: one[name] for name in ("epoch", "loss", "accuracy", "rate")} == {
            name: other[name] for name in ("epoch", "loss", "accuracy", "rate")
        }
