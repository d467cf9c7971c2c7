"""Ranks that train by themselves for many steps, and now and then agree on parameters: local SGD, DiLoCo, streaming.

``settings`` says when what is sent; a ``meeting`` tells each rank where the others are; ``exchange`` is what travels,
``outer`` what is made of it; ``saving`` checks what is loaded; ``local_steps`` is the object that users make.
"""

from gradsync.optim.local_steps.local_steps import LocalSteps

__all__ = ["LocalSteps"]
