"""Modules as replicas: ``DistributedDataParallel``, what it is made of, and the same without a wrapper."""

__all__: list[str] = []
