"""What happened in a step and what to expect of one: recordings, timelines, explanations, traces, plans, charts."""

__all__: list[str] = []
