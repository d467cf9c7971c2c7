"""The Trainer of transformers on gradsync, in one line before ``trainer.train()``.

import gradsync.transformers

trainer = Trainer(model, arguments, train_dataset=data)
gradsync.transformers.use(trainer)
trainer.train()
"""

from gradsync.tools.integrations.transformers import use

__all__ = ["use"]
