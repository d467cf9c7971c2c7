"""Data-parallel models: ``DistributedDataParallel``, its components, and the same without a wrapper."""

__all__: list[str] = []
