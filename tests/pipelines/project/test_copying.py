"""A job's section copied to the end of the project file: places of its own, and the rest stays.

Inline tables that commands write: in one style, whatever the style of the file.
"""

import re
import tempfile
import tomllib
from pathlib import Path

import pytest
import tomlkit
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.project.copying import (
    append_section,
    check_extended,
    copied_section,
    extended,
    inline,
    section_text,
    set_field,
)
from dpstream.pipelines.project.project import load_project
from dpstream.state import open as stores
from tests.golden.refusals import Refused
from tests.pipelines.cli.called import call
from tests.pipelines.drafting import FLAGS, commits
from tests.pipelines.sql.shop import dp
from tests.projects import PROJECT, write_project

IN_ANY_STYLE = """\
version = 1

[data_set.rides]
insecure_test_secret = "KEY"
account = {path="rides.account.db"}  # where budgets are charged

[table.rides]
data_set = "rides"
path = "rides.csv"
dimension.hour = {type="integer",low=0,high=24}
dimension.epsilon = {type="budget",most=2.0,column="budget"}

[data_set.shop]
unit = {name="user"}
insecure_test_secret = "KEY"

[table.visits]
data_set = "shop"
path = "visits.csv"
columns = {page="STRING",seconds="FLOAT64"}
unit_column = "user"
time_column = "at"

[job.daily]
table = "visits"
key = ["page"]
aggregate.views = {kind="count"}
aggregate.seconds = {kind="sum",column="seconds"}
choice = {range={seconds=[0,120]}}
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
release_every = "6h"
budget = {epsilon=4,delta=1e-6,covers="lifetime"}
contributions = 8
sink = {kind="parquet",path="releases"}  # what anybody may see

[job.live]
table = "visits"
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
release_every = "6h"
budget = {covers="lifetime"}
sink = {kind="parquet",path="live"}
""".replace("KEY", "0f" * 32)
RIDES = "hour,budget\n9,1.5\n"
ROWS = "user,page,at,seconds\n" + "".join(
    f"u{i},p{i % 3},2024-01-01T0{i % 9}:00:00Z,{i % 7}\n" for i in range(40)
)
STATEMENT = dp(
    "page, SUM(seconds, contribution_bounds_per_row => (0, 9)) AS total FROM visits GROUP BY page"
)
EDITS = (
    ("table", "init", "rides"),
    ("choose", "daily", "--proxy", "old.csv", "--as", "chosen"),
    ("choose", "daily", "--proxy", "old.csv", "--bounds", "--as", "bounded"),
    ("choose", "chosen", "--proxy", "old.csv", "--as", "again"),
    ("sql", "--stream", "live", STATEMENT, "--emit", "by_page"),
    ("init", "commits.parquet", *FLAGS, "--data-set", "commits"),
)
#: A brace and what is in it, without inner braces, and without an equal table before.
_TABLES = re.compile(r"\{[^{}]*\}")
_WRITTEN = re.compile(r"\{ [^ ](.*[^ ])? \}")


def written_badly(before: str, after: str) -> list[str]:
    """Inline tables of a text that no earlier text has and that are not in the one style."""
    tables = set(_TABLES.findall(after)) - set(_TABLES.findall(before))
    return [t for t in tables if not _WRITTEN.fullmatch(t) or re.search(r",[^ ]| ,", t)]


def laid_out(opening: str, comma: str, equals: str, closing: str) -> str:
    """The project file with this white space in its inline tables."""
    styles = {"{": opening, ",": comma, "=": equals, "}": closing}

    def styled(match: re.Match[str]) -> str:
        return re.sub(r"[{,=}]", lambda sign: styles[sign[0]], match[0])

    return re.sub(r"\{.*\}", styled, IN_ANY_STYLE)


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    st.sampled_from(["{", "{ ", "{  "]),
    st.sampled_from([",", ", ", " , "]),
    st.sampled_from(["=", " = "]),
    st.sampled_from(["}", " }"]),
    st.permutations(EDITS),
)
def test_every_edit_leaves_a_file_that_parses(
    opening: str, comma: str, equals: str, closing: str, edits: list[tuple[str, ...]]
) -> None:
    text = laid_out(opening, comma, equals, closing)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "dpstream.toml"
        path.write_text(text)
        commits(folder / "commits.parquet")
        (folder / "rides.csv").write_text(RIDES)
        (folder / "visits.csv").write_text(ROWS)
        (folder / "old.csv").write_text(ROWS.replace("u1,", "x1,"))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            for edit in edits:
                before = path.read_text()
                outcome = call(*edit)
                stores.close_all()
                if edit[1] != "chosen" or "[job.chosen]" in before:
                    assert outcome.exit_code == 0, outcome.output
                after = path.read_text()
                assert written_badly(text, after) == [], edit
                for comment in ("# where budgets are charged", "# what anybody may see"):
                    assert comment in after
                assert tomllib.loads(after)["job"].keys() >= tomllib.loads(before)["job"].keys()


