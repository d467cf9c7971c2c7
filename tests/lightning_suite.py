"""What Lightning documents of its DDP strategies, tried with its own and with gradsync's: on two ranks, over Gloo.

    torchrun --nproc-per-node 2 -m tests.lightning_suite OUT              # all; a minute
    torchrun --nproc-per-node 2 -m tests.lightning_suite OUT clip uneven  # those whose names contain a word, verbosely

Rank R writes what it has found to OUT.R.

A check trains something and returns what came of it: parameters, counts, types. Each runs with the stock strategy, with
gradsync's, and if `SHARDED` names it, with gradsync's and a sharded optimizer. The results must be the same bits, or
agree to 1e-6 where `CLOSE` says so. `DIFFERENT` names what is meant to differ. `docs/lightning-tests.md` lists all of
them, and a test compares the page with these lists.
"""

import json
import logging
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANKS = 2
BATCHES = 5  # of a rank: with windows of two, the last is short

# -- what is expected -------------------------------------------------------------------------------------------------

DIFFERENT = {
    "trainer_unused_parameters": "stock raises without `find_unused_parameters=True`; gradsync needs no setting",
    "fabric_unused_parameters": "stock raises without `find_unused_parameters=True`; gradsync needs no setting",
    "trainer_unfrozen_parameters": "stock never averages gradients of parameters that were frozen when the model was "
    "wrapped, so replicas drift apart; gradsync averages them",
    "trainer_manual_buffers": "stock stops broadcasting buffers in manual optimization, so BatchNorm's statistics "
    "drift apart; gradsync broadcasts them as in automatic optimization",
    "trainer_communication_hook": "stock ignores communication hooks on CPUs; gradsync uses them",
    "trainer_unknown_argument": "stock raises when the model is wrapped; gradsync when the strategy is created",
}
# A norm is summed share by share where the optimizer is sharded.
CLOSE = {"trainer_clips_norms, sharded", "fabric_clips_norms, sharded"}
# Stock cannot shard optimizers; a strategy of gradsync's with that option is compared with a plain stock run.
SHARDED = {
    *("trainer_trains", "trainer_clips_norms", "trainer_clips_values", "trainer_half_precision", "trainer_checkpoints"),
    *("trainer_checkpoints_from_stock", "trainer_uneven_validation", "trainer_double_precision", "trainer_fits_twice"),
    *("trainer_scheduler", "fabric_trains", "fabric_clips_norms", "fabric_clips_values", "fabric_checkpoints"),
    *("fabric_checkpoints_from_stock", "fabric_separate_setup"),
}

# -- what is trained --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One of the strategies that are compared."""

    kind: str

    def trainer_strategy(self, **options: Any) -> Any:
        import pytorch_lightning as pl

        if self.kind == "stock":
            return pl.strategies.DDPStrategy(**options)
        from gradsync.lightning import GradsyncStrategy

        return GradsyncStrategy(**self._sharding, **options)

    def fabric_strategy(self, **options: Any) -> Any:
        if self.kind == "stock":
            from lightning_fabric.strategies import DDPStrategy

            return DDPStrategy(**options)
        from gradsync.lightning import GradsyncFabricStrategy

        return GradsyncFabricStrategy(**self._sharding, **options)

    @property
    def _sharding(self) -> dict[str, Any]:
        return {"shard_optimizer": True} if self.kind == "sharded" else {}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def dataset() -> TensorDataset:
    inputs = torch.randn(RANKS * BATCHES * 3, 4, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def loader() -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=3)


def uneven_loader() -> DataLoader[Any]:
    """Two batches on rank 0, four on rank 1."""
    return DataLoader(torch.utils.data.Subset(dataset(), range(6 * (1 + dist.get_rank()))), batch_size=3)


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def replicas_agree(module: nn.Module) -> bool:
    return same_on_all_ranks(module.parameters())


def same_on_all_ranks(tensors: Iterable[torch.Tensor]) -> bool:
    mine = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    all_of_them = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(each, mine) for each in all_of_them)


