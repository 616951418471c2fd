"""The log of an account, in a file and in a database: what both must pass.

Transactions, kills, every order of two writers, what is read and when, damage of every cell and
row, random bits, and an account that was restored.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dpstream.accounting.errors import InvariantError, PolicyError
from dpstream.state.ledger import log
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.lineage import begun_epoch, promise
from dpstream.state.ledger.log import Line, State
from dpstream.state.ledger.open import AccountPlace, open_ledger, open_path, read_ledger
from dpstream.state.ledger.recovery import recover
from tests import accounts
from tests.golden.refusals import Refused
from tests.lanes import few_first
from tests.state.ledger.conformance import SCENARIOS, Asker, charge, limits, rows
from tests.state.ledger.places import Contents, Place, in_database, in_file
from tests.state.ledger.starters import Starter, every_order


@pytest.fixture(params=["file", "database"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """An account without a charge."""
    if request.param == "file":
        yield in_file(tmp_path / "account.db")
    else:
        yield in_database(request.getfixturevalue("url"))


@pytest.mark.parametrize("scenario", [rows, limits])
def test_transactions(place: Place, scenario: Callable[[Any], None]) -> None:
    scenario(place.open)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_register(place: Place, scenario: Callable[[Any, type[Asker]], None]) -> None:
    scenario(place.open, Asker)


def filled(place: Place, questions: int = 2) -> None:
    """An account with changes of every kind."""
    with contextlib.closing(place.open()) as ledger:
        register = Asker(ledger, "sql")
        for run in range(questions):
            begun = register.charged(charge(run, 0.01), f"asked {run}")
            register.commit(begun.run_id, b"rows %d" % run)
        register.charged(charge(90, 0.1), "cut off")
        promise(ledger, charge(91, 0.1))
        with ledger.transaction():
            ledger.add_token("run", "a", None)
            ledger.add_token("run", "b", "a")
            ledger.drop_token("run", "a")


def seen(ledger: Ledger) -> object:
    """All that an account says."""
    runs = [charge(run).run_id for run in (*range(4), 90)]
    return (
        ledger.history().entries, [ledger.request_of(run) for run in runs], ledger.unanswered(),
        [ledger.requests_alike(request) for request in ("asked 1", "cut off")],
        ledger.tokens("run"), begun_epoch(ledger, charge(91).run_id),
    )  # fmt: skip


def test_what_is_written_is_what_another_process_reads(place: Place) -> None:
    with contextlib.closing(place.open()) as one, contextlib.closing(place.open()) as two:
        before = seen(two)
        filled(place)
        with contextlib.closing(place.open()) as three:
            assert before != seen(one) == seen(two) == seen(three)


# --- what is read, and when ----------------------------------------------------------------------


class Counted:
    """A storage that notes the numbers of the rows that are read."""

    def __init__(self, real: Any, numbers: list[int]) -> None:
        self._real, self._numbers = real, numbers

    def rows(self, after: int) -> Any:
        lines = self._real.rows(after)
        self._numbers += [line.number for line in lines[1:]]
        return lines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_only_what_others_have_added_is_read(place: Place, refused: Refused) -> None:
    numbers = list[int]()
    filled(place)
    with (
        contextlib.closing(Ledger(Counted(place.storage(), numbers))) as one,
        contextlib.closing(place.open()) as two,
    ):
        first = len(one.history().digests) and numbers[-1]
        assert numbers == list(range(1, first + 1))  # whoever opens it reads all
        one.set_limit((99.0, 1e-3))
        for run in range(20, 30):
            assert one.charge(charge(run, 0.1)) and not one.charge(charge(run, 0.1))
        refused(lambda: one.charge(charge(98, 300.0)))
        with pytest.raises(ZeroDivisionError), one.transaction():
            one.append(charge(99))
            1 / 0  # noqa: B018
        assert len(numbers) == first
        two.charge(charge(40, 0.1))
        promise(two, charge(41, 0.1))
        assert begun_epoch(one, charge(41).run_id) == -1
        assert one.entries() == two.entries() and numbers[first:] == [first + 12, first + 13]


def test_what_is_remembered_is_what_is_written(place: Place) -> None:
    """After charges, refusals and roll-backs an account says what one says that reads all again."""
    rng = random.Random(5)
    with contextlib.closing(place.open()) as ledger:
        for _ in range(30):
            run = rng.randrange(40)
            with contextlib.suppress(PolicyError, ZeroDivisionError), ledger.transaction():
                if ledger.charge_within(charge(run, rng.choice([0.1, 0.3, 9.0]))):
                    ledger.add_request(charge(run).run_id, f"asked {run % 2}")
                    ledger.add_token("run", str(run), None)
                if rng.random() < 0.4:
                    1 / 0  # noqa: B018
                if rng.random() < 0.5:
                    ledger.add_receipt(charge(run).run_id, b"rows", "digest")
        with contextlib.closing(place.open()) as other:
            assert seen(ledger) == seen(other)
        assert len(ledger.entries()) > 5


def test_each_part_is_added_once(place: Place) -> None:
    with contextlib.closing(place.open()) as ledger:
        filled(place)
        run_id = charge(1).run_id
        for again in (
            lambda: ledger.append(charge(1, 0.1)),
            lambda: ledger.add_receipt(run_id, b"other", "digest"),
        ):
            with pytest.raises(InvariantError), ledger.transaction():
                again()
        with ledger.transaction(), pytest.raises(InvariantError), ledger.transaction():
            pass


# --- two at once, and killed ones ----------------------------------------------------------------


class Charger(Starter):
    """Charges a run of its own, of which the limit holds one, gate by gate."""

    def __init__(self, place: Place, run: int, die_at: int | None) -> None:
        super().__init__(Path(), Path(), die_at)
        self.place, self.charge = place, charge(run, 3.5)

    def act(self) -> str:
        stop_at, locks = self.stop_at, self.place.name.endswith(".db")

        class Gated(Ledger):
            @contextlib.contextmanager
            def transaction(self) -> Iterator[None]:
                stop_at("txn", False)
                with super().transaction():
                    stop_at("begun", locks)
                    yield
                    stop_at("decided", locks)

        with contextlib.closing(Gated(self.place.storage())) as ledger:
            try:
                return str(ledger.charge(self.charge))
            except PolicyError:
                return "refused"


@pytest.mark.parametrize("death", [None, 0, 1, 2])
def test_every_order_of_two_writers(place: Place, death: int | None) -> None:
    """One of them is charged, and neither overspends, wherever the first one dies."""
    empty, orders = place.contents(), 0
    for starters in every_order(lambda: [Charger(place, 1, death), Charger(place, 2, None)]):
        ends = [starter.end for starter in starters]
        [paid] = [each.run_id for each in accounts.charges(place.name)]
        if death is None:
            assert sorted(ends) == ["True", "refused"]
            assert paid == charge(1 + ends.index("True")).run_id
        else:
            assert ends in (["died", "True"], ["refused", "True"]) and paid == charge(2).run_id
        place.put_back(empty)
        orders += 1
    assert orders > 1


KILLED = """
import contextlib, os, signal, sys
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.open import open_path
from tests.state.ledger.conformance import Asker, charge

