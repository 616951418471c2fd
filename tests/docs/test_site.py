"""The site: built strictly, without the network; names, paths, links and citations that hold."""

import copy
import importlib
import importlib.util
import logging
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.docs.figures import BENCHMARKS, expected, faults, figures, recorded
from tests.docs.pages import PAGES, README, ROOT, anchors, generator, inline, named
from tests.kafka_broker import missing

ROOMS = ("accounting", "state", "dp_transforms", "pipelines")
MECHANISM = ROOT / "docs" / "design" / "mechanism.md"
#: Dotted names that are no modules: schema metadata, and a file.
TABLES = {"dpstream.budget", "dpstream.allotments"}  # of statements
NO_MODULES = TABLES | {"dpstream.partition", "dpstream.offset", "dpstream.json"}


def build(config: Path, site: Path) -> None:
    """Build a site strictly, in this process, where the program is loaded already.

    Raises:
        SystemExit: a link leads nowhere, or whatever else MkDocs warns of.
    """
    if importlib.util.find_spec("mkdocs") is None:
        missing("mkdocs is missing (pip install 'dpstream[docs]')")
    silent = logging.root.manager.disable
    logging.disable(logging.NOTSET)  # strictness counts warnings that are logged
    try:
        with warnings.catch_warnings(), mock.patch.dict(os.environ, {"NO_MKDOCS_2_WARNING": "1"}):
            warnings.simplefilter("ignore")
            from mkdocs.commands.build import build as build_site
            from mkdocs.config import load_config

            loaded_config = load_config(str(config), strict=True, site_dir=str(site))
            loaded_config.plugins.on_startup(command="build", dirty=False)
            build_site(loaded_config)
    finally:
        logging.disable(silent)


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nplugins: []\n")
    page = tmp_path / "docs" / "index.md"
    page.write_text("# A\n")
    build(tmp_path / "mkdocs.yml", tmp_path / "site")
    page.write_text("# A\n[b](b.md)\n")
    with pytest.raises(SystemExit, match="strict"):
        build(tmp_path / "mkdocs.yml", tmp_path / "site")


def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    build(ROOT / "mkdocs.yml", tmp_path)
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert len(pages) > 40
    for path, text in pages.items():
        assert "<!-- generate" not in text, path.name
        urls = loaded(text)
        assert not urls, (path.name, urls)
    reference = tmp_path / "reference"
    for page, word in {"cli": "--metrics-port", "api": "load_job", "project-file": "contributions",
                       "metrics": "dpstream_steps_committed_total", "errors": "budget.delta",
                       "release-schema": "window_start"}.items():  # fmt: skip
        assert word in (reference / f"{page}.html").read_text(), page


def loaded(html: str) -> list[str]:
    """What a browser would fetch from elsewhere to show a page."""
    tags = re.findall(r"<(?:img|script|link|iframe|source)\b[^>]*>", html)
    return [tag for tag in tags if re.search(r"(?:src|href)=[\"']?(?:https?:)?//", tag)
            and "canonical" not in tag]  # fmt: skip


def test_what_is_loaded_from_elsewhere_is_seen() -> None:
    assert loaded('<link rel="stylesheet" href="https://fonts.example/x.css">')
    assert loaded('<img src="//x.example/y.png">') and not loaded('<img src="a/b.png">')


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r" ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert {f"docs/{name}" for name in navigation} == {named(p) for p in PAGES if p != README}


def test_every_page_says_first_who_needs_it() -> None:
    pages = {named(p): p.read_text() for p in PAGES if p.name not in ("README.md", "index.md")}
    assert [name for name, text in pages.items() if not re.match(r"# .*\n\nFor ", text)] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


LINKED = [*PAGES, ROOT / "SECURITY.md", ROOT / "deploy" / "README.md"]


