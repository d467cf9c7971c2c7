"""Optimizers that overlap communication with the next forward, shard their state over ranks, or step locally."""

__all__: list[str] = []
