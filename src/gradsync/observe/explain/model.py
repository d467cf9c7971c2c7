"""``model.explain()``: an explanation from inside a training."""

from dataclasses import replace

import torch

from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.communicator import Communicator
from gradsync.communicator.agreement import gather_bytes
from gradsync.core.reduction.measurement import measure_link
from gradsync.observe.explain.explanation import explain_recordings
from gradsync.observe.explain.explanation_text import Explanation
from gradsync.observe.recording.clocks import align_clocks
from gradsync.observe.recording.files import lines_of, parse_recording
from gradsync.observe.recording.recorder import Recorder

__all__ = ["explain_model"]

REMEDY = (
    "Models on the CPU are, unless GRADSYNC_RECORD is off; for one on an accelerator set GRADSYNC_RECORD to a folder, "
    "or pass observer=gradsync.observe.recording.Recorder()"
)


def explain_model(
    recorder: Recorder | None, communicator: Communicator, device: torch.device, *, all_ranks: bool
) -> Explanation:
    """What the recorder of a model on ``device`` knows; with ``all_ranks`` what all of them know, on all of them.
    Collective then."""
    recording = None if recorder is None else recorder.recording
    if not all_ranks:
        if recording is None:
            raise MisuseError(f"this model is not recorded. {REMEDY}")
        return explain_recordings([replace(recording, ended=True)])
    clock = align_clocks(communicator)
    if communicator.world_size > 1:
        # Where sizes of buckets were chosen nobody has measured it, and what bytes cost cannot be told from buckets.
        measure_link(communicator, device)
    if recorder is not None and recording is not None:
        recorder.align(clock)
        recording = recorder.recording
    # It has no end yet, and that says nothing of a rank that answers.
    recording = None if recording is None else replace(recording, ended=True)
    mine = "" if recording is None else "\n".join(lines_of(recording))
    told = [each.decode() for each in gather_bytes(communicator, mine.encode())]
    silent = [rank for rank, text in enumerate(told) if not text]
    if silent:
        # On all ranks alike.
        raise ConfigurationError(f"rank {silent[0]} is not recorded. {REMEDY}")
    return explain_recordings([parse_recording(text, f"rank {rank}") for rank, text in enumerate(told)])
