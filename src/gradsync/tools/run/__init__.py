"""Runs scripts that know nothing of gradsync, with its classes in place of torch's and Accelerate's or with their own
classes, and reports what they did.
"""

__all__: list[str] = []
