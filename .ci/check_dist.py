"""Whether the wheel and the source archive in a folder are whole, and the wheel works where nothing else of us is."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

IN_WHEEL = (
    "gradsync/py.typed",
    "gradsync/observe/plan/data/machines.json",
    "gradsync/observe/plan/data/machines.json",
    "gradsync/tools/bench/templates/report.html",
    "gradsync/tools/llm/templates/report.html",
)
IN_SOURCE = (
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "Makefile",
    "docs/transports.md",
    "tests/test_structure.py",
    "tests/ranks.py",
)
IMPORT = "import gradsync; print(gradsync.__version__, gradsync.__file__)"


def require(names: set[str], wanted: tuple[str, ...], archive: Path) -> None:
    missing = [name for name in wanted if name not in names]
    if missing:
        raise SystemExit(f"{archive.name} lacks {', '.join(missing)}. Name them in MANIFEST.in or pyproject.toml")


def install_and_import(wheel: Path) -> str:
    """In a fresh environment, with the packages of this one behind it: torch is not installed once more."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
        # The source here must be found neither by the installer nor by the import.
        environment = os.environ | {"PYTHONPATH": ""}
        subprocess.run([python, *install], check=True, cwd=folder, env=environment)
        environment["PYTHONPATH"] = sysconfig.get_path("purelib")
        answer = subprocess.run([python, "-c", IMPORT], cwd=folder, env=environment, capture_output=True, text=True)
        if answer.returncode or folder not in answer.stdout:
            raise SystemExit(
                f"{wheel.name} cannot be imported from where it was installed: {answer.stdout}{answer.stderr}"
            )
        return answer.stdout.split()[0]


def main(folder: Path) -> None:
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    require(set(zipfile.ZipFile(wheel).namelist()), IN_WHEEL, wheel)
    with tarfile.open(source) as archive:
        require({name.partition("/")[2] for name in archive.getnames()}, IN_SOURCE, source)
    print(f"{wheel.name} and {source.name} are whole; gradsync {install_and_import(wheel)} imports")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
