"""A job's section copied to the end of the project file: places of its own, and the rest stays."""

import tomllib
from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.project.copying import (
    append_section,
    check_extended,
    copied_section,
    extended,
    section_text,
)
from dpstream.pipelines.project.project import load_project
from tests.projects import PROJECT, write_project

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
    assert made.sink.dead_letter == str(tmp_path / "dead_letter" / "new")
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who wrote it may have been killed before it was there."""
    path, flushed = write_project(tmp_path), list[Path]()
    copied(path)
    before = path.read_bytes()
    monkeypatch.setattr("dpstream.pipelines.project.write.sync", flushed.append)
    section = section_text("new", copied_section(before, "daily", "new"))
    append_section(load_project(path), "new", before, section, "--as")
    assert flushed == [path, tmp_path] and path.read_bytes() == before
    with pytest.raises(UsageError, match="says otherwise"):
        append_section(load_project(path), "new", before, section.replace("= 8", "= 9"), "--as")


def test_the_gap_before_a_section() -> None:
    assert extended(b"a", "b") == extended(b"a\n", "b") == extended(b"a\n\n", "b") == "a\n\nb"