def regression() -> Any:
    import pytorch_lightning as pl

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.seen: list[Any] = []

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.network(batch[0]), batch[1])
            self.log("loss", loss)
            self.seen.append(loss.detach().clone())
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("validation", nn.functional.mse_loss(self.network(batch[0]), batch[1]), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: Any, number: int) -> Any:
            return self.network(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.02)

    return Regression


def trainer(way: Way, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    import pytorch_lightning as pl

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "max_epochs": 2, "num_sanity_val_steps": 0}
    strategy = way.trainer_strategy(**options or {})
    return pl.Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, **quiet | settings)


def fit(way: Way, module: Any = None, options: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Train, and return what came of it."""
    module, training = module or regression()(), trainer(way, options, **settings)
    training.fit(module, loader())
    return {**values(module), "steps": training.global_step, "replicas agree": replicas_agree(module)}


def shared_folder() -> Path:
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return Path(str(name[0]))


# -- the Trainer ------------------------------------------------------------------------------------------------------


def trainer_strategy_of_the_trainer(way: Way) -> Any:
    import pytorch_lightning as pl

    strategy = trainer(way).strategy
    assert isinstance(strategy, pl.strategies.DDPStrategy)
    names = ("world_size", "global_rank", "local_rank", "num_nodes", "num_processes", "root_device", "is_global_zero")
    return {name: getattr(strategy, name) for name in (*names, "distributed_sampler_kwargs", "parallel_devices")}


def trainer_trains(way: Way) -> Any:
    return [fit(way, accumulate_grad_batches=count) for count in (1, 2, 4)]


def counting_hook(counts: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket, and count it."""
    counts[-1] += 1
    work = dist.all_reduce(bucket.buffer().div_(RANKS), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def trainer_synchronizes_once_per_window(way: Way) -> Any:
    """How many buckets are sent in each of the batches; the model is one bucket."""
    counts: list[int] = []

    class Counted(regression()):  # type: ignore[misc]
        def on_train_start(self) -> None:
            self.trainer.strategy.model.register_comm_hook(counts, counting_hook)

        def on_train_batch_start(self, batch: Any, number: int) -> None:
            counts.append(0)

    result = fit(way, Counted(), accumulate_grad_batches=2, max_epochs=1)
    assert counts == [0, 1, 0, 1, 1], counts
    return {**result, "counts": counts}


def trainer_clips_norms(way: Way) -> Any:
    return fit(way, gradient_clip_val=0.1, accumulate_grad_batches=2)


def trainer_clips_values(way: Way) -> Any:
    return fit(way, gradient_clip_val=0.01, gradient_clip_algorithm="value")


def trainer_half_precision(way: Way) -> Any:
    return fit(way, precision="bf16-mixed")


def trainer_scaled_half_precision(way: Way) -> Any:
    from pytorch_lightning.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32)
    training = fit(way, plugins=MixedPrecision("16-mixed", "cpu", scaler), gradient_clip_val=0.1, max_epochs=4)
    return {**training, "scale": scaler.get_scale()}


def trainer_double_precision(way: Way) -> Any:
    return fit(way, precision="64-true")


def trainer_uneven_validation(way: Way) -> Any:
    module, training = regression()(), trainer(way, use_distributed_sampler=False)
    training.fit(module, DataLoader(dataset(), batch_size=3, sampler=DistributedSampler(dataset())), uneven_loader())
    return {**values(module), "loss": training.callback_metrics["validation"], "agree": replicas_agree(module)}


def with_unused(way: Way, **options: Any) -> Any:
    module = regression()()
    module.unused = nn.Linear(2, 2)
    return fit(way, module, options)


trainer_unused_parameters = with_unused
trainer_unused_parameters_found = partial(with_unused, find_unused_parameters=True)


def trainer_static_graph(way: Way) -> Any:
    return fit(way, options={"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1})


def trainer_unfrozen_parameters(way: Way) -> Any:
    class Unfreezing(regression()):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            self.network[0].requires_grad_(self.current_epoch > 0)

    module = Unfreezing()
    module.network[0].requires_grad_(False)
    result = fit(way, module)
    assert result["replicas agree"]
    return result


def gan() -> Any:
    import pytorch_lightning as pl

    class Gan(pl.LightningModule):
        """Two networks and two optimizers; the first micro-batch of each pair is not synchronized."""

        def __init__(self, *, accumulates: bool) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.automatic_optimization = False
            self.accumulates = accumulates
            self.generator, self.discriminator = (
                nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, 1)) for inputs in (4, 1)
            )

        def training_step(self, batch: Any, number: int) -> None:
            one, other = self.optimizers()
            ends = number % 2 == 1 or not self.accumulates
            wanted = torch.ones(len(batch[0]), 1)
            judge = nn.functional.binary_cross_entropy_with_logits
            with one.toggle_model(sync_grad=ends):
                self.manual_backward(judge(self.discriminator(self.generator(batch[0])), wanted))
                if ends:
                    one.step()
                    one.zero_grad()
            with other.toggle_model(sync_grad=ends):
                self.manual_backward(
                    judge(self.discriminator(batch[1]), wanted)
                    + judge(self.discriminator(self.generator(batch[0]).detach()), 0 * wanted)
                )
                if ends:
                    other.step()
                    other.zero_grad()

        def configure_optimizers(self) -> Any:
            pairs = zip((self.generator, self.discriminator), (0.02, 0.01), strict=True)
            return [torch.optim.AdamW(each.parameters(), lr=rate) for each, rate in pairs]

    return Gan


def trainer_manual_optimization(way: Way) -> Any:
    return fit(way, gan()(accumulates=False), {"find_unused_parameters": True})


def trainer_manual_accumulation(way: Way) -> Any:
    return fit(way, gan()(accumulates=True), {"find_unused_parameters": True})


def trainer_manual_buffers(way: Way) -> Any:
    """The statistics of BatchNorm, which a forward begins with."""
    agreed: list[bool] = []

    class Manual(regression()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, number: int) -> None:
            agreed.append(same_on_all_ranks(self.buffers()))
            self.manual_backward(super().training_step(batch, number))
            self.optimizers().step()
            self.optimizers().zero_grad()

    fit(way, Manual(), max_epochs=1)
    assert agreed == [True] * BATCHES


def trainer_closure_runs_several_times(way: Way) -> Any:
    class ByLbfgs(regression()):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    return fit(way, ByLbfgs())


def trainer_scheduler(way: Way) -> Any:
    rates: list[float] = []

    class Scheduled(regression()):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_end(self, *_: Any) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])

    module = Scheduled()
    return {**fit(way, module, accumulate_grad_batches=2), "rates": rates, "losses": module.seen}


