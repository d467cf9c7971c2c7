"""The site of the documentation: it builds without a network, its links lead somewhere, nothing comes from others.

It is built once, by the program that `make docs` runs, with every connection refused.
"""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest

import gradsync
from tests.browser import browse, needs_chromium
from tests.pages import PAGES, ROOT

pytestmark = [pytest.mark.program, pytest.mark.timeout(180), pytest.mark.xdist_group("site")]

missing = [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]
if missing:
    pytest.skip(f"{missing[0]} is missing: pip install -r requirements/docs.txt", allow_module_level=True)

# Builds with a Python in which nothing can be connected to.
OFFLINE = """
import runpy, socket, sys
def refuse(self, address):
    raise OSError(f"the site wants to connect to {address}")
socket.socket.connect = socket.socket.connect_ex = refuse
sys.argv = ["mkdocs", *sys.argv[1:]]
runpy.run_module("mkdocs", run_name="__main__")
"""
# Modules whose public names are in the reference, all of them.
DOCUMENTED = (
    "gradsync",
    "gradsync.accelerator",
    "gradsync.communicator",
    "gradsync.errors",
    "gradsync.lab",
    "gradsync.lightning",
    "gradsync.reduction",
    "gradsync.testing",
    "gradsync.transformers",
    "gradsync.utils",
)
# Tags that load what they name, and the attribute that names it.
LOADING = {"audio": "src", "embed": "src", "iframe": "src", "img": "src", "input": "src", "script": "src"}
LOADING |= {"link": "href", "object": "data", "source": "src", "track": "src", "video": "src"}
# Links of a page's head that are words about it: nothing is loaded for them.
WORDS = {"canonical", "next", "prev", "author", "license"}


