"""Where the time of a step went, and what to change.

::

    merging    all ranks on one clock
    split      the parts of a step, which add up to it
    evidence   whether that is enough to conclude something
    stragglers who is waited for
    link       what the wire costs
    replay     recorded steps, played again with something changed
    changes    what may be changed
    advice     changes, ranked by what they gain
    words      all of it as text
    model      a training that asks itself
"""

from gradsync.observe.explain.advice import Advice
from gradsync.observe.explain.explanation import explain_recordings
from gradsync.observe.explain.explanation_text import Explanation
from gradsync.observe.explain.split import Parts, Split
from gradsync.observe.explain.stragglers import Straggler

__all__ = ["Advice", "Explanation", "Parts", "Split", "Straggler", "explain_recordings"]
