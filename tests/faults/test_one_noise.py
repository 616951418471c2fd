"""One noise meets one input, whatever is put back, changed or lost with the power.

After a loss of power: a command is run once and its file calls and noise are recorded.  Then, for
some of the calls, the disk is what a loss of power at that call leaves; one unit's rows are taken
away, and the command is typed again.  A question's run id is the same one where its charge was
lost, which is the worst that can be.  A stream's is drawn: its store has both the run id and the
input, or is lost."""

import dataclasses
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.filecalls.commands import COMMANDS
from tests.faults.filecalls.disk import HARMLESS, Call, Disk, calls
from tests.faults.filecalls.server import Ended, Server
from tests.faults.filecalls.sweep import LOSSES, PLACE
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


FAST_CALLS = {"sql": 3}
SLOW_CALLS = 12
_BLOCK = 16


def drawn(path: Path) -> frozenset[bytes]:
    """The blocks of noise that a command wrote down; none if it was refused."""
    data = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    return frozenset(data[at : at + _BLOCK] for at in range(0, len(data), _BLOCK))


def attempts_after_losses(
    server: Server, name: str, folder: Path, held: bool, number: int
) -> list[Attempt]:
    """The undisturbed command, and the same on other rows after losses of power."""
    kind, case, before = (QUESTIONS | STREAMS)[name], folder / PLACE, folder / "before"
    journal, noise, fixed = folder / "journal", folder / "noise", name not in STREAMS

    def answer(into: Path | None = None) -> Ended:
        return server.run((), case, journal=into, noise=noise, held=held, fixed=fixed, kind=name)

    kind.command.prepare(server, case)
    shutil.copytree(case, before, symlinks=True)
    ended = answer(journal)
    assert ended.code == 0, ended.stderr
    out, recorded, rng = [Attempt("same", drawn(noise))], changes_in(journal), random.Random(name)
    for at in sorted(rng.sample(range(1, len(recorded) + 1), min(number, len(recorded)))):
        lose_power(before, recorded[:at], rng, case)
        with within(case):
            kind.change("neighbour")
        ended = answer()
        assert ended.code in (0, 3, 4), ended.stderr
        out.append(Attempt(f"after call {at}", drawn(noise)))
    return out


def changes_in(journal: Path) -> list[Call]:
    """The recorded calls that may have changed something."""
    return [call for call in calls(journal) if call.kind not in HARMLESS]


def lose_power(before: Path, recorded: list[Call], rng: random.Random, case: Path) -> None:
    """Make the folder what the disk holds after these calls and a loss of power."""
    disk = Disk(before)
    for call in recorded:
        disk.replay(call)
    shutil.rmtree(case)
    case.mkdir()
    disk.write(case, rng.choice(LOSSES), rng.randrange(1 << 30))


EACH_KIND = pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in FAST_CALLS else pytest.mark.slow)
        for n in QUESTIONS | STREAMS
    ],
)


@EACH_KIND
def test_no_noise_meets_two_inputs_after_a_loss_of_power(
    name: str, server: Server, tmp_path: Path
) -> None:
    first, *others = attempts_after_losses(
        server, name, tmp_path, False, FAST_CALLS.get(name, SLOW_CALLS)
    )
    assert first.drawn and any(other.drawn for other in others)
    assert [reused([first, other]) for other in others if reused([first, other])] == []


@EACH_KIND
def test_noise_that_does_not_know_its_input_after_a_loss_is_seen(
    name: str, server: Server, tmp_path: Path
) -> None:
    first, *others = attempts_after_losses(
        server, name, tmp_path, True, FAST_CALLS.get(name, SLOW_CALLS)
    )
    assert any(reused([first, other]) for other in others)
