"""Benchmarks of synchronization cost: real processes over real links, next to the wrappers people use today.

``measure`` interleaves variants inside the ranks, ``record`` keeps and interprets every line, ``report`` shows the
result. Each class in ``scenarios`` answers one question; ``runner`` runs them.
"""

__all__: list[str] = []
