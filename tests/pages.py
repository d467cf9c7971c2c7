"""The pages of README and docs, and the blocks of code in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r"# (?P<name>\w+\.py)\n")


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    page: str
    language: str
    code: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def script(self) -> str | None:
        """The name of the file that the block is, where its first line says so."""
        found = SCRIPT.match(self.code)
        return found["name"] if found else None

    @property
    def after_change(self) -> str:
        """Of a diff what it leads to."""
        return "".join(line[1:] for line in self.code.splitlines(keepends=True) if not line.startswith("-"))


def blocks(*languages: str) -> list[Block]:
    """Those of the languages, or all, page by page."""
    return [
        Block(
            page=page.name if page.parent == ROOT else page.relative_to(ROOT / "docs").as_posix(),
            language=found["language"],
            code=found["code"],
            line=text.count("\n", 0, found.start()) + 1,
        )
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for found in BLOCK.finditer(text)
        if not languages or found["language"] in languages
    ]
