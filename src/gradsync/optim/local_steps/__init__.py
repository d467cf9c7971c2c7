"""Local SGD, DiLoCo and streaming: ranks train alone for many steps and periodically agree on parameters.

``arguments`` checks what users give, and has the schedule; ``progress`` tells each rank how far the others are;
``tensor_exchange`` sends the tensors and applies the result; ``local_steps`` is the object that users create.
"""

from gradsync.optim.local_steps.local_steps import LocalSteps

__all__ = ["LocalSteps"]
