"""Local SGD, DiLoCo and streaming: ranks train alone for many steps and periodically agree on parameters.

``settings`` is the schedule of what is sent when; ``progress`` tells each rank how far the others are; ``exchange``
sends the tensors and ``outer`` applies the result; ``state_saving`` checks what is loaded; ``local_steps`` is the
object that users create.
"""

from gradsync.optim.local_steps.local_steps import LocalSteps

__all__ = ["LocalSteps"]
