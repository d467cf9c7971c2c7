"""``python -m gradsync`` is the command ``gradsync``."""

from gradsync.tools.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
