"""Pages: every block of code runs, every notebook too."""

import contextlib
import importlib.util
import io
import os
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import click
import duckdb
import nbformat
import pytest
import tomlkit
from click.testing import CliRunner
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

import dpstream
from dpstream.accounting.budget.allocation import allocate
from dpstream.state import open as stores
from tests.docs.pages import PAGES, README, ROOT, blocks, generator, inline, lines, named

CLI: click.Group = generator().found("command")
FIRST_JOB = ROOT / "docs" / "start" / "first-job.md"
WITH_RUNS = [p for p in PAGES if any(b.mark == "run" for b in blocks(p.read_text()))]
#: Pages whose blocks go on where the README's job has run.
AFTER_README = [p for p in WITH_RUNS if p not in (README, FIRST_JOB)]


#: Accounts that a page makes have the ids that the page names, in their order.
IDS = list[str]()
_ID = r'(?:\bid ?= ?"|--account-id )([0-9a-f]{16})\b'


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("dpstream.state.ledger.open.new_id", lambda: IDS.pop(0))
    yield
    stores.close_all()


def printed(words: list[str]) -> str:
    """Call a command as a shell would; gives what it said."""
    result = CliRunner().invoke(CLI, words)
    assert result.exit_code == 0, (words, result.output)
    return result.output


def run(path: Path, language: str, text: str, ran: list[list[str]]) -> str:
    """Run a block in the current folder, but for commands that were run there already; gives what
    they said."""
    output = ""
    if language == "sh":
        for words in lines(text):
            if words[0] == "cd":
                os.chdir(words[1])
                continue
            assert words[0] == "dpstream", f"{named(path)}: only dpstream is run"
            if words not in ran:
                output += printed(words[1:])
                ran.append(words)
    elif language == "sql":
        relation = duckdb.sql(text)
        assert relation is not None and relation.fetchall(), named(path)
    else:
        assert language == "python", f"{named(path)}: nothing runs {language}"
        Path("shown.py").write_text(text)
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            runpy.run_path("shown.py")
        output = stream.getvalue()
    return output


def without_numbers(text: str) -> set[str]:
    """Lines without the numbers, which are drawn anew each time, and the spaces that align them."""
    return {" ".join(re.sub(r"\b\d+(\.\d+)?\b", "0", line).split()) for line in text.splitlines()}


def run_page(path: Path, ran: list[list[str]]) -> None:
    output, named_ids = "", re.findall(_ID, path.read_text())
    IDS[:] = [*dict.fromkeys(named_ids), f"{len(ran):016x}"]  # the last is of one that is not named
    for mark, language, text in blocks(path.read_text()):
        what, _, name = mark.partition(": ")
        if mark == "run":
            output = run(path, language, text, ran)
        elif mark == "said":
            assert set(text.splitlines()) <= set(output.splitlines()), output
        elif mark == "prints":
            assert without_numbers(text) <= without_numbers(output), output
        elif what == "file":
            file = Path(name)
            assert not file.exists() or file.read_text() == text, f"{named(path)}: another {file}"
            file.write_text(text)
        elif what == "add":  # sections that a guide adds to the project file
            before = Path(name).read_text()
            if text not in before:
                Path(name).write_text(f"{before}\n{text}")
        elif what == "shows":  # what a command wrote, with other comments
            assert tomllib.loads(text) == tomllib.loads(Path(name).read_text()), named(path)


def test_what_is_marked_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first job; then README, which shows the same job; then the guides, on that folder."""
    monkeypatch.chdir(tmp_path)
    ran: list[list[str]] = []
    run_page(FIRST_JOB, ran)
    again, releases = (
        {f.name: f.read_bytes() for f in sorted((tmp_path / d).rglob("trigger-*"))}
        for d in ("again", "releases/daily")
    )
    assert len(releases) == 4 and again == releases and (tmp_path / "daily.report.html").exists()
    first_job = Path("dpstream.toml").read_text()
    for path in (README, *AFTER_README):
        # A guide adds data sets, and commands of the next need --data-set where there are several.
        Path("dpstream.toml").write_text(first_job)
        with contextlib.chdir("."):
            run_page(path, ran)
    assert len(AFTER_README) >= 3 and len(ran) >= 8


#: What says where a table's records come from; of several the fragment's counts.
PLACES = {"path", "folder", "topic", "subscription"}


def whole_project(text: str) -> str:
    """README's project file with the fields of a fragment in the place of its own."""
    base = next(b.text for b in blocks(README.read_text()) if b.mark == "shows: dpstream.toml")
    sections, given = tomllib.loads(base), tomllib.loads(text)
    for kind, name in ((kind, name) for kind, names in given.items() for name in names):
        own = sections[kind].setdefault(name, {})
        if kind == "table" and PLACES & set(given[kind][name]):
            for field in PLACES:
                own.pop(field, None)
            if "path" not in given[kind][name]:
                sections["job"]["daily"]["max_skew"] = "1s"
        own |= given[kind][name]
    return tomlkit.dumps(sections)


