"""Draws rooms.svg: the rooms of the package, and the way of a gradient down to the wire and back.

    python docs/pictures/rooms.py

Rooms are those of pyproject.toml, several to a floor; a test compares them. No library is needed; the picture is text.
"""

from drawing import BACKWARD_FILL, FORWARD_FILL, INK, MUTED, PANEL, STEP_FILL, WIRE_FILL, arrow, box, stop, text, write

# From top to bottom: what a floor is for, its color, and its rooms. Nothing imports from a floor above.
FLOORS = [
    ("the command line, and what it runs", PANEL, ["cli", "rehearsal", "bench", "doctor", "running", "trace"]),
    ("", PANEL, ["lab", "llm", "launch"]),
    ("Accelerate's interface; states on disk", PANEL, ["accelerator", "utils", "checkpoint"]),
    ("what users import", FORWARD_FILL, ["data_parallel", "attach", "averaging", "clipping"]),
    ("", FORWARD_FILL, ["sharded", "local_steps", "elastic", "layer_drop", "timeline", "testing"]),
    ("a module as one replica among several", STEP_FILL, ["wrap"]),
    ("where time goes, and would go; what each rank did when", STEP_FILL, ["explain", "plan", "recording"]),
    ("autograd's hooks, the pipeline of buckets", BACKWARD_FILL, ["engine"]),
    ("what lies between two steps, and what it weighs", BACKWARD_FILL, ["window"]),
    ("what is put on the wire", BACKWARD_FILL, ["reduction"]),
    ("where gradients lie; where ranks stand", BACKWARD_FILL, ["bucket", "watch"]),
    ("what moves bytes", WIRE_FILL, ["communicator"]),
    ("", PANEL, ["errors", "files", "json_data", "version", "charts"]),
]
# The stops of a gradient, by the room in which it makes them.
STOPS = {"engine": [1, 3, 5], "bucket": [2], "reduction": [3], "communicator": [4]}
LEFT, WIDTH, TALL, STEP = 110.0, 500.0, 34, 42


def main() -> None:
    parts = []
    for number, (purpose, fill, rooms) in enumerate(FLOORS):
        y = 20.0 + number * STEP
        each = (WIDTH + 6) / len(rooms)
        for place, room in enumerate(rooms):
            x = LEFT + place * each
            parts += [box(x, y, each - 6, fill, TALL), text(x + (each - 6) / 2, y + 22, room, size=13, mono=True)]
            parts += [stop(LEFT - 20 - 26 * order, y + 17, n) for order, n in enumerate(reversed(STOPS.get(room, [])))]
        parts += [text(LEFT + WIDTH + 16, y + 22, purpose, size=13, fill=MUTED, anchor="start")]
    bottom = 20.0 + len(FLOORS) * STEP
    parts += [arrow(14, 60, 14, bottom - 20, stroke=INK), text(28, 52, "imports", size=12, anchor="start")]
    words = "Numbers are the stops of a gradient: it goes down to the wire, and comes back by the same way."
    parts += [text(LEFT, bottom + 20, words, anchor="start")]
    write(__file__, LEFT + WIDTH + 340, bottom + 40, parts)


if __name__ == "__main__":
    main()
