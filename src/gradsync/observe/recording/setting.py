"""Chooses the recorder of a model: the user's own, or the default one that every model has.

``GRADSYNC_RECORD`` is a folder to write to, or ``off``; without it the last steps of models on the CPU are kept in
memory.
"""

import logging
import os
from collections.abc import Iterable

import torch

from gradsync.communicator import Communicator
from gradsync.core.engine.observer import Observer, Observers
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.observe.recording.clocks import align_clocks
from gradsync.observe.recording.recorder import Recorder
from gradsync.observe.recording.steps import Clock

__all__ = ["VARIABLE", "attach_recorder", "choose_recorder", "described", "recorder_in"]

LOGGER = logging.getLogger("gradsync")
VARIABLE = "GRADSYNC_RECORD"
OFF = "off"


def recorder_in(observer: Observer | None) -> Recorder | None:
    """The user's own, wherever it stands."""
    if isinstance(observer, Recorder):
        return observer
    among: Iterable[Observer] = observer.members if isinstance(observer, Observers) else ()
    return next((found for each in among if (found := recorder_in(each)) is not None), None)


def choose_recorder(observer: Observer | None, device: torch.device) -> Recorder | None:
    """The recorder of a model that ``observer`` watches.

    On an accelerator marks are events, which have a cost there: a model is recorded only on request.
    """
    own = recorder_in(observer)
    if own is not None:
        return own
    setting = os.environ.get(VARIABLE, "")
    if setting == OFF or (not setting and device.type != "cpu"):
        return None
    return Recorder(setting or None)


def described(recorder: Recorder | None) -> list[tuple[str, str]]:
    """What ranks must have in common: those that write measure their clocks, and that takes all of them."""
    return [("recording", "to a folder" if recorder is not None and recorder.folder is not None else "to no folder")]


def attach_recorder(
    recorder: Recorder | None, synchronizer: Synchronizer, name: str, communicator: Communicator, *, meets: bool
) -> None:
    """Have the recorder know whom it watches. Collective where it writes to a folder, if ranks may meet."""
    if recorder is None:
        return
    clock = align_clocks(communicator) if meets and recorder.folder is not None else Clock()
    try:
        recorder.attach(synchronizer, name, clock)
    except Exception:
        LOGGER.exception("the recorder does not know the model, and records nothing")
