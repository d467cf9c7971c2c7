"""Records what a run does: metrics as they arrive, a summary and a report at the end. Rank 0 only."""

import json
import platform
import resource
import shlex
from pathlib import Path
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.health.watch import straggling
from gradsync.observe.explain import Explanation
from gradsync.observe.timeline import StepTimes
from gradsync.tools.llm.explained import explain_run
from gradsync.tools.llm.report import write_report
from gradsync.tools.llm.run_folder import RunFolder
from gradsync.tools.llm.screen import Screen
from gradsync.tools.llm.trainer import Listener, Outcome, StepRecord, Trainer

__all__ = ["Recording"]


class Recording(Listener):
    """Hears of the run, passes everything on to the screen, and keeps it in the run folder."""

    def __init__(self, folder: RunFolder, screen: Screen) -> None:
        self._folder = folder
        self._screen = screen
        self._timeline_due = 1
        self._noted = 0

    def began(self, trainer: Trainer, notes: list[str]) -> None:
        self._timeline_due = trainer.step + 3
        self._folder.rewind(trainer.step)
        self._folder.write_config(_config(trainer))
        for note in notes:
            self._folder.note(trainer.step, note)
        self._screen.began(trainer, notes)

    def stepped(self, record: StepRecord) -> None:
        fields = {name: value for name, value in vars(record).items() if name != "timeline"}
        self._folder.append({"kind": "step", **fields})
        if record.timeline is not None and record.step >= self._timeline_due:
            # A few over the run, more and more apart: the last one is the one the report draws.
            self._timeline_due = 2 * record.step
            self._folder.append({"kind": "timeline", "step": record.step, **_buckets(record.timeline)})
        self._note_what_is_slow(record.step)
        self._screen.stepped(record)

    def _note_what_is_slow(self, step: int) -> None:
        # The watch has put it on the screen when it found it.
        for words in straggling()[self._noted :]:
            self._noted += 1
            self._folder.note(step, words)

    def validated(self, step: int, loss: float) -> None:
        self._folder.append({"kind": "validation", "step": step, "loss": loss})
        self._screen.validated(step, loss)

    def saved(self, step: int) -> None:
        self._screen.saved(step)

    def noted(self, step: int, text: str) -> None:
        self._folder.note(step, text)
        self._screen.noted(step, text)

    def hand_over(self) -> None:
        """Another rank records from here on."""
        self._folder.close()
        self._screen.stop()

    def close(self, outcome: Outcome) -> None:
        """The run is over: summary, report, and the table on the screen."""
        self._note_what_is_slow(outcome.step)
        if outcome.signal:
            self._folder.note(outcome.step, f"stopped by signal {outcome.signal}")
        explanation = explain_run(self._folder.path)
        self._folder.write_summary(self._summary(outcome, explanation))
        self._folder.close()
        try:
            # Whoever asks for an end wants it now; charts take seconds.
            report = _later(self._folder.path) if outcome.signal else str(write_report(self._folder.path))
        except ConfigurationError as error:
            # The run is over, and all of it is on disk: nothing is lost that a page written later would not show.
            report = f"none: {error}"
        self._screen.summarize(outcome, report, explanation)

    def _summary(self, outcome: Outcome, explanation: Explanation | None) -> dict[str, Any]:
        screen = self._screen
        return {
            "step": outcome.step,
            "signal": outcome.signal,
            "seconds": screen.elapsed,
            "first_loss": screen.first_loss,
            "final_loss": screen.last_loss,
            "validation_loss": outcome.validation_loss,
            "tokens_per_second": screen.speed,
            "shares": screen.shares,
            "split": None if explanation is None else dict(explanation.parts()),
            "advice": None if explanation is None else [advice.cause for advice in explanation.advice],
            "replicas_equal": outcome.proof.equal,
            "digest": outcome.proof.digests[0],
            "peak_memory_bytes": _peak_memory(),
        }


def _later(folder: Path) -> str:
    call = f"from gradsync.tools.llm.report import write_report; write_report({json.dumps(str(folder))})"
    return f"not drawn, as the run was ended early. Go on with --resume, or draw it: python -c {shlex.quote(call)}"


def _config(trainer: Trainer) -> dict[str, Any]:
    accelerator = trainer.accelerator
    return {
        **trainer.settings.as_json(),
        "ranks": accelerator.num_processes,
        "device": str(accelerator.device),
        "global_batch": trainer.plan.global_batch,
        "total_steps": trainer.total_steps,
        "parameters": trainer.plain_model.parameter_count,
        "data_description": trainer.data_description,
        "wire": trainer.wire,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _buckets(step: StepTimes) -> dict[str, Any]:
    return {
        "backward": [0.0, step.backward_end],
        "buckets": [
            {
                "bucket": times.index,
                "ready": times.ready,
                "start": times.start,
                "finish": times.finish if times.reduced is None else times.reduced,
                "bytes": times.nbytes,
            }
            for times in step.buckets
        ],
        "gathers": [
            {"bucket": gather.index, "start": gather.start, "finish": gather.end, "bytes": gather.nbytes}
            for gather in step.gathers
        ],
    }


def _peak_memory() -> int:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
