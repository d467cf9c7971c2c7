"""What happened in a step and what to expect of one: recordings, timelines, explanations, traces, plans, charts.

Here is what packages above need of it without knowing how it is made.
"""

from gradsync.observe.charts.numbers import count, size
from gradsync.observe.explain.explanation import Explanation, explain_model

__all__ = ["Explanation", "count", "explain_model", "size"]
