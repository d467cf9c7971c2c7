"""Where the time of a step went, and what to change.

::

    merging       all ranks on one clock
    split         the parts of a step, which add up to it, and which rank the others wait for
    link          what communication costs
    replay        recorded steps, replayed with something changed
    advice        changes, ranked by their gain
    explanation   all of it as text; ``model.explain()``, during a training
"""

from gradsync.observe.explain.advice import Advice
from gradsync.observe.explain.explanation import Explanation, explain_recordings

__all__ = ["Advice", "Explanation", "explain_recordings"]
