"""An elastic training run, whose ranks come and go: ``gradsync train --elastic``.

Everything that ranks do together happens in attempts, so that a rank that joins in the middle of the run does the same
as the others from then on: checkpoints and validations run at the beginning of an attempt, for the steps before it. The
rank that is number 0 records; when it is lost, the next one opens the run's folder and continues it.
"""

from gradsync.base.errors import GradsyncError
from gradsync.health.elastic import Elastic, Generation
from gradsync.tools.llm.interruption import Interruption
from gradsync.tools.llm.recording import Recording
from gradsync.tools.llm.run_folder import SUMMARY, RunFolder, read_json
from gradsync.tools.llm.screen import Screen
from gradsync.tools.llm.settings import TrainSettings
from gradsync.tools.llm.tokens import TokenFile, prepare_tokens
from gradsync.tools.llm.trainer import Listener, Outcome, Records, Trainer, make_accelerator

__all__ = ["ElasticTrainer", "run_elastic"]


class ElasticTrainer(Trainer):
    """One run on this rank, on whatever ranks there are."""

    _given: Listener | None = None
    _recording: Recording | None = None
    _is_recording = False
    _ranks_before = 0

    @property
    def planned_ranks(self) -> int:
        """As many as the launcher says: not those that are there by chance when a rank begins."""
        return self.accelerator.environment.world_size

    def run(self, listener: Listener | None = None) -> Outcome:
        """Train to the end, or until somebody is asked to stop; a checkpoint is written in both cases.

        Without a ``listener`` number 0 records into the run's folder.
        """
        elastic = self.accelerator.elastic
        elastic.step = self.step
        self._given = listener
        elastic.before_meeting(lambda: self._records.learn(self._heartbeat.read(), everything=True))
        elastic.on_meeting(self._go_on_with)
        signal = self._train()
        outcome: Outcome = elastic.redone(lambda: self._end(signal))
        if self._recording is not None:
            self._recording.close(outcome)
        return outcome

    def _end(self, signal: int) -> Outcome:
        self._save()
        return self._conclude(signal)

    def _train(self) -> int:
        elastic, signal = self.accelerator.elastic, 0
        with Interruption() as interruption:
            for attempt in elastic.attempts(self.total_steps):
                began_at = elastic.step
                with attempt:
                    signal = self._now_and_then(self._records) if began_at > 0 else 0
                    pulse = self._train_step(interruption.signal, self._records)
                    self._records.learn(pulse)
                    signal = signal or (0 if pulse is None else pulse.signal)
                self.step = elastic.step
                if signal and elastic.has_met:
                    break
                signal = 0
        return signal

    def _go_on_with(self, generation: Generation) -> None:
        """The ranks have met anew."""
        self._refuse_what_is_done(generation)
        self.step = generation.newest_step
        self._wire = str(self.accelerator.models.attachment_of(self.model).wire)
        self.deal()
        self.saving.go_on_with_others()
        # What the wire still owed of the steps before is lost with it.
        self.phases.take()
        if self.accelerator.is_main_process:
            self._record(generation)
        else:
            self._hand_over()
        self._records = Records(self, self._listener)
        if self._ranks_before:
            before, now = self._ranks_before, len(generation.members)
            self._listener.noted(self.step, f"{now} ranks go on, after {before} (generation {generation.number})")
        self._ranks_before = len(generation.members)

    def _refuse_what_is_done(self, generation: Generation) -> None:
        """A rank that was started again late finds nobody: the others may have come to the end without it."""
        summary = read_json(self.settings.run_folder / SUMMARY) if self.settings.resume else None
        if generation.number == 1 and summary is not None and summary.get("step", 0) >= self.total_steps:
            raise GradsyncError(
                f"the run in {self.settings.run_folder} has come to its end at step {summary['step']}: there is "
                "nothing left to do here"
            )

    def _record(self, generation: Generation) -> None:
        if self._is_recording:
            return
        self._is_recording = True
        if self._given is None:
            is_new = generation.number == 1 and not self.settings.resume
            folder = RunFolder(self.settings.run_folder, resume=not is_new, tensorboard=self.settings.tensorboard)
            self._recording = Recording(folder, Screen())
        self._listener = self._given or self._recording or Listener()
        self._listener.began(self, self.notes)

    def _hand_over(self) -> None:
        if self._recording is not None:
            self._recording.hand_over()
            self._recording = None
        self._listener, self._is_recording = Listener(), False


def run_elastic(settings: TrainSettings, *, cpu: bool = False, elastic: Elastic | None = None) -> Outcome:
    """Train on this rank, with others that come and go."""
    chosen = elastic or Elastic(min_ranks=settings.min_ranks)
    accelerator, timeline = make_accelerator(settings, cpu=cpu, elastic=chosen)
    try:
        # Every rank by itself: who comes later must not wait for who is training, and the file gets its name complete.
        tokens: TokenFile = prepare_tokens(settings.data, tokenizer=settings.tokenizer)
        return ElasticTrainer(settings, accelerator, timeline, tokens).run()
    finally:
        accelerator.elastic.close()
