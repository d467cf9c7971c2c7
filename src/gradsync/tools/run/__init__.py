"""Scripts that know nothing of gradsync: run as they are, with its classes in the place of torch's and Accelerate's, or
with their own, and accounted for."""

__all__: list[str] = []
