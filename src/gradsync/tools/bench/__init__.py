"""Benchmarks of synchronization cost: real processes over real links, next to the wrappers people use today.

``measure`` interleaves variants inside the ranks, ``record`` keeps every line, ``statistics`` interprets them,
``report`` shows the result. One file of ``scenarios`` answers one question; ``runner`` runs them.
"""

__all__: list[str] = []