name, point = sys.argv[1:]
real, begun = Ledger.transaction, []

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

@contextlib.contextmanager
def transaction(ledger):
    begun.append(1)
    mine = len(begun) == {"charge": 1, "receipt": 2}.get(point.split()[0])
    with real(ledger):
        yield
        if mine and point.endswith("before"):
            die()
    if mine:
        die()

Ledger.transaction = transaction
draw = die if point == "draw" else lambda run_id: ("first " + run_id).encode()
Asker(open_path(name), "sql").answered(charge(1), "asked", draw)
"""
KILLS = ("charge before", "charge behind", "draw", "receipt before", "receipt behind")


@pytest.mark.parametrize("point", few_first(KILLS, 2))
def test_kill_minus_nine(place: Place, point: str) -> None:
    """What was charged is charged once, and goes on under its run id, with the same noise."""
    process = subprocess.run(
        [sys.executable, "-c", KILLED, place.name, point],
        env={**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert process.returncode == -signal.SIGKILL, process.stderr
    paid = accounts.undated(accounts.charges(place.name))
    assert paid == ([] if point == "charge before" else [charge(1)])
    with contextlib.closing(place.open()) as ledger:
        done = Asker(ledger, "sql").answered(charge(2), "asked", lambda _: b"second")
    assert done.charged is (point == "charge before")
    assert done.run_id == charge(2 if done.charged else 1).run_id
    first = f"first {done.run_id}".encode()
    assert done.receipt == (first if point == "receipt behind" else b"second")
    assert len(accounts.charges(place.name)) == 1


# --- damage --------------------------------------------------------------------------------------


def edited(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, int):
        return value + 1000
    if isinstance(value, str):
        return value[:-1] + ("y" if value.endswith("x") else "x")
    return value[:-4] + (b"AAAA" if value[-4:] != b"AAAA" else b"BBBB")


def damages(good: Contents) -> Iterator[tuple[str, Contents]]:
    """An account's rows with every row removed, and every cell changed, one at a time."""
    for table, (columns, table_rows) in good.items():
        for number, row in enumerate(table_rows):
            rest = [*table_rows[:number], *table_rows[number + 1 :]]
            yield f"{table} without row {number}", {**good, table: (columns, rest)}
            for at, column in enumerate(columns):
                new = (*row[:at], edited(row[at]), *row[at + 1 :])
                name = f"{table} with another {column} in row {number}"
                yield name, {**good, table: (columns, [*rest, new])}


