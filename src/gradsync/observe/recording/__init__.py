"""Records what every rank did in every step: only marks during the step, converted to readable records later.

::

    recorder   receives forwards, backwards, buckets, gathers and steps, and keeps when they happened
    marks      turns the marks of a step into spans that fill the step without a gap
    steps      the parts of a recording
    loading    when the loop waits for its data
    files      one file per rank, which other programs may read
    clocks     the offset of each rank's clock from rank 0's
"""

from gradsync.observe.recording.files import find_recordings, read_models, read_recording, read_recordings
from gradsync.observe.recording.loading import loading
from gradsync.observe.recording.recorder import Recorder, close_recorders
from gradsync.observe.recording.steps import (
    BucketPart,
    BucketTimes,
    Clock,
    GatherTimes,
    Header,
    Recording,
    Span,
    Step,
    Synchronization,
)

__all__ = [
    "BucketPart",
    "BucketTimes",
    "Clock",
    "GatherTimes",
    "Header",
    "Recorder",
    "Recording",
    "Span",
    "Step",
    "Synchronization",
    "close_recorders",
    "find_recordings",
    "loading",
    "read_models",
    "read_recording",
    "read_recordings",
]
