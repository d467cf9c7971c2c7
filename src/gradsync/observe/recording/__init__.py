"""What every rank did in every step, written down as it happens: marks during the step, sentences about it later.

::

    recorder   hears of forwards, backwards, buckets, gathers and steps, and keeps when
    marks      turns what it kept of a step into spans that fill the step without a gap
    steps      what a recording is made of
    loading    when the loop waits for its data
    files      one file a rank, which other programs may read
    clocks     how far each rank's clock is from rank 0's
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