def trainer_wraps_for_fitting_only(way: Way) -> Any:
    module, training = regression()(), trainer(way, max_epochs=1)
    inside: list[bool] = []
    module.on_validation_start = lambda: inside.append(training.strategy.model is module)
    module.on_train_start = lambda: inside.append(training.strategy.model is module)
    first = training.validate(module, loader(), verbose=False)
    training.fit(module, loader())
    assert inside == [True, False]
    assert training.strategy.model is module
    assert not any(parameter.grad is not None and parameter.grad.isnan().any() for parameter in module.parameters())
    # A rank may go on alone.
    if training.global_rank == 0:
        module.network(torch.ones(2, 4)).sum().backward()
    return [first, training.predict(module, loader())]


def trainer_fits_twice(way: Way) -> Any:
    module, training = regression()(), trainer(way, max_epochs=1)
    training.fit(module, loader())
    training.fit_loop.max_epochs = 2
    training.fit(module, loader())
    tested = training.test(module, loader(), verbose=False)
    return {**values(module), "tested": tested}


def trainer_checkpoints(way: Way, *, first: Way | None = None, second: Way | None = None) -> Any:
    """Saved by one strategy, after an epoch; continued by stock."""
    path = shared_folder() / "one.ckpt"
    saving = trainer(first or way, max_epochs=1)
    saving.fit(regression()(), loader())
    saving.save_checkpoint(path)
    module, training = regression()(), trainer(second or Way("stock"), max_epochs=2)
    training.fit(module, loader(), ckpt_path=path)
    whole = torch.load(path, weights_only=False)
    alone = regression()()
    alone.load_state_dict(whole["state_dict"])
    return {**values(module), "saved": whole["state_dict"], "optimizer": whole["optimizer_states"][0]["state"]}


