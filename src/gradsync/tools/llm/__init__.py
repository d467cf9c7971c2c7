"""``gradsync train``: models and data, the training loop, and what a run leaves behind.

::

    text_sources ──▶ tokens ────────────▶ trainer ◀── model
    files, hf:…      one file, windows       │         logits, loss
                                             ▼
                     step_records ──▶ recording ──▶ run_folder ──▶ report, time_shares
                     loss, phases     screen        metrics        one page
"""

__all__: list[str] = []
