"""What every other package builds on: errors, the version, files, JSON data, the launcher's environment variables."""

__all__: list[str] = []
