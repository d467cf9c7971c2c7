"""From recordings to an explanation."""

from collections.abc import Sequence

from gradsync.explain.advice import advise
from gradsync.explain.merging import merge
from gradsync.explain.split import split
from gradsync.explain.stragglers import find_stragglers
from gradsync.explain.words import Explanation
from gradsync.recording.steps import Recording

__all__ = ["explain_recordings"]


def explain_recordings(recordings: Sequence[Recording]) -> Explanation:
    """What recordings of all ranks, or of one alone, tell."""
    timeline = merge(recordings)
    parts = split(timeline)
    stragglers = find_stragglers(timeline, parts)
    advice = tuple(advise(timeline, parts, stragglers))
    return Explanation(timeline=timeline, split=parts, stragglers=stragglers, advice=advice)
