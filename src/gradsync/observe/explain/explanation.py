"""From recordings to an explanation."""

from collections.abc import Sequence

from gradsync.observe.explain.advice import advise
from gradsync.observe.explain.explanation_text import Explanation
from gradsync.observe.explain.merging import merge
from gradsync.observe.explain.split import split
from gradsync.observe.explain.stragglers import find_stragglers
from gradsync.observe.recording.steps import Recording

__all__ = ["explain_recordings"]


def explain_recordings(recordings: Sequence[Recording]) -> Explanation:
    """What recordings of all ranks, or of one alone, tell."""
    timeline = merge(recordings)
    parts = split(timeline)
    stragglers = find_stragglers(timeline, parts)
    advice = tuple(advise(timeline, parts, stragglers))
    return Explanation(timeline=timeline, split=parts, stragglers=stragglers, advice=advice)
