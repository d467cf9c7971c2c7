"""A recording of all ranks as a trace for ui.perfetto.dev.

::

    tracks     what is to be seen: tracks of slices for every rank, on one clock
    perfetto   the file, written with the package perfetto
"""

__all__: list[str] = []
