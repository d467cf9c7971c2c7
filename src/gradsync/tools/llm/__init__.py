"""Models and data of ``gradsync train``: small GPTs, text as numbered tokens, batches addressed by number.

::

    text_sources ──▶ tokens ──▶ batches ──▶ model
    files, hf:…      one file    window n    logits, loss
"""

__all__ = ["batches", "model", "text_sources", "tokens"]
