"""Shows and records what a run does: lines on the screen, metrics as they arrive, a report at the end. Rank 0 only."""

import json
import platform
import resource
import shlex
import statistics
import time
from collections import Counter
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.health.watch import slowness_warnings
from gradsync.observe.charts.numbers import count
from gradsync.observe.explain import Explanation
from gradsync.observe.explain.explanation import NAMES, gained
from gradsync.tools.llm.report import write_report
from gradsync.tools.llm.run_folder import RunFolder
from gradsync.tools.llm.step_records import PHASES, StepRecord
from gradsync.tools.llm.time_shares import explain_run
from gradsync.tools.llm.trainer import Listener, Trainer, TrainingOutcome

__all__ = ["RunRecorder"]

# Without a terminal a line now and then is enough for a log file.
SECONDS_BETWEEN_LINES = 10.0
SMOOTHING = 0.9


class RunRecorder(Listener):
    """Shows a run on the screen, a progress bar in a terminal and plain lines elsewhere, and keeps it in its folder."""

    def __init__(self, folder: RunFolder, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._folder = folder
        self._noted = 0
        self._console = console if console is not None else Console()
        self._progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}[/bold]"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("[dim]{task.fields[lost]}[/dim]"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            expand=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", start=False, loss="…", speed="", lost="")
        self._line_due, self._total, self._first = 0.0, 0, 0
        self._transport = ""
        self._seconds: Counter[str] = Counter()
        self._smoothed_loss: float | None = None
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        self._speeds: list[float] = []
        self._began = time.perf_counter()

    # -- callbacks of the trainer -------------------------------------------------------------------------------

    def began(self, trainer: Trainer, notes: list[str]) -> None:
        self._folder.rewind(trainer.step)
        self._folder.write_config(_config(trainer))
        settings, accelerator, plan = trainer.settings, trainer.accelerator, trainer.plan
        millions = trainer.plain_model.parameter_count / 1e6
        self._console.print(
            f"[bold]gradsync train[/bold]: {settings.model}, {millions:.2f}M parameters, {settings.precision}; "
            f"{count(accelerator.num_processes, 'rank')} on {accelerator.device.type}; "
            f"windows of {plan.global_batch} sequences × {plan.sequence_length} tokens",
            highlight=False,
        )
        for note in notes:
            self._folder.note(trainer.step, note)
            self._console.print(f"  {note}", highlight=False, style="yellow")
        self._total, self._first = trainer.total_steps, trainer.step
        self._transport = trainer.transport
        self._began = time.perf_counter()
        self._progress.start()
        self._progress.reset(self._task, total=self._total, completed=trainer.step)

    def stepped(self, record: StepRecord) -> None:
        self._folder.append({"kind": "step", **vars(record)})
        self._note_what_is_slow(record.step)
        self._seconds.update(record.seconds)
        self._speeds.append(record.tokens_per_second)
        self._last_loss = record.loss
        self._first_loss = record.loss if self._first_loss is None else self._first_loss
        before = self._smoothed_loss
        smoothed = record.loss if before is None else SMOOTHING * before + (1 - SMOOTHING) * record.loss
        self._smoothed_loss = smoothed
        loss, speed = f"{smoothed:.3f}", f"{self._speed:,.0f} tokens/s"
        lost = f"{100 * self._shares['synchronization']:.1f} % lost to sync"
        self._progress.update(self._task, completed=record.step, loss=loss, speed=speed, lost=lost)
        if self._progress.disable and (self._elapsed >= self._line_due or record.step == self._total):
            self._line_due = self._elapsed + SECONDS_BETWEEN_LINES
            self._line(f"step {record.step}/{self._total}  loss {loss}  {speed}  {lost}")

    def _note_what_is_slow(self, step: int) -> None:
        # The watch has put it on the screen when it found it.
        for words in slowness_warnings()[self._noted :]:
            self._noted += 1
            self._folder.note(step, words)

    def validated(self, step: int, loss: float) -> None:
        self._folder.append({"kind": "validation", "step": step, "loss": loss})
        self._line(f"step {step}: validation loss {loss:.4f}")

    def saved(self, step: int) -> None:
        self._line(f"step {step}: checkpoint written")

    def noted(self, step: int, text: str) -> None:
        self._folder.note(step, text)
        self._line(f"step {step}: {text}")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, style="dim")

    def hand_over(self) -> None:
        """Another rank records from here on."""
        self._folder.close()
        self._progress.stop()

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self, outcome: TrainingOutcome) -> None:
        """The run is over: summary, report, and the table on the screen."""
        self._note_what_is_slow(outcome.step)
        if outcome.signal:
            self._folder.note(outcome.step, f"stopped by signal {outcome.signal}")
        explanation = explain_run(self._folder.path)
        self._folder.write_summary(self._summary(outcome, explanation))
        self._folder.close()
        call = f"from gradsync.tools.llm.report import write_report; write_report({json.dumps(str(self._folder.path))})"
        report = (
            f"not drawn, as the run was ended early. Go on with --resume, or draw it: python -c {shlex.quote(call)}"
        )
        try:
            # A stopped run ends now; charts take seconds.
            report = report if outcome.signal else str(write_report(self._folder.path))
        except ConfigurationError as error:
            # The run is over, and all of it is on disk: nothing is lost that a page written later would not show.
            report = f"none: {error}"
        self._show_summary(outcome, report, explanation)

    @property
    def _shares(self) -> dict[str, float]:
        """Each phase's share of the time, from 0 to 1."""
        total = sum(self._seconds.values())
        return {name: self._seconds[name] / total if total else 0.0 for name in PHASES}

    @property
    def _speed(self) -> float:
        return statistics.median(self._speeds) if self._speeds else 0.0

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    def _summary(self, outcome: TrainingOutcome, explanation: Explanation | None) -> dict[str, Any]:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            memory = int(torch.cuda.max_memory_allocated())
        return {
            "step": outcome.step,
            "signal": outcome.signal,
            "seconds": self._elapsed,
            "first_loss": self._first_loss,
            "final_loss": self._last_loss,
            "validation_loss": outcome.validation_loss,
            "tokens_per_second": self._speed,
            "shares": self._shares,
            "split": None if explanation is None else dict(explanation.parts()),
            "advice": None if explanation is None else [advice.cause for advice in explanation.advice],
            "replicas_equal": outcome.proof.equal,
            "digest": outcome.proof.digests[0],
            "peak_memory_bytes": memory,
        }

    def _show_summary(self, outcome: TrainingOutcome, report: str, explanation: Explanation | None) -> None:
        from rich.markup import escape
        from rich.table import Table

        ran = f"{outcome.step - self._first} in {self._elapsed:.0f} s"
        rows = {"steps": ran if not self._first else f"{ran}, from step {self._first} to {outcome.step}"}
        if self._first_loss is not None and self._last_loss is not None:
            rows["training loss"] = f"{self._first_loss:.4f} → {self._last_loss:.4f}"
        if outcome.validation_loss is not None:
            rows["validation loss"] = f"{outcome.validation_loss:.4f}"
        rows["throughput"] = f"{self._speed:,.0f} tokens/s (median)"
        shares = self._shares
        if explanation is not None:
            step = explanation.split.mean.step
            shares = {NAMES.get(name, name): seconds / step for name, seconds in explanation.parts()}
        rows["time"] = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
        if explanation is not None and explanation.advice:
            best = explanation.advice[0]
            rows["first advice"] = escape(f"{gained(best)}: {best.cause} → {best.change}")
        rows["wire"] = self._transport
        style = "green" if outcome.proof.equal else "bold red"
        rows["replicas"] = f"[{style}]{outcome.proof}[/{style}]"
        rows["report"] = escape(report)
        table = Table(show_header=False, box=None, padding=(0, 2), title="summary", title_justify="left")
        for name, value in rows.items():
            table.add_row(f"[dim]{name}[/dim]", value)
        self._progress.stop()
        self._console.print(table, highlight=False)


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
        "wire": trainer.transport,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
