"""Runs scripts as they stand on real ranks. Importing torch takes longer than most of them run, so it is done once.

Each rank is a process with torchrun's variables that imports torch and forks a child for every script; the children of
a script meet at a port of their own. What a script printed, and its traceback if it failed, goes to a file.
"""

import contextlib
import io
import json
import os
import runpy
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


def run_scripts(scripts: list[Path], *, ranks: int, folder: Path, timeout: float = 100) -> dict[Path, Ran]:
    """Run them on `ranks` ranks, or for 0 in a plain process without a launcher's variables."""
    ports = _free_ports(len(scripts))
    arguments = [str(folder), *(f"{port}:{script}" for port, script in zip(ports, scripts, strict=True))]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.scripts", str(rank), *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **_variables(rank, ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(max(ranks, 1))
    ]
    try:
        said = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), said
    told = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(len(processes))]
    return {
        script: Ran(
            output="".join(each[str(script)]["output"] for each in told),
            error=next((each[str(script)]["error"] for each in told if each[str(script)]["error"]), None),
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


def _run(script: str, port: str, answer: Path) -> None:
    """In a child of its own."""
    if "RANK" in os.environ:
        os.environ["MASTER_PORT"] = port
    output, error = io.StringIO(), None
    sys.argv = [script]
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            error = traceback.format_exc()
    answer.write_text(json.dumps({"output": output.getvalue(), "error": error}))


def main() -> None:
    import gradsync  # noqa: F401 (the children have it, and torch, from here)

    rank, folder, *scripts = sys.argv[1:]
    answer = Path(folder, f"answer-{rank}.json")
    told = {}
    for port_and_script in scripts:
        port, script = port_and_script.split(":", 1)
        child = os.fork()
        if not child:
            _run(script, port, answer)
            # Not through the interpreter's end, where threads of the wire may still want it.
            os._exit(0)
        _, status = os.waitpid(child, 0)
        told[script] = json.loads(answer.read_text()) if status == 0 else {"output": "", "error": f"status {status}"}
        answer.unlink(missing_ok=True)
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