@pytest.mark.parametrize("path", LINKED, ids=named)
def test_links_lead_somewhere_in_the_repository_too(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        destination = (path.parent / file) if file else path
        if target.endswith("dpstream.schema.json"):
            continue
        assert destination.exists(), target
        assert not anchor or anchor in anchors(destination.read_text()), target


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or something that one has."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            thing: object = importlib.import_module(".".join(parts[:size]))
        except ImportError:
            continue
        for part in parts[size:]:
            if not hasattr(thing, part):
                return False
            thing = getattr(thing, part)
        return True
    return False


@pytest.mark.parametrize("path", LINKED, ids=named)
def test_names_of_modules_and_paths_exist(path: Path) -> None:
    text = path.read_text()
    names = set(re.findall(r"\bdpstream(?:\.[A-Za-z_]\w*)+", text)) - NO_MODULES
    names = {n for n in names if n.rsplit(".", 1)[1] not in ("html", "toml", "db", "key")}
    assert not {name for name in names if not resolves(name)}
    starts = (*(f"{room}/" for room in ROOMS), "tests/", "deploy/", "docs/")
    paths = {span.split("::")[0] for span in inline(text) if span.startswith(starts)}
    assert not {p for p in paths if " " not in p and not (ROOT / p).exists()}


def test_a_name_that_is_gone_is_seen() -> None:
    assert resolves("dpstream.load_job") and resolves("dpstream.accounting")
    assert not resolves("dpstream.accounting.none") and not resolves("dpstream.load_jobs")


def citations(text: str) -> Iterator[tuple[str, int]]:
    """(section or rule, number) of what a source cites of mechanism.md."""
    plain = re.sub(r"\s+(?:#:?\s*)?", " ", text)
    pattern = r"mechanism\.md,?\s\(?(section|rule)?s?\s?(\d+(?:(?:,| and| to) \d+)*)"
    for kind, numbers in re.findall(pattern, plain):
        first, *others = (int(n) for n in re.findall(r"\d+", numbers))
        span = range(first, others[0] + 1) if " to " in numbers else (first, *others)
        yield from ((kind or "section", number) for number in span)
    for number in re.findall(r"rule (\d+) of mechanism\.md", plain):
        yield "rule", int(number)


def test_what_the_code_cites_of_the_mathematics_is_there() -> None:
    text = MECHANISM.read_text()
    there = {("section", int(n)) for n in re.findall(r"^## (\d+)\. ", text, re.M)}
    there |= {("rule", int(n)) for n in re.findall(r"^### Rule (\d+)\. ", text, re.M)}
    sources = [p for room in (*ROOMS, "tests") for p in (ROOT / room).rglob("*.py")
               if p.parent != Path(__file__).parent]  # fmt: skip
    references = {(named(p), c) for p in sources for c in citations(p.read_text())}
    assert len(references) >= 25
    assert not {(name, cited) for name, cited in references if cited not in there}
    assert there >= {("section", n) for n in range(1, 10)} | {("rule", n) for n in range(11)}


def test_no_text_is_cited_that_is_not_in_the_repository() -> None:
    there = {path.name for path in LINKED}
    sources = [p for room in (*ROOMS, "tests", "deploy") for p in (ROOT / room).rglob("*.py")]
    cited = {(named(p), name) for p in sources if p.parent != Path(__file__).parent
             for name in re.findall(r"\b([\w-]+\.md)\b", p.read_text())}  # fmt: skip
    assert any(name == "mechanism.md" for _, name in cited)
    assert not {(path, name) for path, name in cited if name not in there}


def test_citations_are_read() -> None:
    text = "(mechanism.md section\n#: 4), mechanism.md rules 0 to 2, mechanism.md sections 4 and 8"
    assert set(citations(text + " rule 1 of mechanism.md, mechanism.md, rule 7")) == {
        ("section", 4), ("section", 8), ("rule", 0), ("rule", 1), ("rule", 2), ("rule", 7)
    }  # fmt: skip


def test_every_field_of_the_project_file_has_a_meaning() -> None:
    """And no meaning is of a key that is gone."""
    made = generator()
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", made.project_file(), re.M)
    assert len(rows) > 60 and not [key for key, words in rows if not words.strip()]
    keys = {key for key, _ in rows}
    assert not [key for table in made.meanings().values() for key in table if key not in keys]


def test_every_column_of_a_release_has_a_meaning() -> None:
    made = generator()
    named_here = [n for n in made.RELEASE_COLUMNS if f"`{n}`" not in made.release_schema()]
    assert not named_here and "`flights_sd`" in made.release_schema()


def test_every_term_of_the_glossary_stands_once_and_in_order() -> None:
    text = (ROOT / "docs" / "start" / "glossary.md").read_text()
    terms = [t.lower() for t in re.findall(r"^\| \*\*(.+?)\*\*", text, re.M)]
    assert len(terms) > 50 and terms == sorted(set(terms))


# Every figure of README and docs has a command, and the commands run in a clean clone.


CONTENT = recorded()
#: Seconds that the small form of a command may take on a busy machine.
MOST_SECONDS = 900


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_figure_has_a_command(path: Path) -> None:
    """Where this fails: name the command of a new figure in tests/bench/figures.json (`documents`),
    or the page's constant (`constants`), or measure a changed one again."""
    assert faults(CONTENT, named(path), path.read_text()) == []


def test_the_file_is_whole() -> None:
    """Each command says when it was recorded and how it is run small; no page is gone."""
    used = {command for commands in CONTENT["documents"].values() for command in commands}
    assert used == set(CONTENT["commands"])
    for command, entry in CONTENT["commands"].items():
        assert set(entry) == {"recorded", "small"} and all(entry.values()), command
    assert {*CONTENT["documents"], *CONTENT["constants"]} <= set(map(named, PAGES))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("5.0 times its keys", "5.2 times its keys"),
        ("1,034,000 records/s", "1,134,000 records/s"),
        ("median 0.16 s", "median 0.15 s"),
        ("54% less", "57% less"),
        ("## Documentation", "A run takes 12 seconds and 3 GiB.\n\n## Documentation"),
        ("## Documentation", "It is 20 times faster.\n\n## Documentation"),
        ("## Documentation", "|a|CPU|\n|---|---|\n|b|7|\n\n## Documentation"),
    ],
)
def test_a_changed_or_new_figure_is_seen(old: str, new: str) -> None:
    page = README.read_text()
    assert faults(CONTENT, "README.md", page) == [] and old in page
    assert faults(CONTENT, "README.md", page.replace(old, new))


