"""The mistakes of a first hour: each message names field, rule and fix, and the fix, followed as
it is written, works: the job runs and releases rows."""

import gzip
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from dpstream.state import open as stores
from tests.pipelines.cli.called import call
from tests.pipelines.cli.mistakes import Hour, Step, lines_of, visits

RELEASED = "Released "


@pytest.fixture
def hour(tmp_path: Path) -> Iterator[Hour]:
    yield Hour(tmp_path)
    stores.close_all()


class Mistake(NamedTuple):
    """What is done wrong, what is said (exit code, field, words of rule and fix), and the fix."""

    make: Step
    code: int
    words: tuple[str, ...]
    follow: Step


def no_rows(hour: Hour) -> None:
    """Runs of which nothing comes end well, and say so loudly."""
    assert hour.run("--operator") == 0 and "WARNING: NOTHING WAS RELEASED" in hour.message


def in_order(*steps: Step) -> Step:
    def taken(hour: Hour) -> None:
        for step in steps:
            step(hour)

    return taken


def object_of_a_list(hour: Hour) -> None:
    rows = ",".join(lines_of(visits()).splitlines())
    (hour.folder / "visits.json").write_text(f'{{"days": 2, "visits": [{rows}]}}')
    hour.edit("visits.parquet", "visits.json")


def list_from_inside(hour: Hour) -> None:
    hour.message = hour.message.replace("LIST", "visits")
    hour.duckdb("visits.json")
    hour.edit("visits.json", "data.parquet")


def put_in_data(hour: Hour) -> None:
    hour.put("data/v.parquet", visits())


def all_edits(*edits: tuple[str, str]) -> Step:
    return in_order(*(edit(old, new) for old, new in edits))


def edit(old: str, new: str) -> Step:
    return lambda hour: hour.edit(old, new)


