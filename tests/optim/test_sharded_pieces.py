"""The state of a sharded optimizer in pieces, through torch.distributed.checkpoint, on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from gradsync import DistributedDataParallel, ShardedOptimizer
from gradsync.communicator import choose_communicator
from gradsync.errors import ConfigurationError
from tests.optim.training import TINY, assert_same, batch, groups_of, net, parameters_of
from tests.ranks import pool_of

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


class OneNumber(torch.optim.SGD):
    """Keeps a number with a dimension, and one that is no tensor."""

    element_wise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                count = state.setdefault("count", torch.zeros(1, dtype=torch.float64))
                if parameter.grad is not None:
                    count += 1
                    parameter.grad.mul_(1.0 / (1.0 + float(count)))
                    state["word"] = "seen"
        return super().step(closure)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "OneNumber": (OneNumber, {"lr": 0.1, "momentum": 0.9}),
}


def train(name: str, steps: range, *, save: Path | None = None, load: Path | None = None, cap: float = TINY) -> Any:
    """Every rank has the whole batch: the number of ranks changes nothing."""
    optimizer_class, options = OPTIMIZERS[name]
    model = DistributedDataParallel(net(), bucket_cap_mb=cap)
    optimizer = ShardedOptimizer(optimizer_class(groups_of(model), **options), model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    if load is not None:
        state = {"model": model.module.state_dict()}
        dcp.load(state, checkpoint_id=load)
        model.module.load_state_dict(state["model"])
        optimizer.load_sharded(load)
        schedule.last_epoch = steps.start
    for step in steps:
        model(batch(0, step)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if save is not None:
        dcp.save({"model": model.module.state_dict(), "optimizer": optimizer.sharded_state_dict()}, checkpoint_id=save)
    return parameters_of(model)


@pytest.mark.breadth
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("writers", "readers"),
    [(2, 3), (2, 1), *(pytest.param(*ranks, marks=pytest.mark.breadth) for ranks in ((3, 2), (1, 2)))],
)
def test_it_is_loaded_on_another_number_of_ranks(tmp_path: Path, name: str, writers: int, readers: int) -> None:
    pool_of(writers).run(train, name, range(6), save=tmp_path)
    whole = pool_of(1).run(train, name, range(10))[0]
    assert_same(pool_of(readers).run(train, name, range(6, 10), load=tmp_path, cap=TINY / 2), whole)


def test_every_rank_writes_its_own_part(tmp_path: Path) -> None:
    pool_of(3).run(train, "AdamW", range(3), save=tmp_path)
    known = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    moments = {key: value for key, value in known.items() if key.endswith("exp_avg")}
    assert moments.keys() == {f"optimizer.state.{name}.exp_avg" for name, _ in net().named_parameters()}
    for name, parameter in net().named_parameters():
        chunks = moments[f"optimizer.state.{name}.exp_avg"].chunks  # type: ignore[union-attr]
        assert sum(chunk.sizes[0] for chunk in chunks) == parameter.numel()
    assert any(len(value.chunks) > 1 for value in moments.values())  # type: ignore[union-attr]
    assert len({path.name.split("_")[2] for path in tmp_path.glob("*.distcp")}) == 3


def refuse(folder: Path) -> list[str]:
    told = []
    larger = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Tanh(), torch.nn.Linear(9, 11)).double()
    for module, name, groups in ((net(), "adam", True), (larger, "optimizer", True), (net(), "optimizer", False)):
        model = DistributedDataParallel(module)
        optimizer = ShardedOptimizer(
            torch.optim.AdamW(groups_of(model) if groups else model.parameters(), lr=1e-2), model
        )
        try:
            # What one rank cannot read, none does.
            optimizer.load_sharded(folder if groups or choose_communicator().rank else folder / "nowhere", name)
        except ConfigurationError as error:
            told.append(str(error))
        # Nothing has changed: it trains.
        model(batch(choose_communicator().rank, 0, width=8 if module is larger else 7)).square().mean().backward()
        optimizer.step()
        optimizer.flush()
    return told


def test_what_is_not_there_and_what_is_anothers_is_refused(tmp_path: Path) -> None:
    pool_of(2).run(train, "AdamW", range(3), save=tmp_path)
    for nothing, other, nowhere in pool_of(2).run(refuse, tmp_path):
        assert "no sharded optimizer under 'adam'" in nothing
        assert "'0.weight' has (63,) numbers, and the parameter 72" in other
        assert "rank 0 could not read the checkpoint" in nowhere or "has not 1 parameter groups" in nowhere
