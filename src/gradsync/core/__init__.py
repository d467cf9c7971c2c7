"""The gradient engine: buckets gradients, reduces them over ranks and hands the means to the optimizer."""

__all__: list[str] = []
