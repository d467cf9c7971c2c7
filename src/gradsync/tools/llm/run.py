"""One rank of a training run, from the settings to the exit code."""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gradsync.accelerator import Accelerator
from gradsync.base.errors import GradsyncError
from gradsync.communicator.agreement import gather_bytes, together
from gradsync.health.elastic import Elastic, Generation
from gradsync.observe.metrics import LOST
from gradsync.observe.recording import Recorder
from gradsync.observe.recording.files import FOLDER as RECORDING
from gradsync.observe.recording.files import file_name, lines_of, write_lines
from gradsync.tools.llm.recording import RunRecorder
from gradsync.tools.llm.run_folder import SUMMARY, RunFolder, read_json
from gradsync.tools.llm.settings import TrainSettings
from gradsync.tools.llm.tokens import prepare_tokens
from gradsync.tools.llm.trainer import Interruption, Listener, Trainer, TrainingOutcome, make_accelerator

__all__ = ["run", "run_elastic"]

T = TypeVar("T")

# Steps that a rank sends whose disk rank 0 does not see.
SENT = 100


def run(settings: TrainSettings, *, cpu: bool = False) -> TrainingOutcome:
    """Train on this rank. Rank 0 shows and records; all ranks return the same outcome."""
    recorder = Recorder(settings.run_folder / RECORDING)
    accelerator = make_accelerator(settings, recorder, cpu=cpu)
    try:
        # Rank 0 may have to build the token file; the others find it there.
        _on_main(accelerator, lambda: prepare_tokens(settings.data, tokenizer=settings.tokenizer))
        tokens = prepare_tokens(settings.data, tokenizer=settings.tokenizer)
        place, resumes = settings.run_folder, settings.resume
        folder = _on_main(accelerator, lambda: RunFolder(place, resume=resumes))
        # What an earlier life of the run has recorded may be of other ranks.
        _on_main(accelerator, lambda: shutil.rmtree(place / RECORDING, ignore_errors=True))
        trainer = Trainer(settings, accelerator, recorder, tokens)
        recording = None if folder is None else RunRecorder(folder)
        outcome = trainer.run(recording)
        recorder.close()
        _bring_together(accelerator, recorder, settings.run_folder / RECORDING)
    finally:
        accelerator.world.close()
    # Charts take seconds, for which nobody has to wait, or to wonder what rank 0 is doing.
    if recording is not None:
        recording.close(outcome)
    return outcome


def _bring_together(accelerator: Accelerator, recorder: Recorder, folder: Path) -> None:
    """Rank 0 gets the last steps of ranks whose disk it does not see. Collective."""
    communicator = accelerator.world.communicator
    # All have written by now, and rank 0 says what it misses; mostly nothing, and nothing is sent.
    gather_bytes(communicator, b"")
    paths = [folder / file_name(rank, 0) for rank in range(accelerator.num_processes)]
    missing = bytes(not path.exists() for path in paths) if accelerator.is_main_process else b""
    wanted = gather_bytes(communicator, missing)[0][accelerator.process_index]
    kept = recorder.recording if wanted else None
    mine = "" if kept is None else "\n".join(lines_of(replace(kept, steps=kept.steps[-SENT:])))
    for path, text in zip(paths, gather_bytes(communicator, mine.encode()), strict=True):
        if text and accelerator.is_main_process:
            with contextlib.suppress(OSError):
                write_lines(path, [text.decode()])


def _on_main(accelerator: Accelerator, function: Callable[[], T]) -> T | None:
    """What ``function`` returns, on rank 0; None elsewhere. If it raises there, every rank raises. Collective."""
    result, _ = together(
        accelerator.world.communicator,
        "prepare the run",
        lambda: (function() if accelerator.is_main_process else None, None),
    )
    return result


class ElasticTrainer(Trainer):
    """One run on this rank, on whatever ranks there are."""

    _recording: RunRecorder | None = None
    _former: frozenset[str] = frozenset()

    @property
    def planned_ranks(self) -> int:
        """How many ranks the launcher says, and not those that are there by chance when a rank begins."""
        return self.accelerator.environment.world_size

    def run(self, listener: Listener | None = None) -> TrainingOutcome:
        """Train as the base class does. Rank 0 of each generation records into the run's folder."""
        elastic = self.accelerator.elastic
        elastic.step = self.step
        elastic.before_meeting(self._before_meeting)
        elastic.on_meeting(self._go_on_with)
        with self._metrics:
            signal = self._train()
            outcome: TrainingOutcome = elastic.redone(lambda: self._conclude(signal))
        if self._recording is not None:
            self._recording.close(outcome)
        return outcome

    def _conclude(self, signal: int) -> TrainingOutcome:
        self._save()
        return super()._conclude(signal)

    def _train(self) -> int:
        elastic, signal = self.accelerator.elastic, 0
        with Interruption() as interruption:
            for attempt in elastic.attempts(self.total_steps):
                began_at = elastic.step
                with attempt:
                    signal = self._now_and_then() if began_at > 0 else 0
                    signal = self._train_step(interruption.signal) or signal
                self.step = elastic.step
                if signal and elastic.has_met:
                    break
                signal = 0
        return signal

    def _before_meeting(self) -> None:
        self._records.flush()

    def _go_on_with(self, generation: Generation) -> None:
        """The ranks have agreed on a new generation."""
        self._refuse_finished_run(generation)
        self.step = generation.newest_step
        self.transport = str(self.accelerator.models.attachment_of(self.model).transport)
        self.share_windows()
        self.saving.open()
        if self.accelerator.is_main_process and self._recording is None:
            is_new = generation.number == 1 and not self.settings.resume
            folder = RunFolder(self.settings.run_folder, resume=not is_new)
            self._listener = self._recording = RunRecorder(folder)
            self._recording.began(self, self.notes)
        elif not self.accelerator.is_main_process and self._recording is not None:
            self._recording.hand_over()
            self._listener, self._recording = Listener(), None
        self._records = self._new_records()
        if self._former:
            before, now = len(self._former), len(generation.members)
            self._listener.noted(self.step, f"{now} ranks go on, after {before} (generation {generation.number})")
            self._metrics.count(LOST, len(self._former - generation.identities))
        self._former = generation.identities
        self.open_metrics()

    def _refuse_finished_run(self, generation: Generation) -> None:
        """A rank that was restarted late is alone: the others may have finished without it."""
        summary = read_json(self.settings.run_folder / SUMMARY) if self.settings.resume else None
        if generation.number == 1 and summary is not None and summary.get("step", 0) >= self.total_steps:
            raise GradsyncError(
                f"the run in {self.settings.run_folder} has come to its end at step {summary['step']}: there is "
                "nothing left to do here"
            )


def run_elastic(settings: TrainSettings, *, cpu: bool = False, elastic: Elastic | None = None) -> TrainingOutcome:
    """Train on this rank, with others that come and go."""
    recorder, elastic = Recorder(), elastic or Elastic(min_ranks=settings.min_ranks)
    accelerator = make_accelerator(settings, recorder, cpu=cpu, elastic=elastic)
    try:
        # Every rank by itself: who comes later must not wait for who is training, and the file gets its name complete.
        tokens = prepare_tokens(settings.data, tokenizer=settings.tokenizer)
        return ElasticTrainer(settings, accelerator, recorder, tokens).run()
    finally:
        accelerator.elastic.close()
