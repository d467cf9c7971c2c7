"""The parts of both reports: ``canvas`` sets the look, ``kinds`` draws, ``page`` builds a self-contained page,
``notebook`` shows explanations and timelines in a notebook, ``numbers`` formats numbers.

matplotlib and jinja2 are imported only when something is drawn or written.
"""

__all__: list[str] = []
