"""The state a run needs to resume bit for bit, and the message when it resumes differently."""

import dataclasses
import random

import torch

from gradsync.accelerator import Accelerator
from gradsync.accelerator.prepared_state import restore_prepared, save_prepared
from gradsync.base.errors import ConfigurationError
from gradsync.checkpoint import CheckpointFolder, Loaded
from gradsync.tools.llm.batches import BatchPlan
from gradsync.tools.llm.settings import TrainSettings, option_of

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
        self._folder = self._open()
        self.loaded: Loaded | None = self._folder.load() if settings.resume else None
        self.latest: int | None = None if self.loaded is None else self.loaded.step

    def _open(self) -> CheckpointFolder:
        return CheckpointFolder(
            self._settings.run_folder / "checkpoints", self._accelerator.world.communicator, keep=self._settings.keep
        )

    def go_on_with_others(self) -> None:
        """The accelerator has other ranks now."""
        self._folder = self._open()

    def adopt(self, plan: BatchPlan, ranks: int) -> tuple[BatchPlan, list[str]]:
        """The plan to train by on so many ranks, and what is to be said about it: a resumed run keeps its global
        batch."""
        if self.loaded is None:
            if self._settings.resume:
                return plan, ["nothing to resume from: the run begins at its first step"]
            return plan, []
        loaded = self.loaded
        before, now, global_batch = loaded.facts["settings"], self._settings.as_json(), loaded.facts["global_batch"]
        other = [name for name in FIXED + TOLD if before.get(name) != now[name]]
        for name in other:
            if name in FIXED:
                raise ConfigurationError(
                    f"the checkpoint in {self._settings.run_folder} is of a run with {option_of(name)} "
                    f"{before.get(name)}, and this one has {now[name]}. Resume with the former value, or choose "
                    "another --run-folder"
                )
        notes = [*loaded.notes, f"resumed from step {loaded.step}"]
        if ranks != loaded.world_size:
            notes.append(
                f"the checkpoint was written by {loaded.world_size} ranks, this run has {ranks}: windows keep their "
                f"{global_batch} sequences, each rank takes another share of them, and random numbers of dropout differ"
            )
            plan = dataclasses.replace(plan, global_batch=global_batch)
            other = [name for name in other if name != "grad_accum"]
        return plan, notes + [f"{option_of(name)} was {before.get(name)} and is {now[name]} now" for name in other]

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
        settings = self._settings.as_json()
        facts = {"settings": settings, "global_batch": plan.global_batch, "torch": torch.__version__}
        save_prepared(self._accelerator.prepared, self._folder, step=step, facts=facts)
        self.latest = step
