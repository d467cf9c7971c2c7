"""Where the time of a step went, and what to change.

::

    merging    all ranks on one clock
    split      the parts of a step, which add up to it
    evidence   whether that is enough to conclude something
    stragglers which rank the others wait for
    link       what communication costs
    replay     recorded steps, replayed with something changed
    changes    what may be changed
    advice     changes, ranked by their gain
    words      all of it as text
    model      ``model.explain()``, during a training
"""

from gradsync.observe.explain.advice import Advice
from gradsync.observe.explain.explanation import explain_recordings
from gradsync.observe.explain.explanation_text import Explanation
from gradsync.observe.explain.split import Parts, Split
from gradsync.observe.explain.stragglers import Straggler

__all__ = ["Advice", "Explanation", "Parts", "Split", "Straggler", "explain_recordings"]
