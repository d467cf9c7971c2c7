"""What both reports are made of: ``canvas`` sets the look, ``kinds`` draws, ``page`` puts it on a page that needs
nothing but itself, ``words`` says numbers.

matplotlib and jinja2 are imported when something is drawn or written, and not before.
"""

__all__: list[str] = []