def test_an_emitted_job_has_a_line_for_each_field(tmp_path: Path) -> None:
    (tmp_path / "dpstream.toml").write_text(IN_ANY_STYLE)
    (tmp_path / "visits.csv").write_text(ROWS)
    words = ("sql", "--stream", "live", STATEMENT, "--emit", "by_page", "--project", tmp_path)
    emitted = call(*words)
    assert emitted.exit_code == 0 and emitted.output.endswith("Releases: by_page\n")
    lines = (tmp_path / "dpstream.toml").read_text().partition("[job.by_page]\n")[2].splitlines()
    assert 'key = [{ column = "page", type = "string" }]' in lines
    assert sum(line.startswith('aggregate.total = { kind = "sum", ') for line in lines) == 1
    assert not any(line.startswith("[") for line in lines)


def test_the_check_sees_bad_tables() -> None:
    for bad in ("{a = 1}", "{ a = 1,b = 2 }", "{ a = 1, b = 2}", "{ a = 1 , b = 2 }", "{ }"):
        assert written_badly("", bad) == [bad] and not written_badly(bad, bad)
    assert written_badly("", "{ a = 1, b = [1, 2] }") == []


def test_values_keep_their_form() -> None:
    """Numbers, comments in lists and odd names stay as they were written."""
    text = "delta=1e-6,size = 0x10 ,list = [1, # one\n 2],'a b'.c = 1"
    document = tomlkit.parse(f"[job]\ntable = {{{text}}} # mine\nother.x = 1\n")
    set_field(document["job"], "table", "added", [0, 1.5])
    set_field(document["job"], "other", "y", 2)
    set_field(document["job"], "new", "z", {"deep": True})
    assert tomlkit.dumps(document) == (
        "[job]\n"
        "table = { delta = 1e-6, size = 0x10, list = [1, # one\n 2], "
        '"a b" = { c = 1 }, added = [0, 1.5] } # mine\n'
        "other.x = 1\nother.y = 2\nnew = { z = { deep = true } }\n"
    )
    assert inline({}).as_string() == "{}"
    assert inline([{"column": "a"}, "b"]).as_string() == '[{ column = "a" }, "b"]'


SINK = 'sink = { kind = "parquet", path = "releases" }\n'
MEAN = 'aggregate.seconds = { kind = "mean", column = "seconds", bounds = [0, 120] }\n'
HEAD, JOB = PROJECT.split("[job.daily]\n")
INLINE = ", ".join(line for line in JOB.splitlines() if line)


def copied(path: Path, job: str = "daily", new: str = "new") -> str:
    """The file with the copy, written as it is."""
    text = path.read_bytes()
    section = copied_section(text, job, new)
    check_extended(text, job, new, section)
    append_section(load_project(path), new, text, section_text(new, section), "--as")
    assert path.read_bytes().startswith(text)
    return path.read_text()


@pytest.mark.parametrize(
    ("old", "new"),
    [("releases", "releases-new"), ("releases/", "releases-new"), ("out/daily", "out/new"),
     ("/var/out/daily", "/var/out/new"), (".", "new"), ("..", "../new"), ("../..", "../../new")],
)  # fmt: skip
def test_the_copy_has_places_of_its_own(old: str, new: str, tmp_path: Path) -> None:
    places = f'store = "spanner://p/i/d"\ndead_letter = "dead/daily"\n{SINK}'
    copied(write_project(tmp_path, (SINK, places.replace('"releases"', f'"{old}"'))))
    made = load_job(tmp_path, "new")
    assert made.sink.path == str(tmp_path / new)
    assert made.state.store == f"sqlite:{tmp_path}/new.store.db"
    assert made.dead_letter == str(tmp_path / "dead_letter" / "new")
    assert made.plan.hash == load_job(tmp_path, "daily").plan.hash
    copied(tmp_path / "dpstream.toml", "new", "newer")
    assert load_job(tmp_path, "newer").sink.path != made.sink.path


