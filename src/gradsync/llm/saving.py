"""What a run must remember to go on bit for bit, and what it says when it goes on differently."""

import dataclasses
import random
from typing import Any, Protocol

import torch
from torch import nn

from gradsync.accelerator import Accelerator
from gradsync.checkpoint import CheckpointFolder, Loaded, rng_state, set_rng_state
from gradsync.engine.synchronizer import Synchronizer
from gradsync.errors import ConfigurationError
from gradsync.llm.batches import BatchPlan
from gradsync.llm.settings import TrainSettings

__all__ = ["Saveable", "Saving"]

# What may not differ between a checkpoint and the run that goes on from it.
FIXED = ("model", "data", "tokenizer", "sequence_length", "seed", "precision")
# What may, but changes the numbers.
TOLD = ("micro_batch", "grad_accum", "learning_rate", "warmup", "weight_decay", "clip", "steps", "epochs", "reduction")


class Saveable(Protocol):
    """The trainer, as seen from here."""

    step: int
    plan: BatchPlan
    optimizer: Any
    scheduler: Any
    settings: TrainSettings

    @property
    def plain_model(self) -> nn.Module:
        """The model without a wrapper."""

    @property
    def engine(self) -> Synchronizer:
        """What averages its gradients."""


class Saving:
    """The checkpoints of one run, in ``checkpoints`` inside its folder."""

    def __init__(self, settings: TrainSettings, accelerator: Accelerator) -> None:
        self._settings = settings
        self._accelerator = accelerator
        self._folder = CheckpointFolder(
            settings.run_folder / "checkpoints", accelerator.world.communicator, keep=settings.keep
        )
        self.loaded: Loaded | None = self._folder.load() if settings.resume else None
        self.latest: int | None = None if self.loaded is None else self.loaded.step

    def adopt(self, plan: BatchPlan) -> tuple[BatchPlan, list[str]]:
        """The plan to train by, and what is to be said about it: a resumed run keeps its global batch."""
        if self.loaded is None:
            if self._settings.resume:
                return plan, ["nothing to resume from: the run begins at its first step"]
            return plan, []
        facts = self.loaded.facts
        self._require_same(facts["settings"])
        notes = [*self.loaded.notes, f"resumed from step {self.loaded.step}"]
        ranks = self._accelerator.num_processes
        if ranks != self.loaded.world_size:
            notes.append(
                f"the checkpoint was written by {self.loaded.world_size} ranks, this run has {ranks}: windows keep "
                f"their {facts['global_batch']} sequences, each rank takes another share of them, and random numbers "
                "of dropout differ"
            )
        for name in TOLD:
            before, now = facts["settings"].get(name), self._settings.as_json()[name]
            if before != now and not (name in ("grad_accum",) and ranks != self.loaded.world_size):
                notes.append(f"--{name.replace('_', '-')} was {before} and is {now} now")
        if plan.global_batch != facts["global_batch"]:
            if ranks == self.loaded.world_size:
                return plan, notes
            plan = dataclasses.replace(plan, global_batch=facts["global_batch"])
        return plan, notes

    def _require_same(self, before: dict[str, Any]) -> None:
        now = self._settings.as_json()
        for name in FIXED:
            if before.get(name) != now[name]:
                raise ConfigurationError(
                    f"the checkpoint in {self._settings.run_folder} is of a run with --{name.replace('_', '-')} "
                    f"{before.get(name)}, and this one has {now[name]}. Resume with the former value, or choose "
                    "another --run-folder"
                )

    def restore(self, trainer: Saveable) -> int:
        """Bring everything into the state of the checkpoint; returns its step, or 0."""
        loaded = self.loaded
        if loaded is None:
            _draw_anew(trainer.settings.seed, self._accelerator.process_index, 0)
            return 0
        shared = loaded.shared
        try:
            trainer.plain_model.load_state_dict(shared["model"])
        except RuntimeError as error:
            raise ConfigurationError(
                f"the checkpoint {loaded.path.name} holds another model than {trainer.settings.model!r}: "
                f"{str(error).splitlines()[-1].strip()}"
            ) from error
        trainer.optimizer.load_state_dict(shared["optimizer"])
        trainer.scheduler.load_state_dict(shared["scheduler"])
        scaler = self._accelerator.precision.scaler
        if scaler is not None and shared.get("scaler") is not None:
            scaler.load_state_dict(shared["scaler"])
        if loaded.own is not None and loaded.world_size == self._accelerator.num_processes:
            # The layout of the buckets decides in which order numbers are added up.
            trainer.engine.load_state_dict(shared["engine"])
            trainer.engine.load_window_state(loaded.own["window"])
            set_rng_state(loaded.own["rng"])
        else:
            _draw_anew(trainer.settings.seed, self._accelerator.process_index, loaded.step)
        step: int = loaded.step
        return step

    def save(self, trainer: Saveable) -> None:
        """Write a checkpoint of the state between two steps. Collective."""
        scaler = self._accelerator.precision.scaler
        shared = {
            "model": trainer.plain_model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "engine": trainer.engine.state_dict(),
        }
        facts = {
            "settings": trainer.settings.as_json(),
            "global_batch": trainer.plan.global_batch,
            "torch": torch.__version__,
        }
        own = {"rng": rng_state(), "window": trainer.engine.window_state()}
        self._folder.save(trainer.step, shared=shared, own=own, facts=facts)
        self.latest = trainer.step


def _draw_anew(seed: int, rank: int, step: int) -> None:
    """Other numbers on every rank, the same ones whenever this step is resumed on this rank."""
    torch.manual_seed(seed + 7919 * (rank + 1) + step)
    random.seed(seed + 7919 * (rank + 1) + step)