def trainer_checkpoints_from_stock(way: Way) -> Any:
    return trainer_checkpoints(way, first=Way("stock"), second=way)


def trainer_collectives(way: Way) -> Any:
    training = trainer(way)
    strategy, mine = training.strategy, torch.tensor([1.0 + training.global_rank])
    strategy.barrier()
    return {
        "mean": strategy.reduce(mine.clone()),
        "sum": strategy.reduce(mine.clone(), reduce_op="sum"),
        "gathered": strategy.all_gather(mine),
        "broadcast": strategy.broadcast({"rank": training.global_rank}),
        "all": strategy.reduce_boolean_decision(training.global_rank == 0),
        "any": strategy.reduce_boolean_decision(training.global_rank == 0, all=False),
    }


def trainer_communication_hook(way: Way) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper

    counts = [0]
    options = {"ddp_comm_state": counts, "ddp_comm_hook": counting_hook, "ddp_comm_wrapper": bf16_compress_wrapper}
    result = fit(way, options=options, max_epochs=1)
    assert result["replicas agree"]
    assert counts == [BATCHES]
    return result


def trainer_unknown_argument(way: Way) -> Any:
    way.trainer_strategy(find_unused_parametres=True)


# -- Fabric -----------------------------------------------------------------------------------------------------------


def fabric(way: Way, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    from lightning_fabric import Fabric

    made = Fabric(accelerator="cpu", devices=RANKS, strategy=way.fabric_strategy(**options or {}), **settings)
    made.launch()
    return made


def loop(
    made: Any, model: Any, optimizer: Any, window: int = 1, *, epochs: int = 2, clip: dict[str, Any] | None = None
) -> None:
    batches = made.setup_dataloaders(loader())
    for _ in range(epochs):
        for number, (inputs, targets) in enumerate(batches, start=1):
            ends = number % window == 0 or number == len(batches)
            with made.no_backward_sync(model, enabled=not ends):
                made.backward(nn.functional.mse_loss(model(inputs), targets) / window)
            if ends:
                if clip:
                    made.clip_gradients(model, optimizer, **clip)
                optimizer.step()
                optimizer.zero_grad()


def train(way: Way, window: int = 1, clip: Any = None, options: Any = None, **settings: Any) -> dict[str, Any]:
    made, plain = fabric(way, options, **settings), network()
    model, optimizer = made.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.02))
    loop(made, model, optimizer, window, clip=clip)
    assert list(model.state_dict()) == list(plain.state_dict())
    return {**values(model), "replicas agree": replicas_agree(plain)}


def fabric_strategy_of_fabric(way: Way) -> Any:
    from lightning_fabric.strategies import DDPStrategy

    made = fabric(way)
    assert isinstance(made.strategy, DDPStrategy)
    names = ("world_size", "global_rank", "local_rank", "node_rank", "is_global_zero", "device")
    return {name: getattr(made, name) for name in names} | made.strategy.distributed_sampler_kwargs


def fabric_trains(way: Way) -> Any:
    return [train(way, window) for window in (1, 2, 4)]


def fabric_synchronizes_once_per_window(way: Way) -> Any:
    made, plain = fabric(way), network()
    model, optimizer = made.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.02))
    counts = [0]
    model._forward_module.register_comm_hook(counts, counting_hook)
    loop(made, model, optimizer, 2, epochs=1)
    assert counts == [3]
    return values(plain)