def test_a_figure_that_is_gone_is_seen() -> None:
    content = copy.deepcopy(CONTENT)
    content["constants"].setdefault("README.md", []).append("12 s")
    assert faults(content, "README.md", README.read_text()) == ["README.md: '12 s' is not there"]


def test_what_counts_as_a_figure() -> None:
    page = (
        "It is 3 times as fast, 40% smaller and takes 0.2 CPU seconds; `5 times` is code, C = 3 a "
        "parameter, [2 GiB](x-3%.md) a link.\n\n```sh\nsleep 9 s\n```\n\n| a | b |\n|---|---|\n"
        "| 1 % | 2 |\n\n| of | seconds |\n|---|---|\n| 7 users | 1.5 / 2 |\n"
    )
    assert figures(page) == Counter(
        ["3 times", "40%", "0.2 CPU seconds", "2 GiB", "1 %", "1.5 / 2"]
    )
    assert figures(page, all_tables=True)["2"] == 1
    assert sum(expected(CONTENT, BENCHMARKS).values()) > 200


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of HEAD with an environment of its own, and the Prism that it builds."""
    folder = tmp_path_factory.mktemp("clean") / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    env = {**os.environ, "PYTHONPATH": ""}
    python = sys.executable
    for target in (".venv/.ready", "prism"):
        subprocess.run(["make", target, f"PYTHON={python}"], cwd=folder, env=env, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", CONTENT["commands"])
def test_commands_run_in_a_clean_clone(clone: Path, command: str) -> None:
    """In a small form, which prints the figures in seconds: that they can be had, not their
    values, which are of one machine."""
    words = shlex.split(CONTENT["commands"][command]["small"])
    env = {**os.environ, "PATH": os.pathsep.join([str(clone / ".venv/bin"), os.environ["PATH"]])}
    env.pop("PYTHONPATH", None)
    ran = subprocess.run(
        words, cwd=clone, env=env, capture_output=True, text=True, check=False, timeout=MOST_SECONDS
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