def unnoticed(place: Place) -> tuple[list[str], int, int]:
    """Do all damages; name those that change what an account says, and count refusals of all."""
    with contextlib.closing(place.open()) as ledger:
        right = seen(ledger)
    good, wrong, refused, done = place.contents(), list[str](), 0, 0
    for name, bad in damages(good):
        with contextlib.closing(place.open()) as before:
            before.history()
            place.put_back(bad)
            for attempt in (lambda: seen(before), lambda: _seen_anew(place)):
                done += 1
                try:
                    if attempt() != right:
                        wrong.append(name)
                except PolicyError as error:
                    assert error.field == "account.path", name
                    refused += 1
        place.put_back(good)
    return wrong, refused, done


def _seen_anew(place: Place) -> object:
    with contextlib.closing(place.open()) as ledger:
        return seen(ledger)


def test_damage_of_every_cell_and_row(place: Place) -> None:
    """By those who open the account then, and by those who had opened it before."""
    filled(place)
    wrong, refused, done = unnoticed(place)
    assert wrong == [] and refused > done / 3, (refused, done)


def test_a_text_that_was_changed(tmp_path: Path, refused: Refused) -> None:
    """A limit, in a row that can be read as before."""
    place = in_file(tmp_path / "account.db")
    good = place.contents()
    columns, [end, (number, changes, digest)] = good["log"]
    text = log.inflated(changes)
    assert b"[4.0,1e-6]" in text
    new = log.deflated(text.replace(b"[4.0,1e-6]", b"[9.0,1e-6]"))
    place.put_back({**good, "log": (columns, [end, (number, new, digest)])})
    refused(place.open)


def test_without_the_checks_damage_passes(tmp_path: Path) -> None:
    place = in_file(tmp_path / "account.db")
    filled(place)
    with mock.patch.object(log, "refuse_damage", lambda _: None), pytest.raises(Exception):
        assert unnoticed(place)[0] == []


def test_random_bits(tmp_path: Path) -> None:
    place = in_file(tmp_path / "account.db")
    filled(place, 60)
    right, rng, refused = _seen_anew(place), random.Random(5), 0
    data = Path(place.name).read_bytes()
    for _ in range(300):
        bad, at = bytearray(data), rng.randrange(len(data))
        bad[at] ^= 1 << rng.randrange(8)
        Path(place.name).write_bytes(bad)
        try:
            assert _seen_anew(place) == right
        except PolicyError as error:
            assert error.field == "account.path"
            refused += 1
    assert refused > 100, refused


def test_bits_lost_below_an_open_account(tmp_path: Path, refused: Refused) -> None:
    """They change nothing that it decides, and whoever opens the file next sees them."""
    place = in_file(tmp_path / "account.db")
    with contextlib.closing(accounts.unsynced(place.open())) as ledger:
        for run in range(400):  # several pages of rows; the first and the last are written again
            ledger.charge(charge(run, 0.001))
        spent, data = ledger.history().spent, Path(place.name).read_bytes()
        changes = place.contents()["log"][1][200][1]
        with open(place.name, "r+b") as file:
            file.write(data.replace(changes, edited(changes)))
        assert ledger.history().spent == spent and ledger.charge(charge(500, 0.001))
    for attempt in (open_path, read_ledger):
        refused(attempt, place.name)


def test_rows_that_this_program_does_not_know(place: Place, refused: Refused) -> None:
    """A format, a kind of change and a field of another version; nothing is skipped."""
    with contextlib.closing(place.storage()) as storage:
        with storage.reading(writes=False):
            _, first = storage.rows(0)
        state = State()
        state.read(first)
        for text in (b'[{"event":"new"}]', b'[{"event":"table","id":"x","more":1}]', b"[", b"{}"):
            with pytest.raises(PolicyError) as caught:
                State().read(Line(1, *State().line(text)[1:]))
            assert "another version" in caught.value.rule
    with mock.patch.object(log, "FORMAT", b"other"):
        refused(place.open)


# --- restored ------------------------------------------------------------------------------------


def test_an_account_that_was_restored(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Those who saw more refuse it; the head file brings back what was spent, and closes it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    named = AccountPlace(place.name, "flights", accounts.ID)
    with contextlib.closing(open_ledger(named)) as ledger:
        ledger.charge(charge(1))
        before = place.contents()
        filled(place, 0)
        Asker(ledger, "sql").answered(charge(2, 0.1), "asked", lambda _: b"rows")
        seen_last, entries = ledger.head(), ledger.history().entries
        place.put_back(before)
        refused(place.open)
        refused(ledger.entries)
    with contextlib.closing(open_path(place.name, recovering=True)) as older:
        refused(lambda: older.refuse_older(seen_last))
        done = recover(older)
        assert done.charges == 3, done
        assert done.closed == (charge(2).run_id,)
        older.refuse_older(seen_last)
    with contextlib.closing(place.open()) as recovered:
        assert recovered.history().entries[: len(entries)] == entries
        assert recovered.request_of(charge(2).run_id) is None
