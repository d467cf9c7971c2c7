"""Optimizers that overlap with the next forward, share their state over ranks, or step locally."""

__all__: list[str] = []
