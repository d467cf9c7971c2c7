"""Local SGD, DiLoCo and streaming: ranks train alone for many steps and periodically agree on parameters.

``arguments`` checks what users give, and has the schedule; ``progress`` tells each rank how far the others are;
``tensor_exchange`` sends the tensors and applies the result; ``local_steps`` is the object that users create, and
``recipes`` has its arguments by name.
"""

from gradsync.optim.local_steps.local_steps import LocalSteps
from gradsync.optim.local_steps.recipes import is_local_steps, local_steps_by_name

__all__ = ["LocalSteps", "is_local_steps", "local_steps_by_name"]
