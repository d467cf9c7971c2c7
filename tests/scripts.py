"""Runs scripts as they stand on real ranks. Importing torch takes longer than most of them run, so it is done once.

A process of its own imports torch and forks a child for every rank of every script, with torchrun's variables; the
children of a script meet at a port of their own. What a script printed, and its traceback if it failed, goes to a file.
"""

import contextlib
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ran:
    """What became of a script: the output of all ranks together, and the first traceback."""

    output: str
    error: str | None


def run_scripts(
    scripts: list[Path],
    *,
    ranks: int,
    folder: Path,
    arguments: list[str] | None = None,
    timeout: float = 100,
    preload: tuple[str, ...] = (),
) -> dict[Path, Ran]:
    """Run them on `ranks` ranks, or for 0 in a plain process without a launcher's variables.

    `preload` names further modules that are imported once for all of them.
    """
    orders = {
        "ranks": ranks,
        "folder": str(folder),
        "arguments": arguments or [],
        "preload": preload,
        "scripts": [[str(script), port] for script, port in zip(scripts, _free_ports(len(scripts)), strict=True)],
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.scripts", json.dumps(orders)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=timeout)[0]
    finally:
        if process.poll() is None:
            # With the children, which may wait for each other.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, said
    told = json.loads((folder / "told.json").read_text())
    return {
        script: Ran(
            output="".join(each["output"] for each in told[str(script)]),
            error=next((each["error"] for each in told[str(script)] if each["error"]), None),
        )
        for script in scripts
    }


def _variables(rank: int, ranks: int) -> dict[str, str]:
    if not ranks:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
    }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _run(script: str, arguments: list[str], answer: Path) -> None:
    """In a child of its own."""
    output, error = io.StringIO(), None
    sys.argv = [script, *arguments]
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            error = traceback.format_exc()
    answer.write_text(json.dumps({"output": output.getvalue(), "error": error}))


def main() -> None:
    # The children have all of it from here; the first step of any optimizer imports the compiler.

    import gradsync  # noqa: F401

    orders = json.loads(sys.argv[1])
    for name in orders["preload"]:
        importlib.import_module(name)
    folder, ranks = Path(orders["folder"]), orders["ranks"]
    told: dict[str, list[dict[str, str | None]]] = {}
    for script, port in orders["scripts"]:
        answers = [folder / f"answer-{rank}.json" for rank in range(max(ranks, 1))]
        children = []
        for rank, answer in enumerate(answers):
            child = os.fork()
            if not child:
                os.environ.update(_variables(rank, ranks))
                if ranks:
                    os.environ["MASTER_PORT"] = str(port)
                _run(script, orders["arguments"], answer)
                # Not through the interpreter's end, where threads of the wire may still want it.
                os._exit(0)
            children.append(child)
        ends = [os.waitpid(child, 0)[1] for child in children]
        told[script] = [
            {"output": "", "error": f"status {status}"} if status else json.loads(answer.read_text())
            for answer, status in zip(answers, ends, strict=True)
        ]
        for answer in answers:
            answer.unlink(missing_ok=True)
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
