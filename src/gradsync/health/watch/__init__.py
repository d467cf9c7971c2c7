"""The watch: ranks report their status to each other outside the communicator, so that errors can name a lost rank."""

from gradsync.health.watch.pace import PaceMeter, make_meter
from gradsync.health.watch.set_up import leave_watch, look_at, say_goodbye, set_watch, straggling, tell_error
from gradsync.health.watch.status import Position

__all__ = [
    "PaceMeter",
    "Position",
    "leave_watch",
    "look_at",
    "make_meter",
    "say_goodbye",
    "set_watch",
    "straggling",
    "tell_error",
]
