"""What every other package builds on: errors, the version, files, the launcher's environment variables."""

__all__ = ["__version__"]

__version__ = "0.1.0"
