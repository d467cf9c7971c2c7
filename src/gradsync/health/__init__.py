"""Which ranks are alive, slow or lost, and how training continues with the others."""

__all__: list[str] = []
