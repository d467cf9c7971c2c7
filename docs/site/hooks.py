"""What the site has beside the files of docs/: examples, the files at the root, and the commands with their options.

Pages under docs/ link to files outside of it, as they stand in the repository. In the site these are pages too: an
example with its source, and CHANGELOG, CONTRIBUTING and SECURITY.
"""

import ast
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Where files at the root have their page.
AT_THE_ROOT = {"CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
LINK = re.compile(r"(?<=\]\()([^)#:]+)(?=[)#])")
# How much more, or less, a page counts in a search than others. Pages that explain something come before those that
# use its name often: a name is looked for by people who want to know what it does.
SEARCH_BOOSTS = {"accumulation.md": 3.0, "benchmarks.md": 0.2, "changes.md": 0.2, "fault-tests.md": 0.2}
# A line that stands for what the commands say of themselves, and the page that has it.
COMMANDS, COMMANDS_PAGE = "<!-- commands -->", "reference/command-line.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    # The commands are asked as they are here, not as they were once installed.
    sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in AT_THE_ROOT.items():
        text = LINK.sub(lambda link: from_root(link[1]), (ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.stem}.md", content=example(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    # What the front matter of a page would say, which others than this site would show as text.
    if page.file.src_uri in SEARCH_BOOSTS:
        page.meta["search"] = {"boost": SEARCH_BOOSTS[page.file.src_uri]}
    if page.file.src_uri == COMMANDS_PAGE:
        from commands import describe  # found only now, and torch comes with it

        markdown = markdown.replace(COMMANDS, describe())
    if page.file.generated_by is None:
        markdown = LINK.sub(lambda link: from_docs(link[1]), markdown)
    # GitHub reads Markdown inside, and so is it here if it is asked for.
    return markdown.replace("<details>", "<details markdown>")


def from_root(link: str) -> str:
    """Where a link of a file at the root leads in the site."""
    return AT_THE_ROOT.get(link, link.removeprefix("docs/"))


def from_docs(link: str) -> str:
    """Where a link of a page in docs/ leads in the site, whose pages all have what lies above docs/ among them."""
    outside = link.removeprefix("../")
    if outside == link:
        return link
    if outside in AT_THE_ROOT:
        return AT_THE_ROOT[outside]
    return f"{outside.removesuffix('.py')}.md" if outside.startswith("examples/") else link


def example(path: Path) -> str:
    """A page of an example: what it says of itself, and all of it."""
    source = path.read_text(encoding="utf-8")
    words = ast.get_docstring(ast.parse(source)) or ""
    first, _, rest = words.partition("\n\n")
    return f"# `{path.name}`\n\n{first}\n\n{rest}\n\n```python\n{source.rstrip()}\n```\n"
