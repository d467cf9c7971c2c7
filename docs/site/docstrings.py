"""Docstrings as Markdown. They are written to be read in the source, with Sphinx's roles and literal blocks."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`([^`]+)`")
# A page of the documentation, as it is named in the source.
PAGE = re.compile(r"\bdocs/([\w-]+)\.md\b")
# What is not indented, directly followed by what is: a name and what it stands for.
TERM = re.compile(r"^(?P<term>[^\s`|*-].*)\n(?P<first> {4}\S.*(?:\n {4}.*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites every docstring of a package once all of it is read: a name may stand for what comes further down."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        _rewrite(pkg)


def _rewrite(obj: griffe.Object) -> None:
    if obj.docstring is not None:
        obj.docstring.value = to_markdown(obj.docstring.value, obj)
    for member in obj.members.values():
        if isinstance(member, griffe.Object):
            _rewrite(member)


def to_markdown(text: str, obj: griffe.Object) -> str:
    paragraphs = re.split(r"\n{2,}(?! )", text)
    return "\n\n".join(_paragraph(paragraph, obj) for paragraph in paragraphs)


def _paragraph(text: str, obj: griffe.Object) -> str:
    head, literal, block = _literal(text)
    if not literal:
        head = TERM.sub(_definition, head)
    # From a page of the reference.
    head = PAGE.sub(r"[docs/\1.md](../\1.md)", head)
    return ROLE.sub(lambda role: _reference(role[1], obj), head) + block


def _literal(text: str) -> tuple[str, bool, str]:
    """What stands before a literal block, whether there is one, and the block."""
    found = re.search(r"(?P<before>^|\S)::\n\n(?= )", text, re.MULTILINE)
    if found is None:
        return text, False, ""
    head = text[: found.end("before")] + (":" if found["before"] else "")
    block = text[found.end() :].rstrip()
    indent = min(len(line) - len(line.lstrip()) for line in block.splitlines() if line.strip())
    lines = [line[indent:] for line in block.splitlines()]
    return head, True, "\n\n```text\n" + "\n".join(lines) + "\n```\n"


def _definition(found: re.Match[str]) -> str:
    lines = [line[4:] for line in found["first"].splitlines()]
    term = found["term"] if "`" in found["term"] else f"`{found['term']}`"
    return f"{term}\n:   " + "\n    ".join(lines) + "\n"


def _reference(name: str, obj: griffe.Object) -> str:
    """A link where the reference has the name, and otherwise the name alone."""
    shown = name.removeprefix("~").rpartition(".")[2] if name.startswith("~") else name
    path = name.removeprefix("~")
    if not path.startswith("gradsync."):
        first, dot, rest = path.partition(".")
        try:
            path = obj.resolve(first) + dot + rest
        except griffe.NameResolutionError:
            return f"`{shown}`"
    return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'
