"""The parts of reports: ``canvas`` sets the look, ``kinds`` draws, ``page`` writes HTML, ``numbers`` formats numbers.

matplotlib and jinja2 are imported only when something is drawn or written.
"""

__all__: list[str] = []
