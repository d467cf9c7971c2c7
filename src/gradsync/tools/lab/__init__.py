"""Hosts with shaped links on one machine, NCCL ranks that share a GPU, and models that take an accelerator's time."""

__all__: list[str] = []