def seconds(hour: Hour) -> None:
    hour.column("at", pa.array(np.asarray(visits()["at"].cast(pa.int64())) // 1_000_000))


def micros(hour: Hour) -> None:
    hour.column("at", visits()["at"].cast(pa.int64()))


def millis(hour: Hour) -> None:
    hour.column("at", pa.array(np.asarray(visits()["at"].cast(pa.int64())) // 1_000))


def through_duckdb(hour: Hour) -> None:
    hour.duckdb()
    hour.edit('"visits.parquet"', '"data.parquet"')


def page_ids(hour: Hour) -> None:
    hour.column("page", pa.StructArray.from_arrays([visits()["page"].combine_chunks()], ["name"]))


def use_the_part(hour: Hour) -> None:
    through_duckdb(hour)
    hour.edit('key = ["page"]', f'key = ["{hour.fix_part("page_[a-z]+")}"]')


def int_users(hour: Hour) -> None:
    hour.column("user", pa.array(range(2_400)).cast(pa.int64()))


#: The type of a data set's unit, as a fix writes it.
TYPE = r'type = "\w+"'


def declared(hour: Hour) -> None:
    hour.edit('unit = { name = "user" }', f'unit = {{ name = "user", {hour.fix_part(TYPE)} }}')


def packed(kind: str, ending: str) -> Step:
    """The data is a compressed text file."""

    def make(hour: Hour) -> None:
        hour.put(f"visits.{kind}.{ending}", visits())
        hour.edit("visits.parquet", f"visits.{kind}.{ending}")

    return make


gz = packed("csv", "gz")


def cut_gz(hour: Hour) -> None:
    gz(hour)
    path = hour.folder / "visits.csv.gz"
    path.write_bytes(path.read_bytes()[:-900])


def packed_parquet(hour: Hour) -> None:
    path = hour.folder / "visits.parquet"
    (hour.folder / "visits.parquet.gz").write_bytes(gzip.compress(path.read_bytes()))
    hour.edit('"visits.parquet"', '"visits.parquet.gz"')


def semicolons(hour: Hour) -> None:
    hour.csv()
    path = hour.folder / "visits.csv"
    path.write_text(path.read_text().replace(",", ";"))


def tabs(hour: Hour) -> None:
    semicolons(hour)
    path = hour.folder / "visits.csv"
    path.write_text(path.read_text().replace(";", "\t").replace('"', ""))


def with_commas(hour: Hour) -> None:
    hour.duckdb("visits.csv")
    hour.edit('"visits.csv"', '"data.csv"')


def no_header(hour: Hour) -> None:
    hour.csv()
    path = hour.folder / "visits.csv"
    path.write_text(path.read_text().partition("\n")[2])


def a_header(hour: Hour) -> None:
    path = hour.folder / "visits.csv"
    path.write_text("user,page,at,amount\n" + path.read_text())


def empty_file(hour: Hour) -> None:
    (hour.folder / "visits.parquet").write_bytes(b"")


def again(hour: Hour) -> None:
    hour.put("visits.parquet", visits())


def opened_key(hour: Hour) -> None:
    os.chmod(hour.folder / "noise.secret", 0o644)


def closed_key(hour: Hour) -> None:
    assert "chmod 600" in hour.fix or "0600" in hour.fix
    os.chmod(hour.folder / "noise.secret", 0o600)


def no_key(hour: Hour) -> None:
    hour.edit('secret = "file:noise.secret"\n', "")


def a_key(hour: Hour) -> None:
    command = hour.fix_part(r"dpstream secret new")
    assert call(*command.split()[1:], hour.folder / "other.secret").exit_code == 0
    line = hour.fix_part('secret = "[^"]*"').replace("noise.secret", "other.secret")
    hour.edit("[table.visits]", f"{line}\n[table.visits]")


def ran(*then: Step) -> Step:
    def steps(hour: Hour) -> None:
        assert hour.run() == 0 and RELEASED in hour.message
        stores.close_all()
        for step in then:
            step(hour)

    return steps


def lose_store(hour: Hour) -> None:
    for path in hour.folder.glob("daily.store.db*"):
        path.unlink()


def another_folder(hour: Hour) -> None:
    assert "an empty folder" in hour.fix
    hour.edit('path = "releases"', 'path = "empty"')


def second_file(hour: Hour) -> None:
    hour.edit('path = "visits.parquet"', 'path = "*.parquet"')
    assert hour.run() == 0
    stores.close_all()
    hour.put("more.parquet", visits(days=1))


def take_away(hour: Hour) -> None:
    assert "bring the old input back" in hour.fix and "--through" in hour.fix
    (hour.folder / "more.parquet").unlink()


def key_inside(hour: Hour) -> None:
    (hour.folder / "releases").mkdir()
    (hour.folder / "noise.secret").rename(hour.folder / "releases" / "noise.secret")
    hour.edit("file:noise.secret", "file:releases/noise.secret")


def key_outside(hour: Hour) -> None:
    (hour.folder / "releases" / "noise.secret").rename(hour.folder / "noise.secret")
    hour.edit("file:releases/noise.secret", "file:noise.secret")


def in_quotes(hour: Hour) -> None:
    hour.edit("start = 2024-01-01", hour.fix_part(r'start = "[^"]*"'))


def with_unit(unit: str) -> Callable[[Hour], None]:
    def declare(hour: Hour) -> None:
        written = hour.fix_part(r"time_column = \{[^}]*\}")
        hour.edit('time_column = "at"', written.replace('"s"', f'"{unit}"'))

    return declare


PATH, UNIT = 'path = "visits.parquet"', 'unit_column = "user"'
MISTAKES = {
    "a column that is not there": Mistake(
        edit(UNIT, 'unit_column = "usr"'), 2, ("column 'usr'", "choose from", "user"),
        edit('"usr"', '"user"')),
    "a column of an aggregate": Mistake(
        edit('"amount"', '"amuont"'), 2, ("column 'amuont'", "amount"),
        edit('"amuont"', '"amount"')),
    "spaces in a name": Mistake(
        edit(UNIT, 'unit_column = "user "'), 2, ("column 'user '", "name one of these"),
        edit('"user "', '"user"')),
    "int unit": Mistake(
        int_users, 2, ("table.unit_column", "is int64", "declared 'string'"), declared),
    "float key": Mistake(
        lambda hour: hour.column("page", pa.array(np.arange(2_400) % 3 * 1.5)), 2,
        ("key", "is double", "DuckDB"), through_duckdb),
    "struct key": Mistake(
        page_ids, 2, ("key", "a struct", '"page"."name" AS "page_name"'), use_the_part),
    "seconds since 1970": Mistake(
        seconds, 2, ("table.time_column", "is int64", 'unit = "s"'), with_unit("s")),
    "milliseconds since 1970": Mistake(
        millis, 2, ("table.time_column", 'or unit = "ms"'), with_unit("ms")),
    "microseconds since 1970": Mistake(
        micros, 2, ("table.time_column", 'or "us"'), with_unit("us")),
    "text in a sum": Mistake(
        lambda hour: hour.column("amount", visits()["amount"].cast(pa.string())), 2,
        ("aggregate.column", "is string", 'CAST("amount" AS DOUBLE)'), through_duckdb),
    "a pattern that matches nothing": Mistake(
        edit(PATH, 'path = "data/*.parquet"'), 2,
        ("table.path", "matches no file: /", "data/*.parquet", "correct the path"),
        edit("data/*.parquet", "*.parquet")),
    "a folder": Mistake(
        in_order(put_in_data, edit(PATH, 'path = "data"\nformat = "parquet"')), 2,
        ("table.path", "matches a folder", "pattern that matches files"),
        edit('path = "data"', 'path = "data/*.parquet"')),
    "an empty file": Mistake(
        empty_file, 2, ("table.path", "not readable as Parquet", "no byte"), again),
    "another kind of file": Mistake(
        in_order(Hour.csv, edit(UNIT, f'format = "parquet"\n{UNIT}')), 2,
        ("table.path", "readable as Parquet", "correct table.format"),
        edit('format = "parquet"', 'format = "csv"')),
    "a compressed file that is cut off": Mistake(
        cut_gz, 2, ("table.path", "no whole gzip", "make it again"),
        lambda hour: hour.put("visits.csv.gz", visits())),
    "Parquet in gzip": Mistake(
        packed_parquet, 2, ("table.path", "compressed as a whole", "unpack it"),
        edit('"visits.parquet.gz"', '"visits.parquet"')),
    "semicolons": Mistake(
        semicolons, 2, ("table.path", "separated by commas", "all_varchar"), with_commas),
    "tabs": Mistake(
        tabs, 2, ("table.path", "separated by commas", "all_varchar"), with_commas),
    "no header": Mistake(
        no_header, 2, ("column 'user'", "header of a CSV file", "the file's first line"),
        a_header),
    "two columns of one name": Mistake(
        edit("aggregate.spent", "aggregate.page"), 2,
        ("aggregate.name", "'page' would name two columns", "another name"),
        edit("aggregate.page", "aggregate.spent")),
    "a name like a column of releases": Mistake(
        edit("aggregate.visits", "aggregate.trigger"), 2,
        ("aggregate.name", "must not be", "rename"),
        edit("aggregate.trigger", "aggregate.visits")),
    "reversed bounds": Mistake(
        edit("bounds = [0, 10]", "bounds = [10, 0]"), 2, ("bounds", "reversed"),
        lambda hour: hour.edit("bounds = [10, 0]", hour.fix_part(r"bounds = \[.*\]"))),
    "no bounds": Mistake(
        edit(", bounds = [0, 10]", ""), 2, ("aggregate.spent", "needs", "bounds = [low, high]"),
        edit('column = "amount"', 'column = "amount", bounds = [0, 10]')),
    "a start without zone": Mistake(
        edit('start = "2024-01-01T00:00:00Z"', 'start = "2024-01-01T00:00:00"'), 2,
        ("start", "with an offset", "T05:00:00Z"),
        edit('"2024-01-01T00:00:00"', '"2024-01-01T00:00:00Z"')),
    "a date without quotes": Mistake(
        edit('start = "2024-01-01T00:00:00Z"', "start = 2024-01-01"), 2,
        ("start", "quotes"), in_quotes),
    "a month": Mistake(
        edit('window = "1d"', 'window = "1 month"'), 2, ("window", "calendar", "28d"),
        lambda hour: hour.edit('"1 month"', hour.fix_part("'28d'").replace("'", '"'))),
    "a trigger that does not divide": Mistake(
        edit('release_every = "1d"', 'release_every = "7h"'), 2,
        ("window", "multiple of release_every"),
        edit('"7h"', '"6h"')),
    "a key that is not known": Mistake(
        edit("epsilon =", "epsilom ="), 2, ("budget.epsilom", "did you mean 'epsilon'"),
        edit("epsilom =", "epsilon =")),
    "a number in quotes": Mistake(
        edit("epsilon = 6.0", 'epsilon = "6.0"'), 2, ("budget.epsilon", "expected float"),
        lambda hour: hour.edit('epsilon = "6.0"', hour.fix_part(r"epsilon = [\d.]+"))),
    "no contributions": Mistake(
        edit("contributions = 4\n", ""), 2, ("contributions", "is required"),
        lambda hour: hour.edit("budget =", hour.fix_part(r"contributions = \d+") + "\nbudget =")),
    "no secret": Mistake(no_key, 2, ("secret", "is required to run"), a_key),
    "a key that others can read": Mistake(opened_key, 2, ("secret",), closed_key),
    "a key among the releases": Mistake(
        key_inside, 3, ("secret", "folder of the releases", "elsewhere"), key_outside),
    "an edited job": Mistake(
        ran(edit("epsilon = 6.0", "epsilon = 3.0")), 3,
        ("store", "another plan", "restore the old job"),
        edit("epsilon = 3.0", "epsilon = 6.0")),
    "a lost store": Mistake(
        ran(lose_store), 3, ("sink.path", "it was lost", "an empty folder"), another_folder),
    "a list inside of an object": Mistake(
        object_of_a_list, 2, ("no whole JSON array", "list inside"), list_from_inside),
    "one more file": Mistake(
        second_file, 3, ("source", "not the one", "`--through`"), take_away),
    "releases in the folder of the data": Mistake(
        all_edits((PATH, 'path = "data/**/*.parquet"'), ('path = "releases"', 'path = "data"')), 2,
        ("table.path", "matches no file"),
        in_order(put_in_data, edit('path = "data"', 'path = "out"'))),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_the_fix_works_as_it_is_written(hour: Hour, name: str) -> None:
    make, code, phrases, follow = MISTAKES[name]
    make(hour)
    assert hour.run() == code, hour.message
    for words in phrases:
        assert words in hour.message
    assert hour.fix
    follow(hour)
    assert hour.run() == 0, hour.message
    assert RELEASED in hour.message and "WARNING" not in hour.message


def other_days(hour: Hour) -> None:
    hour.edit('start = "2024-01-01', 'start = "2023-01-01')
    hour.edit('end = "2024-01-03', 'end = "2023-01-03')


def data_days(hour: Hour) -> None:
    hour.edit('start = "2023-01-01', 'start = "2024-01-01')
    hour.edit('end = "2023-01-03', 'end = "2024-01-03')


def few(hour: Hour) -> None:
    hour.put("visits.parquet", visits().slice(0, 6))


def text_int(hour: Hour) -> None:
    hour.csv()
    hour.edit('{ name = "user" }', '{ name = "user", type = "int" }')


def array_of_json(hour: Hour) -> None:
    hour.edit(PATH, 'path = "visits.json"\nformat = "jsonl"')
    rows = ",\n".join(f'{{"user": "u{n}"}}' for n in range(50))
    (hour.folder / "visits.json").write_text(f"[\n{rows}\n]\n")


def lines_of_json(hour: Hour) -> None:
    (hour.folder / "visits.json").write_text(lines_of(visits()))


EMPTY = {
    "days without data": (other_days, ("a time before 2023-01-01T00:00:00Z",), data_days),
    "few units": (few, ("no key has enough units", "dpstream plan daily"), again),
    "a type of text": (
        text_int, ("table.unit_column: column 'user' holds no int", 'type = "string"'), lambda hour:
        hour.edit('type = "int"', hour.fix_part(TYPE))),
    "an array of JSON": (array_of_json, ("source: there is no readable row",), lines_of_json),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_a_run_that_released_nothing_says_why(hour: Hour, name: str) -> None:
    """Exit code 0 stays, but for pipelines that ask; a fix to the data is a new run."""
    make, phrases, follow = EMPTY[name]
    make(hour)
    no_rows(hour)
    for words in phrases:
        assert words in hour.message
    follow(hour)
    assert hour.run() == 3, "what has begun goes on with its own job and data"
    hour.anew()
    assert hour.run("--fail-if-empty") == 0, hour.message
    assert RELEASED in hour.message and "WARNING" not in hour.message


def test_a_pipeline_is_told_by_the_exit_code(hour: Hour) -> None:
    few(hour)
    for _ in range(2):  # also when it is run again, and nothing is read any more
        assert hour.run("--fail-if-empty") == 4 and "released nothing" in hour.message


FINE = {
    "gzip": gz,
    "bzip2": packed("csv", "bz2"),
    "zstd": packed("jsonl", "zst"),
    "stamps without a zone": lambda hour: hour.column("at", visits()["at"].cast("timestamp[us]")),
    "stamps of New York": lambda hour: hour.column(
        "at", visits()["at"].cast(pa.timestamp("ns", "America/New_York"))),
    "days": lambda hour: hour.column("at", visits()["at"].cast(pa.date32())),
    "categories": lambda hour: hour.column("page", visits()["page"].dictionary_encode()),
    "decimals": lambda hour: hour.column("amount", visits()["amount"].cast(pa.decimal128(9, 2))),
    "a pattern": edit(PATH, 'path = "vis*.parquet"'),
}  # fmt: skip


@pytest.mark.parametrize("name", FINE)
def test_what_is_no_mistake(hour: Hour, name: str) -> None:
    FINE[name](hour)  # type: ignore[operator]
    assert hour.run() == 0, hour.message
    assert RELEASED in hour.message and "WARNING" not in hour.message


@pytest.mark.parametrize("flags", [(), ("--through", "2024-01-02")])
def test_two_runs_at_once(hour: Hour, flags: tuple[str, ...]) -> None:
    """Both end well, and what is released is released once."""
    command = [sys.executable, "-m", "dpstream", "run", "--project", str(hour.folder), "--quiet"]
    command += flags
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs, errors = zip(*(process.communicate(timeout=120) for process in both), strict=True)
    assert [process.returncode for process in both] == [0, 0], errors
    figures = {line for text in outputs for line in text.splitlines() if line.startswith(RELEASED)}
    assert len(figures) == 1
    before = {p: p.read_bytes() for p in (hour.folder / "releases").rglob("*.parquet")}
    assert hour.run() == 0
    assert before == {p: p.read_bytes() for p in (hour.folder / "releases").rglob("*.parquet")}
