"""Fault injection in real processes: the program that a rank runs, the faults, and which rank noticed what and when."""

__all__: list[str] = []
