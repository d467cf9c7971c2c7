"""One rank of a training run, from the settings to the exit code."""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gradsync.accelerator import Accelerator
from gradsync.communicator.agreement import gather_bytes, together
from gradsync.observe.recording import Recorder
from gradsync.observe.recording.files import FOLDER as RECORDING
from gradsync.observe.recording.files import file_name, lines_of, write_lines
from gradsync.tools.llm.recording import Recording
from gradsync.tools.llm.run_folder import RunFolder
from gradsync.tools.llm.screen import Screen
from gradsync.tools.llm.settings import TrainSettings
from gradsync.tools.llm.tokens import prepare_tokens
from gradsync.tools.llm.trainer import Outcome, Trainer, make_accelerator

__all__ = ["exit_code_of", "run"]

T = TypeVar("T")

# Steps that a rank sends whose disk rank 0 does not see.
SENT = 100


def run(settings: TrainSettings, *, cpu: bool = False) -> Outcome:
    """Train on this rank. Rank 0 shows and records; all ranks return the same outcome."""
    recorder = Recorder(settings.run_folder / RECORDING)
    accelerator, timeline = make_accelerator(settings, cpu=cpu, recorder=recorder)
    try:
        # Rank 0 may have to build the token file; the others find it there.
        _on_main(accelerator, lambda: prepare_tokens(settings.data, tokenizer=settings.tokenizer))
        tokens = prepare_tokens(settings.data, tokenizer=settings.tokenizer)
        folder = _on_main(
            accelerator,
            lambda: RunFolder(settings.run_folder, resume=settings.resume, tensorboard=settings.tensorboard),
        )
        # What an earlier life of the run has recorded may be of other ranks.
        _on_main(accelerator, lambda: shutil.rmtree(settings.run_folder / RECORDING, ignore_errors=True))
        trainer = Trainer(settings, accelerator, timeline, tokens)
        recording = None if folder is None else Recording(folder, Screen())
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


def exit_code_of(outcome: Outcome) -> int:
    """0 if all went well, 130 or 143 after Ctrl-C or SIGTERM, 1 if replicas differ."""
    if outcome.signal:
        # What a shell expects of a process that a signal has ended.
        return 128 + outcome.signal
    return 0 if outcome.proof.equal else 1


def _on_main(accelerator: Accelerator, function: Callable[[], T]) -> T | None:
    """What ``function`` returns, on rank 0; None elsewhere. If it raises there, every rank raises. Collective."""
    result, _ = together(
        accelerator.world.communicator,
        "prepare the run",
        lambda: (function() if accelerator.is_main_process else None, None),
    )
    return result
