"""One noise meets one input, whatever is put back or changed between a charge and its receipt."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.filecalls.commands import COMMANDS
from tests.faults.one_noise import (
    QUESTIONS,
    STREAMS,
    Attempt,
    any_input,
    copied,
    put_back,
    recorded_noise,
    reused,
)
from tests.pipelines.ask.kinds import KINDS, Kind, emptied, within, world
from tests.postgresql import postgresql_server

#: What is put back: the account from a backup (its head file, which would tell, is lost then), or
#: all that is not an input.
BACKUPS = {"account": "account", "store": "state", "clone": "."}
FAST = [("frame", "drawn", "account"), ("session", "charged", "clone")]
ALL = [
    (k, w, what) for k in QUESTIONS for w in ("charged", "drawn") for what in ("account", "clone")
]
CASES = [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in ALL]


def attempt(kind: Kind, rows: str) -> Attempt:
    """Ask, and record what is read and drawn."""
    with recorded_noise() as drawn:
        outcome = kind.ask()
    assert outcome.code in (0, 3), outcome.stderr
    return Attempt(rows, frozenset(drawn))


def attempts(kind: Kind, window: str, what: str, folder: Path) -> list[Attempt]:
    """A question is answered; then, twice, what a window had is put back and it is asked again, on
    the same rows and without one unit's."""
    home, copy = folder / "world", folder / "copy"
    world(kind, home)
    with within(home), copied(window, home / BACKUPS[what], copy):
        out = [attempt(kind, "same")]
    for rows in ("same", "neighbour"):
        put_back(copy, home / BACKUPS[what])
        if what == "account":
            for head in home.glob("dpstream-*.head"):
                head.unlink()
        with within(home):
            emptied(kind)
            kind.change(rows)
            out.append(attempt(kind, rows))
    return out


@pytest.mark.parametrize(("name", "window", "what"), CASES)
def test_no_noise_meets_two_inputs(name: str, window: str, what: str, tmp_path: Path) -> None:
    first, again, changed = attempts(QUESTIONS[name], window, what, tmp_path)
    assert first.drawn and changed.drawn
    assert again == first  # the charge goes on: the checker would see its noise
    assert reused([first, again, changed]) == []


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "frame" else pytest.mark.slow) for n in QUESTIONS]
)
def test_noise_that_does_not_know_its_input_is_seen(name: str, tmp_path: Path) -> None:
    with any_input():
        pairs = reused(attempts(QUESTIONS[name], "drawn", "account", tmp_path))
    assert ("same", "neighbour") in {pair[:2] for pair in pairs}


def _of_streams(*fast: tuple[str, str]) -> pytest.MarkDecorator:
    cases = [(name, what) for name in STREAMS for what in BACKUPS]
    return pytest.mark.parametrize(
        ("name", "what"),
        [pytest.param(*case, marks=[] if case in fast else pytest.mark.slow) for case in cases],
    )


@_of_streams(("run", "store"))
def test_a_stream_draws_nothing_for_other_rows(name: str, what: str, tmp_path: Path) -> None:
    """It is refused on other rows, whatever is put back; on its own rows a clone draws again."""
    first, again, changed = attempts(STREAMS[name], "step", what, tmp_path)
    assert first.drawn and not changed.drawn
    assert again.drawn == (first.drawn if what == "clone" else set())


@pytest.mark.parametrize("name", ["run", pytest.param("workload answer", marks=pytest.mark.slow)])
def test_a_stream_that_does_not_know_its_input_is_seen(name: str, tmp_path: Path) -> None:
    with any_input():
        pairs = reused(attempts(STREAMS[name], "step", "clone", tmp_path))
    assert ("same", "neighbour") in {pair[:2] for pair in pairs}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Kind]:
    """A statement on a table of PostgreSQL, whose rows others change."""
    import adbc_driver_postgresql.dbapi as postgresql

    with postgresql_server() as address:

        def execute(*statements: str) -> None:
            with postgresql.connect(address) as connection, connection.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)
                connection.commit()

        def make(folder: Path) -> None:
            COMMANDS["sql"].world(folder)
            file = folder / "dpstream.toml"
            file.write_text(file.read_text().replace('path = "in.csv"', f'uri = "{address}"'))
            execute("CREATE TABLE visits (\"user\" bigint, page text, time text)",
                    "INSERT INTO visits SELECT n % 60, 'p' || n % 4, 'now' "
                    "FROM generate_series(0, 299) AS n")  # fmt: skip

        def change(rows: str) -> None:
            if rows == "neighbour":
                execute('DELETE FROM visits WHERE "user" = 7')

        command = dataclasses.replace(COMMANDS["sql"], world=make)
        yield KINDS["sql"]._replace(command=command, change=change)


@pytest.mark.slow
@pytest.mark.parametrize("window", ["charged", "drawn"])
def test_rows_of_a_database_that_change(window: str, database: Kind, tmp_path: Path) -> None:
    first, again, changed = attempts(database, window, "account", tmp_path)
    assert first.drawn and changed.drawn and again == first
    assert reused([first, again, changed]) == []


@pytest.mark.slow
def test_noise_that_does_not_know_a_database_is_seen(database: Kind, tmp_path: Path) -> None:
    with any_input():
        pairs = reused(attempts(database, "drawn", "account", tmp_path))
    assert ("same", "neighbour") in {pair[:2] for pair in pairs}
