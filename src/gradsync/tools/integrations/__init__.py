"""Integrations: gradsync inside other training frameworks."""

__all__: list[str] = []
