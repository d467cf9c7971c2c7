"""The version, in a module that everything can import."""

__all__ = ["__version__"]

__version__ = "0.1.0"