def fabric_blocks_only_what_it_wrapped(way: Way) -> Any:
    try:
        with fabric(way).strategy._backward_sync_control.no_backward_sync(nn.Linear(1, 1), enabled=True):
            return "nothing raised"
    except TypeError:
        return "raised"


def fabric_clips_norms(way: Way) -> Any:
    return train(way, 2, {"max_norm": 0.1})


def fabric_clips_values(way: Way) -> Any:
    return train(way, clip={"clip_val": 0.01})


def fabric_half_precision(way: Way) -> Any:
    return train(way, precision="bf16-mixed")


def fabric_double_precision(way: Way) -> Any:
    made, plain = fabric(way, precision="64-true"), network()
    model, optimizer = made.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.02))
    for inputs, targets in made.setup_dataloaders(loader()):
        made.backward(nn.functional.mse_loss(model(inputs.double()), targets.double()))
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def fabric_unused_parameters(way: Way, **options: Any) -> Any:
    made = fabric(way, options)
    plain = nn.ModuleDict({"used": nn.Linear(4, 1), "unused": nn.Linear(2, 2)})
    plain.forward = lambda inputs: plain["used"](inputs)
    model, optimizer = made.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.02))
    loop(made, model, optimizer, epochs=1)


fabric_unused_parameters_found = partial(fabric_unused_parameters, find_unused_parameters=True)


def fabric_separate_setup(way: Way) -> Any:
    made, plain = fabric(way), network()
    model = made.setup_module(plain)
    optimizer = made.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.02))
    loop(made, model, optimizer)
    return values(plain)


def fabric_two_models(way: Way) -> Any:
    """A generator, trained through a discriminator."""
    made, generator, judge = fabric(way), network(), nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    made_of = nn.functional.binary_cross_entropy_with_logits
    one, first = made.setup(generator, torch.optim.AdamW(generator.parameters(), lr=0.02))
    other, second = made.setup(judge, torch.optim.AdamW(judge.parameters(), lr=0.01))
    for inputs, targets in made.setup_dataloaders(loader()):
        real = torch.ones(len(inputs), 1)
        made.backward(made_of(other(one(inputs)), real))
        first.step()
        first.zero_grad()
        second.zero_grad()
        made.backward(made_of(other(targets), real) + made_of(other(one(inputs).detach()), 0 * real))
        second.step()
        second.zero_grad()
    return {**values(generator), **{f"judge {name}": value for name, value in values(judge).items()}}


def fabric_two_backwards_per_window(way: Way) -> Any:
    """As in a DCGAN: one backward for real and one for made images, and a step on the sum."""
    made, generator, judge = fabric(way), network(), nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    loss = nn.functional.binary_cross_entropy_with_logits
    one, first = made.setup(generator, torch.optim.AdamW(generator.parameters(), lr=0.02))
    other, second = made.setup(judge, torch.optim.AdamW(judge.parameters(), lr=0.01))
    for inputs, targets in made.setup_dataloaders(loader()):
        real, fake = torch.ones(len(inputs), 1), one(inputs)
        second.zero_grad()
        made.backward(loss(other(targets), real))
        made.backward(loss(other(fake.detach()), 0 * real))
        second.step()
        first.zero_grad()
        made.backward(loss(other(fake), real))
        first.step()
    return {**values(generator), **{f"judge {name}": value for name, value in values(judge).items()}}


def fabric_forward_methods(way: Way) -> Any:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.network(inputs), targets)

    made, plain = fabric(way), Named()
    model, optimizer = made.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.02))
    model.mark_forward_method("loss")
    for batch in made.setup_dataloaders(loader()):
        made.backward(model.loss(*batch))
        optimizer.step()
        optimizer.zero_grad()
    return {**values(plain), "replicas agree": replicas_agree(plain)}