@dataclass
class Parsed(HTMLParser):
    """What a page defines, what it links to, and what it loads."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        loaded = given.get(LOADING.get(tag, ""), "")
        if loaded and not (tag == "link" and given.get("rel") in WORDS):
            self.loads.append(loaded)
        if "srcset" in given:
            self.loads += [part.split()[0] for part in given["srcset"].split(",")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(text: str) -> Parsed:
    page = Parsed()
    page.feed(text)
    return page


def build(configuration: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", OFFLINE, "build", "--strict", "--config-file", str(configuration)]
    return subprocess.run(
        [*command, "--site-dir", str(site)],
        cwd=configuration.parent,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    answer = build(ROOT / "mkdocs.yml", folder)
    assert answer.returncode == 0, answer.stderr
    assert "WARNING" not in answer.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Parsed]:
    return {path: parse(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def broken(pages: dict[Path, Parsed]) -> Iterator[str]:
    """Links into the site that lead nowhere."""
    for path, page in pages.items():
        # Its links are meant for whatever address was not found.
        if path.name == "404.html":
            continue
        for link in {*page.links, *page.loads}:
            if urlsplit(link).scheme in ("http", "https", "mailto", "data"):
                continue
            address, anchor = urldefrag(urljoin(path.as_uri(), link))
            target = Path(unquote(urlsplit(address).path))
            if not target.is_file():
                yield f"{path.name} links to {link}"
            elif anchor and target in pages and unquote(anchor) not in pages[target].ids:
                yield f"{path.name} links to {link}, which has no such place"


def from_others(text: str, page: Parsed) -> list[str]:
    """What a page, or a style that stands in it, loads from another host."""
    found = [
        *page.loads,
        *re.findall(r"url\(\s*['\"]?([^'\")]+)", text),
        *re.findall(r"@import\s+['\"]([^'\"]+)", text),
    ]
    return [link for link in found if urlsplit(link).netloc]


def test_every_page_of_the_docs_is_there(site: Path) -> None:
    written = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in PAGES if path.parent != ROOT}
    examples = {Path("examples") / f"{path.stem}.html" for path in (ROOT / "examples").glob("*.py")}
    others = {Path("changes.html"), Path("contributing.html"), Path("security.html")}
    assert {path for path in written | examples | others if not (site / path).is_file()} == set()


def test_links_and_places_in_pages_exist(pages: dict[Path, Parsed]) -> None:
    assert sum(len(page.links) for page in pages.values()) > 2000
    assert list(broken(pages)) == []


def test_a_link_that_leads_nowhere_is_seen(pages: dict[Path, Parsed], site: Path) -> None:
    text = '<a href="nowhere.html">a</a><a href="index.html#nowhere">b</a><a href="index.html#install">c</a>'
    assert len(list(broken(pages | {site / "wrong.html": parse(text)}))) == 2


def test_nothing_is_loaded_from_other_hosts(site: Path, pages: dict[Path, Parsed]) -> None:
    found = {path.name: from_others(path.read_text(encoding="utf-8"), page) for path, page in pages.items()}
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        found[path.name] = from_others(path.read_text(encoding="utf-8"), Parsed())
    assert {name: links for name, links in found.items() if links} == {}
    # The theme would fetch the program that draws these, and ask a host of repositories for their stars.
    assert [path.name for path in pages if re.search(r'class="[^"]*(mermaid|md-source\b)', path.read_text())] == []
    loads = '<link rel="stylesheet" href="https://a.b/c.css"><img src="//a.b/c.png"><style>@import "http://a.b"</style>'
    assert len(from_others(loads, parse(loads))) == 3


def test_the_reference_has_every_public_name(site: Path, pages: dict[Path, Parsed]) -> None:
    reference = {name for path, page in pages.items() if path.parent == site / "reference" for name in page.ids}
    assert len(reference) > 300
    # A name may be shown where another module has it.
    shown = {id(value) for value in map(named, reference) if value is not None}
    absent = [
        f"{module.__name__}.{name}"
        for module in map(importlib.import_module, DOCUMENTED)
        for name in module.__all__
        if f"{module.__name__}.{name}" not in reference and id(getattr(module, name)) not in shown
    ]
    # The one heading that is written by hand: a text has no docstring.
    assert absent == ["gradsync.__version__"]
    assert "gradsync.__version__" in "".join(pages[site / "reference/wrappers.html"].text)


def named(path: str) -> object:
    """What has this name, or None."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def test_docstrings_read_as_pages(site: Path, pages: dict[Path, Parsed]) -> None:
    """Nothing of the way they are marked in the source is left."""
    left = re.compile(r":(?:class|meth|func|attr|mod|data):|``|^\s*::\s*$", re.MULTILINE)
    texts = {path.name: "".join(page.text) for path, page in pages.items() if path.parent == site / "reference"}
    assert {name: left.findall(text) for name, text in texts.items() if left.search(text)} == {}
    assert 'href="#gradsync.SyncPolicy"' in (site / "reference/wrappers.html").read_text()
    words = " ".join(texts["wrappers.html"].split())
    assert (gradsync.synchronize_gradients.__doc__ or "").split("\n")[0].split("`")[0].strip() in words


def test_the_command_line_has_every_command_and_option(site: Path) -> None:
    from typer.main import get_command

    from gradsync.tools.cli.main import app

    page = parse((site / "reference/command-line.html").read_text())
    words = set("".join(page.text).split())
    text = " ".join("".join(page.text).split())
    seen = 0
    waiting = [("gradsync", get_command(app))]
    while waiting:
        line, command = waiting.pop()
        assert line in text
        for parameter in command.params:
            if parameter.param_type_name == "option" and "--help" not in parameter.opts:
                assert {option.strip() for option in parameter.opts} <= {word.rstrip(",") for word in words}, line
                seen += 1
        waiting += [(f"{line} {name}", child) for name, child in getattr(command, "commands", {}).items()]
    assert seen > 30


def test_the_search_has_all_pages(site: Path, pages: dict[Path, Parsed]) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {path.relative_to(site).as_posix() for path in pages} - found == {"404.html"}
    # Pages on the disk cannot read another file, so they load it as a script.
    assert (site / "search/search_index.js").read_text().startswith("var __index = {")


