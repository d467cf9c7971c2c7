"""Faults in real processes: the program that a rank runs, how one is hurt, and what is noticed of it, by whom, when."""

__all__: list[str] = []
