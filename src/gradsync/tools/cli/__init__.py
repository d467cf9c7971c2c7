"""The command line, ``gradsync``: needs typer and rich, the extra ``gradsync[cli]``. One module a command."""

__all__: list[str] = []