@pytest.mark.parametrize(
    ("sink", "field", "new"),
    [('kind = "kafka", topic = "pages.daily", servers = "s:9092"', "topic", "pages.daily-new"),
     ('kind = "kafka", topic = "daily", servers = "s:9092"', "topic", "new"),
     ('kind = "pubsub", topic = "projects/p/topics/t"', "topic", "projects/p/topics/t-new"),
     ('kind = "pubsub", topic = "projects/p/topics/daily"', "topic", "projects/p/topics/new"),
     ('kind = "bigquery", table = "p.d.t"', "table", "p.d.t-new"),
     ('kind = "bigquery", table = "p.d.daily"', "table", "p.d.new")],
)  # fmt: skip
def test_a_service_has_another_topic_or_table(
    sink: str, field: str, new: str, tmp_path: Path
) -> None:
    copied(write_project(tmp_path, (SINK, f"sink = {{ {sink} }}\n")))
    made, old = (load_job(tmp_path, job).sink for job in ("new", "daily"))
    assert getattr(made, field) == new != getattr(old, field)
    assert made.folder is None and (made.kind, made.servers) == (old.kind, old.servers)
    copied(tmp_path / "dpstream.toml", "new", "seals")  # TABLE_seals is the table of another job
    assert getattr(load_job(tmp_path, "seals").sink, field) not in (new, f"{new}_seals")


@pytest.mark.parametrize("end", ["", "\n", "\n\n\n\n", "# the end", "\r\n"])
def test_every_byte_of_the_file_stays(end: str, tmp_path: Path) -> None:
    path = write_project(tmp_path)
    path.write_bytes(PROJECT.rstrip("\n").encode() + end.encode())
    assert copied(path).rstrip("\n").count("\n[job.") == 2
    assert load_project(path).sections.job["new"]["contributions"] == 8


def test_a_file_with_a_byte_order_mark_is_extended(tmp_path: Path) -> None:
    path = write_project(tmp_path)
    path.write_bytes(b"\xef\xbb\xbf" + PROJECT.encode())
    copied(path)
    assert path.read_bytes().startswith(b"\xef\xbb\xbf" + PROJECT.encode().rstrip())
    assert load_project(path).sections.job["new"]["contributions"] == 8


@pytest.mark.parametrize(
    "text",
    [
        PROJECT.replace(SINK, "").replace(MEAN, "")
        + '[table.other]\npath = "x.csv"\npublic = true\n'
        '[job.daily.sink]\nkind = "parquet"\npath = "releases"\n',
        PROJECT.replace(SINK, "")
        .replace(MEAN, "")
        .replace("aggregate.views", "aggregate.views.kind")
        .replace('{ kind = "count" }', '"count"')
        + '[job.daily.sink]\nkind = "parquet"\npath = "releases"\n',
        f"{HEAD}[job]\ndaily = {{ {INLINE} }}\n",
        f"job = {{ daily = {{ {INLINE} }} }}\n{HEAD}",
    ],
    ids=["apart", "dotted", "an inline job", "inline jobs"],
)
def test_a_copy_says_the_same_or_is_refused(text: str, tmp_path: Path) -> None:
    """However a job is laid out, the file is never one that says something else, or nothing."""
    path = tmp_path / "dpstream.toml"
    path.write_text(text)
    before = tomllib.loads(text)
    try:
        after = tomllib.loads(copied(path))
    except UsageError as error:
        assert error.field == "job.daily" and "below one [job.daily]" in error.fix
        assert path.read_text() == text
    else:
        assert after["job"]["daily"] == before["job"]["daily"]
        made = after["job"]["new"]
        assert made.pop("sink")["path"] == "releases-new" and before["job"]["daily"].pop("sink")
        assert made == before["job"]["daily"]


def test_other_jobs_may_have_sections_between_them(tmp_path: Path) -> None:
    more = '[table.other]\npath = "x.csv"\npublic = true\n'
    path = write_project(tmp_path, more=more)
    copied(path)
    assert tomllib.loads(copied(path, "daily", "third"))["job"].keys() == {"daily", "new", "third"}


def test_what_is_written_already_is_brought_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Who wrote it may have been killed before it was there."""
    path, flushed = write_project(tmp_path), list[Path]()
    copied(path)
    before = path.read_bytes()
    monkeypatch.setattr("dpstream.pipelines.project.project.sync", flushed.append)
    section = section_text("new", copied_section(before, "daily", "new"))
    append_section(load_project(path), "new", before, section, "--as")
    assert flushed == [path, tmp_path] and path.read_bytes() == before
    refused(
        lambda: append_section(
            load_project(path), "new", before, section.replace("= 8", "= 9"), "--as"
        )
    )


def test_the_gap_before_a_section() -> None:
    assert extended(b"a", "b") == extended(b"a\n", "b") == extended(b"a\n\n", "b") == "a\n\nb"
