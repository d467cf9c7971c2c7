"""Predicts the time of a step: an event simulator over profiles of ranks, a link and a schedule.

::

    network      ranks, links, what a collective costs, and what a step sends
    profile      what a rank does without the others, and by how much ranks differ
    event_loop   the simulated machine
    simulator    one step of all ranks
    calibration  what a plan is made from: measurements, or a recording
    library      machines and models known from datasheets and papers
    planner      predictions, the best setting, the link that is needed
    report       all of it, with a picture
"""

__all__: list[str] = []
