"""The watch: ranks report their status to each other outside the communicator, so that errors can name a lost rank."""

from gradsync.health.watch.pace_meter import PaceMeter, make_meter
from gradsync.health.watch.set_up import leave_watch, say_goodbye, set_watch, slowness_warnings, tell_error, watch_model
from gradsync.health.watch.status import Position

__all__ = [
    "PaceMeter",
    "Position",
    "leave_watch",
    "make_meter",
    "say_goodbye",
    "set_watch",
    "slowness_warnings",
    "tell_error",
    "watch_model",
]
