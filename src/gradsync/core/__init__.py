"""The engine: gradients are bucketed, reduced over ranks and handed to the optimizer as means."""

__all__: list[str] = []
