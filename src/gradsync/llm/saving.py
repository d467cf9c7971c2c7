"""What a run must remember to go on bit for bit, and what it says when it goes on differently."""

import dataclasses
import random
from typing import Any

import torch

from gradsync.accelerator import Accelerator
from gradsync.accelerator.state_saving import restore_prepared, save_prepared
from gradsync.checkpoint import CheckpointFolder, Loaded
from gradsync.errors import ConfigurationError
from gradsync.llm.batches import BatchPlan
from gradsync.llm.settings import TrainSettings

__all__ = ["Saving"]

# What may not differ between a checkpoint and the run that goes on from it.
FIXED = ("model", "data", "tokenizer", "sequence_length", "seed", "precision")
# What may, but changes the numbers.
TOLD = ("micro_batch", "grad_accum", "learning_rate", "warmup", "weight_decay", "clip", "steps", "epochs", "reduction")


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
            if before != now and not (name == "grad_accum" and ranks != self.loaded.world_size):
                notes.append(f"--{name.replace('_', '-')} was {before} and is {now} now")
        if ranks != self.loaded.world_size:
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

    def restore(self) -> int:
        """Bring everything prepared into the state of the checkpoint; returns its step, or 0."""
        loaded, accelerator = self.loaded, self._accelerator
        step = 0 if loaded is None else loaded.step
        if loaded is None or not restore_prepared(accelerator.prepared, loaded, accelerator.num_processes):
            # Other numbers on every rank, the same ones whenever this step is resumed on this rank.
            seed = self._settings.seed + 7919 * (accelerator.process_index + 1) + step
            torch.manual_seed(seed)
            random.seed(seed)
        return step

    def save(self, step: int, plan: BatchPlan) -> None:
        """Write a checkpoint of the state between two steps. Collective."""
        facts = {
            "settings": self._settings.as_json(),
            "global_batch": plan.global_batch,
            "torch": torch.__version__,
        }
        save_prepared(self._accelerator.prepared, self._folder, step=step, facts=facts)
        self.latest = step
