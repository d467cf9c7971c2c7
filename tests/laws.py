"""How often laws are tried: see the profiles in conftest.py."""

from hypothesis import settings

__all__ = ["costly"]

# For laws whose examples are whole trainings.
costly = settings(max_examples=max(4, settings().max_examples // 2))
