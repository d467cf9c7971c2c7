"""What synchronization costs: measured on real processes over real links, beside the wrappers people use today.

``measure`` takes variants in turns inside the ranks, ``record`` keeps every line, ``statistics`` says what they mean,
``report`` shows it. One file of ``scenarios`` answers one question; ``runner`` runs them.
"""

__all__: list[str] = []