def fabric_uneven_evaluation(way: Way) -> Any:
    made, plain = fabric(way), network()
    model, optimizer = made.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.02))
    losses = []
    for _ in range(2):
        loop(made, model, optimizer, epochs=1)
        model.eval()
        with torch.no_grad():
            losses += [nn.functional.mse_loss(model(inputs), targets) for inputs, targets in uneven_loader()]
        model.train()
    return {**values(plain), "losses": losses}


def fabric_checkpoints(way: Way, *, first: Way | None = None, second: Way | None = None) -> Any:
    path = shared_folder() / "one.ckpt"
    for one, epochs in ((first or way, 1), (second or Way("stock"), 1)):
        made, plain = fabric(one), network()
        model, optimizer = made.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.02))
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        if path.exists():
            made.load(path, state)
            assert state["epoch"] == 1
        loop(made, model, optimizer, epochs=epochs)
        made.save(path, {**state, "epoch": 1})
        made.barrier()
    whole = torch.load(path, weights_only=False)
    network().load_state_dict(whole["model"])
    return {**values(plain), "optimizer": whole["optimizer"]["state"]}


def fabric_checkpoints_from_stock(way: Way) -> Any:
    return fabric_checkpoints(way, first=Way("stock"), second=way)


def fabric_collectives(way: Way) -> Any:
    made = fabric(way)
    mine = torch.tensor([1.0 + made.global_rank])
    made.barrier()
    return {
        "mean": made.all_reduce(mine.clone()),
        "sum": made.all_reduce(mine.clone(), reduce_op="sum"),
        "gathered": made.all_gather({"one": mine}),
        "broadcast": made.broadcast({"rank": made.global_rank}),
    }


CHECKS: dict[str, Callable[[Way], Any]] = {
    name: value for name, value in globals().items() if name.startswith(("trainer_", "fabric_")) and callable(value)
}

# -- running them -----------------------------------------------------------------------------------------------------


def compare(expected: Any, found: Any) -> float:
    """The largest difference between two results; infinite where they are not alike."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return float("inf")
        return 0.0 if torch.equal(expected, found) else float((expected - found).abs().max())
    if isinstance(expected, dict) and isinstance(found, dict):
        same = expected.keys() == found.keys()
        return max((compare(expected[name], found[name]) for name in expected), default=0.0) if same else float("inf")
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        same = len(expected) == len(found)
        return max(map(compare, expected, found), default=0.0) if same else float("inf")
    return 0.0 if expected == found else float("inf")


def outcomes(names: list[str], *, verbose: bool) -> Iterator[tuple[str, str, float]]:
    """The name of each check and, where it was not as with stock, what came of it; and the largest difference."""
    for name in names:
        wanted = _run(name, Way("stock"), verbose)
        for kind in ("gradsync", *(["sharded"] if name in SHARDED else [])):
            found = _run(name, Way(kind), verbose)
            label = name if kind == "gradsync" else f"{name}, sharded"
            if isinstance(wanted, Exception) or isinstance(found, Exception):
                yield label, f"stock: {_told(wanted)}; gradsync: {_told(found)}", 0.0
                continue
            difference = compare(wanted, found)
            yield label, "" if difference == 0.0 else f"differs by {difference}", difference


def _run(name: str, way: Way, verbose: bool) -> Any:
    try:
        result = CHECKS[name](way)
    except Exception as error:
        if verbose:
            traceback.print_exc()
        result = error
    # Nobody goes on while another still trains.
    dist.barrier()
    return result


def _told(result: Any) -> str:
    return f"{type(result).__name__}" if isinstance(result, Exception) else "passes"


def main(words: list[str], out: str | None = None) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    chosen = [name for name in CHECKS if not words or any(word in name for word in words)]
    found: dict[str, list[Any]] = {}
    for name, told, difference in outcomes(chosen, verbose=bool(words)):
        found[name] = [told, difference]
        if dist.get_rank() == 0:
            print(f"{name:50} {told or 'same bits'}", flush=True)
    if out is not None:
        Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[2:], sys.argv[1])