TOML = [(named(p), b) for p in PAGES for b in blocks(p.read_text()) if b.language == "toml"]
#: Fragments of the project file that a page shows; what is added or shown whole is run.
FRAGMENTS = [(page, block.text) for page, block in TOML if not block.mark]


@pytest.mark.parametrize(
    ("page", "text"), FRAGMENTS, ids=[f"{page}-{i}" for i, (page, _) in enumerate(FRAGMENTS)]
)
def test_fragments(page: str, text: str, tmp_path: Path) -> None:
    project = tmp_path / "dpstream.toml"
    project.write_text(whole_project(text))
    values = allocate(dpstream.load_job(project, "daily").plan).values
    assert values and all((noise.sd > 0).all() for noise in values)


def test_a_fragment_that_is_wrong_is_refused(tmp_path: Path) -> None:
    project = tmp_path / "dpstream.toml"
    wrong = '[job.daily]\nsink = { kind = "bigquery", tabel = "p.d.t" }\n'
    project.write_text(whole_project(wrong))
    with pytest.raises(dpstream.UsageError):
        dpstream.load_job(project)


def leaf(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words name, and what is left of them."""
    command: click.Command = CLI
    while isinstance(command, click.Group) and words:
        subcommand = command.commands.get(words[0])
        assert subcommand is not None, words
        command, words = subcommand, words[1:]
    return command, words


def options(command: click.Command) -> set[str]:
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}


def unknown(words: list[str]) -> list[str]:
    """Flags that the command does not have; Beam's may follow `run`."""
    command, rest = leaf(words)
    passed = command.context_settings.get("ignore_unknown_options")
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    return [f for f in flags if f not in options(command) and not passed]


def check(words: list[str]) -> None:
    """A command line of a block that is not run."""
    if words[0] == "dpstream":
        command, rest = leaf(words[1:])
        assert not isinstance(command, click.Group), words
        command.make_context("dpstream", list(rest), help_option_names=["-h", "--help"])
    elif words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(words[1:]) <= set(targets), words
    elif words[0] == "python" and words[1] != "-m" and "/" in words[1]:
        assert (ROOT / words[1]).exists(), words
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None, words


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_commands_that_are_shown(path: Path) -> None:
    text = path.read_text()
    for block in blocks(text):
        assert block.language in ("sh", "toml", "python", "sql", "json", ""), "say what a block is"
        assert "dpstream " not in block.text or block.language in ("sh", "toml", "python")
        for words in lines(block.text) if block.language == "sh" else ():
            check(words)
        if block.language == "python":
            compile(block.text, named(path), "exec")
    for span in inline(text):
        if re.match(r"dpstream [a-z]+\b(?! \.\.\.)", span) and "..." not in span:
            assert not unknown(span.split()[1:]), span
        if span.startswith(("make ", "python deploy/", "python -m ")):
            check(span.split("; ")[0].split())


@pytest.mark.parametrize(
    "line", ["dpstream plam daily", "dpstream plan a b c", "dpstream secret new", "make tests",
             "python deploy/none.py", "python -m tests.bench.none"],
)  # fmt: skip
def test_a_command_that_is_wrong_is_seen(line: str) -> None:
    with pytest.raises((AssertionError, click.UsageError)):
        check([*line.split(), "--none"] if line == "dpstream secret new" else line.split())


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
#: Of a figure, which noise changes.
_NUMBER = re.compile(r"-?[0-9][0-9,]*(\.[0-9]+)?")


def executed(notebook: Any, folder: Path) -> Any:
    """The notebook with what its cells say in an empty folder."""
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}})
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":  # neither warnings of libraries, nor pages of theirs
            cell.outputs = [out for out in cell.outputs if _is_ours(out)]
    return notebook


def _is_ours(output: Any) -> bool:
    return output.get("name") == "stdout" or output.output_type == "execute_result"


def outputs_of(notebook: Any) -> list[list[tuple[str, set[str]]]]:
    """Of each cell's outputs their kind and their words, without figures."""
    cells = []
    for cell in notebook.cells:
        outputs = []
        for output in cell.get("outputs", ()):
            text = output.get("text") or output["data"]["text/plain"]
            outputs.append((output.output_type, set(_NUMBER.sub("", text).split())))
        cells.append(outputs)
    return cells


def merged(cells: list[list[tuple[str, set[str]]]]) -> list[dict[str, set[str]]]:
    """Words by kind: how a kernel cuts what is printed is its own affair."""
    return [{kind: set().union(*(w for k, w in cell if k == kind)) for kind, _ in cell}
            for cell in cells]  # fmt: skip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_shows_what_it_shows(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    before = merged(outputs_of(notebook))
    after = executed(notebook, tmp_path)
    if os.environ.get("REWRITE"):
        nbformat.write(after, path)
        return
    assert merged(outputs_of(after)) == before
    assert not re.search(r"https?:|/tmp/|site-packages", path.read_text())


def test_there_are_notebooks_and_a_cell_that_fails_is_seen(tmp_path: Path) -> None:
    assert len(NOTEBOOKS) >= 2
    with pytest.raises(CellExecutionError):
        executed(new_notebook(cells=[new_code_cell("1 / 0")]), tmp_path)
