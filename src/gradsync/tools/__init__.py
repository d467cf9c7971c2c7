"""The command line and what it runs. ``import gradsync`` loads none of it."""

__all__: list[str] = []
