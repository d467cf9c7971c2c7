"""Calibration of a plan: two ranks measure their link, their model and their codings."""

from gradsync.tools.calibration.rehearse import Rehearsal, rehearse

__all__ = ["Rehearsal", "rehearse"]
