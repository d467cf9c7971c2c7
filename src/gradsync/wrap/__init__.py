"""A module as one replica among several: its parameters and buffers, its precision, its windows, its uneven inputs."""

__all__: list[str] = []
