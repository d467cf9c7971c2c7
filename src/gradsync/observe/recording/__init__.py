"""Records what every rank did in every step: only marks during the step, converted to readable records later.

::

    recorder   receives forwards, backwards, buckets, gathers and steps, and keeps when they happened
    marks      notes the stages of backwards and gathers, and turns marks into spans that fill the step without a gap
    loading    when the loop waits for its data
    files      the parts of a recording, and its format: one file per rank, which other programs may read
    attach     which recorder a model has, and the offset of the rank's clock from rank 0's
"""

from gradsync.observe.recording.files import (
    BucketPart,
    Clock,
    GatherTimes,
    Header,
    RecordedBucket,
    Recording,
    Span,
    Step,
    Synchronization,
    find_recordings,
    read_models,
    read_recording,
    read_recordings,
)
from gradsync.observe.recording.loading import loading
from gradsync.observe.recording.recorder import Recorder, close_recorders

__all__ = [
    "BucketPart",
    "Clock",
    "GatherTimes",
    "Header",
    "RecordedBucket",
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