@needs_chromium
def test_the_search_finds_something_in_a_page_on_the_disk(site: Path, tmp_path: Path) -> None:
    address = f"{(site / 'index.html').as_uri()}?q=feedback"
    dom, console = browse(address, tmp_path, "--dump-dom", "--host-resolver-rules=MAP * ~NOTFOUND")
    assert console == []
    assert "compression.html" in "".join(re.findall(r'class="md-search-result__link"[^>]*|href="[^"]*h=[^"]*"', dom))
    dom, _ = browse(address.replace("feedback", "zzyzx"), tmp_path, "--dump-dom")
    assert "md-search-result__item" not in dom


@needs_chromium
@pytest.mark.parametrize("words", ["no_sync", "no_sync()"])
def test_a_search_for_no_sync_finds_the_page_that_explains_it_first(site: Path, tmp_path: Path, words: str) -> None:
    dom, _ = browse(f"{(site / 'index.html').as_uri()}?q={words}", tmp_path, "--dump-dom")
    found = re.findall(r'href="([^"?]*)\?h=[^"#]*(#[^"]*)?"', dom)
    pages = [Path(address).name for address, _ in found]
    assert pages[0] == "accumulation.html"
    assert "#no_sync-skip-synchronization" in {anchor for page, anchor in found if page.endswith("accumulation.html")}
    # It is found by others, too, and behind: benchmarks use the name most often.
    others = [page for page in pages if page != "accumulation.html"]
    assert others
    assert others[0] != "benchmarks.html"


def test_what_is_wrong_is_not_built(tmp_path: Path) -> None:
    """A check that finds nothing anywhere would pass on anything."""
    (tmp_path / "docs").mkdir()
    settings = (ROOT / "mkdocs.yml").read_text()
    short = re.sub(r"^nav:.*", "", settings, flags=re.DOTALL | re.MULTILINE)
    short = re.sub(r"^(hooks|extra_css):.*\n", "", short, flags=re.MULTILINE)
    short = short.replace("docs/site/docstrings.py", str(ROOT / "docs/site/docstrings.py")).replace(
        "[src]", f"[{ROOT / 'src'}]"
    )
    (tmp_path / "mkdocs.yml").write_text(short)

    def built(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "docs/index.md").write_text(f"# A page\n\n{text}\n")
        return build(tmp_path / "mkdocs.yml", tmp_path / "site")

    links = built("[a](nowhere.md) [b](#no-place) [`c`][gradsync.NoName]")
    assert links.returncode != 0
    assert [name for name in ("nowhere.md", "no-place", "gradsync.NoName") if name not in links.stderr] == []
    names = built("::: gradsync.Nothing")
    assert names.returncode != 0
    assert "gradsync.Nothing" in names.stderr
    right = built("::: gradsync.Timeline\n\n[`c`][gradsync.Timeline]")
    assert right.returncode == 0, right.stderr


@pytest.mark.parametrize("script", ["overlap", "packages", "path", "window"])
def test_pictures_are_what_their_scripts_draw(tmp_path: Path, script: str) -> None:
    for name in ("drawing.py", f"{script}.py"):
        (tmp_path / name).write_text((ROOT / "docs/pictures" / name).read_text())
    subprocess.run([sys.executable, f"{script}.py"], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / f"{script}.svg").read_text() == (ROOT / f"docs/pictures/{script}.svg").read_text()


def test_the_picture_of_the_packages_has_every_package() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {tuple(contract.get("containers", ())): contract.get("layers", []) for contract in contracts}
    packages = [each for layer in layers["gradsync",] for each in re.split(r"\s*\|\s*", layer)]
    packages += [f"core.{layer}" for layer in layers["gradsync.core",]]
    drawn = re.findall(r">([\w.]+)</text>", (ROOT / "docs/pictures/packages.svg").read_text())
    assert len(packages) > 18
    # Of core its parts are drawn.
    assert {*packages} - {*drawn} == {"__main__", "core"}, "docs/pictures/packages.py draws them"
