"""The folder that ``gradsync run`` puts into ``PYTHONPATH``: what a Python reads when it starts, before its script."""

__all__: list[str] = []
