"""The folder that ``gradsync run`` puts on ``PYTHONPATH``: read by every Python at startup, before its script."""

__all__: list[str] = []
