"""What a lab raises when the system, or a rank in it, does not do what it should."""

from gradsync.errors import GradsyncError

__all__ = ["LabError"]


class LabError(GradsyncError):
    """A lab could not be made, found or removed, or a rank in it failed. The message names the rank and its host."""
