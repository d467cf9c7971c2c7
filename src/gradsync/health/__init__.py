"""Which ranks are alive, slow or lost, and how training goes on with the others."""

__all__: list[str] = []
