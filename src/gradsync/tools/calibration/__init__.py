"""Two ranks try out what a plan needs to know: their wire, their model, their codings."""

from gradsync.tools.calibration.rehearse import Rehearsal, rehearse

__all__ = ["Rehearsal", "rehearse"]
