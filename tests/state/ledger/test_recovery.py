"""Recovering an account: it holds afterwards what it held, or what both histories spent."""

import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.regions.space import Budget, Category
from dpstream.accounting.sessions.table import SessionTable
from dpstream.state.ledger.balances import widen
from dpstream.state.ledger.contract import AnswerLog, Decision
from dpstream.state.ledger.events import Closed, LimitChanged, Received, TableNamed
from dpstream.state.ledger.open import AccountPlace, open_ledger
from dpstream.state.ledger.recovery import Recovered, recover
from tests import accounts
from tests.accounting.regions.spaces import amounts_of
from tests.golden.refusals import Refused
from tests.state.ledger.conformance import charge
from tests.state.ledger.region_conformance import Payer, order

LIMIT = (1e4, 1e-3)


class Bench:
    """An account that is named by two files, each with a head file of its own."""

    def __init__(self, folder: Path) -> None:
        self.file, self.backup = folder / "account.db", folder / "backup.db"
        made = accounts.create(self.file, "d", LIMIT)
        self.places = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            file = str(folder / name / "job.toml")
            self.places.append(AccountPlace(made.path, "d", made.id, file=file))

    def charged(self, *runs: int, by: int = 0) -> None:
        with contextlib.closing(open_ledger(self.places[by])) as ledger:
            for run in runs:
                ledger.charge(charge(run))

    def run_id_of(
        self, run: int, request: str, receipt: bytes | None = b"answer", by: int = 0
    ) -> str:
        """The run id that a question has."""
        with contextlib.closing(open_ledger(self.places[by])) as ledger:
            register = AnswerLog(ledger, "sql")
            begun = register.begin(request, lambda _, __: Decision(charge(run)))
            if receipt is not None:
                register.commit(begun.run_id, receipt)
            return begun.run_id

    def keep(self) -> None:
        shutil.copy(self.file, self.backup)

    def restore(self) -> None:
        shutil.copy(self.backup, self.file)

    def recover(self, by: int = 0) -> Recovered:
        with pytest.raises(PolicyError, match="account recover"):
            open_ledger(self.places[by])
        with contextlib.closing(open_ledger(self.places[by], recovering=True)) as ledger:
            done = recover(ledger)
        with contextlib.closing(open_ledger(self.places[by], recovering=True)) as ledger:
            assert recover(ledger) == (0, 0, ())
        open_ledger(self.places[by]).close()
        return done

    @property
    def runs(self) -> list[int]:
        return [int(each.run_id, 16) for each in accounts.charges(self.file)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_what_is_gone_comes_back_as_it_was(bench: Bench) -> None:
    """Chain, limits and tables: whoever has seen the newest end finds it."""
    bench.charged(1)
    bench.keep()
    bench.charged(2)
    with contextlib.closing(open_ledger(bench.places[0])) as ledger:
        ledger.set_limit((500.0, 1e-4))
        ledger.transact(lambda: ledger.append(TableNamed("0" * 16)))
        seen = ledger.head()
    events = accounts.events(bench.file)
    bench.restore()
    assert bench.recover() == (3, 1, ())
    assert accounts.events(bench.file) == events
    with contextlib.closing(open_ledger(bench.places[0])) as ledger:
        ledger.refuse_older(seen)
        assert ledger.head() == seen and ledger.history().limit == (500.0, 1e-4)


def test_charges_whose_answers_are_gone_are_closed(bench: Bench, refused: Refused) -> None:
    """One was open in the backup and answered since; one was open and still is; one is answered."""
    answered, first, second = (
        bench.run_id_of(1, "a"),
        bench.run_id_of(2, "b", None),
        bench.run_id_of(3, "c", None),
    )
    bench.keep()
    assert bench.run_id_of(99, "b", b"shown") == first
    assert bench.run_id_of(4, "d") == charge(4).run_id
    bench.restore()
    gone = (first, second, charge(4).run_id)  # of the last one the request is gone too
    assert bench.recover() == (3, 1, gone)
    events = accounts.events(bench.file)
    assert events[-1] == Closed(gone)
    assert {event.run_id for event in events if isinstance(event, Received)} == {
        answered, first, charge(4).run_id,
    }  # fmt: skip
    with contextlib.closing(open_ledger(bench.places[0])) as ledger:
        register = AnswerLog(ledger, "sql")
        assert register.read(first) is None and register.read(second) is None
        answer = register.read(answered)
        assert answer is not None and answer.receipt == b"answer"
        refused(lambda: register.commit(first, b"late"))
    for number, request in enumerate("bcd", 10):
        assert bench.run_id_of(number, request) == charge(number).run_id
    assert bench.run_id_of(99, "a") == answered
    assert bench.runs == [1, 2, 3, 4, 10, 11, 12]


def test_both_histories_are_counted(bench: Bench) -> None:
    """The account went on by another file after it was restored."""
    bench.charged(1)
    bench.keep()
    bench.charged(2, 3)
    with contextlib.closing(open_ledger(bench.places[0])) as ledger:
        ledger.set_limit((600.0, 1e-4))
        ledger.set_limit((2e4, 1e-3))
    bench.restore()
    with pytest.warns(UserWarning, match="head file"):
        bench.charged(4, 3, by=1)  # 3 once more, which is charged once
    assert bench.runs == [1, 4, 3]
    assert bench.recover() == (2, 1, ())  # charge 2, and the limit that is not above its own
    assert bench.runs == [1, 4, 3, 2]
    limits = [e.limit for e in accounts.events(bench.file) if isinstance(e, LimitChanged)]
    assert limits == [(600.0, 1e-4)]
    bench.charged(5, by=1)  # whose head file is a part of it still
    bench.charged(6)
    assert bench.runs == [1, 4, 3, 2, 5, 6]


@pytest.mark.filterwarnings("ignore:the account has charges")
def test_a_charge_with_two_answers_is_charged_twice(bench: Bench) -> None:
    """The second was given to somebody whose head file does not know the first."""
    run_id = bench.run_id_of(1, "a", None)
    bench.run_id_of(2, "b")
    bench.keep()
    bench.run_id_of(99, "a", b"first")
    bench.restore()
    assert bench.run_id_of(99, "a", b"second", by=1) == run_id
    assert bench.recover() == (1, 1, ())
    first, answered, again = accounts.undated(accounts.charges(bench.file))
    assert msgspec.structs.replace(again, run_id=run_id) == first and answered == charge(2)
    bench.charged(3, by=1)
    assert bench.run_id_of(99, "a", b"third") == run_id  # the second answer stays
    assert len(accounts.charges(bench.file)) == 4


def test_two_restores_in_turn(bench: Bench) -> None:
    bench.charged(1)
    bench.keep()
    for round_ in range(3):
        bench.charged(10 + round_)
        bench.restore()
        assert bench.recover().charges == round_ + 1
    assert bench.runs == [1, 10, 11, 12]


def test_without_a_head_file_open_charges_are_closed(bench: Bench) -> None:
    run_id = bench.run_id_of(1, "a", None)
    for path in bench.file.parent.rglob("*.head"):
        path.unlink()
    with contextlib.closing(open_ledger(bench.places[0], recovering=True)) as ledger:
        assert recover(ledger) == (0, 0, (run_id,))
    assert bench.run_id_of(2, "a") == charge(2).run_id


def test_an_account_that_lacks_nothing_is_left_alone(bench: Bench) -> None:
    """A question that is being answered just now is not closed."""
    bench.run_id_of(1, "a")
    run_id = bench.run_id_of(2, "b", None)
    before = accounts.events(bench.file)
    with contextlib.closing(open_ledger(bench.places[0], recovering=True)) as ledger:
        assert recover(ledger) == (0, 0, ())
    assert accounts.events(bench.file) == before
    assert bench.run_id_of(3, "b") == run_id


def _steps(rng: random.Random) -> Iterator[tuple[str, int]]:
    """What happens to two files' account, at random."""
    for number in range(1, 25):
        yield rng.choice(("charge", "charge", "charge", "keep", "restore")), number


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.filterwarnings("ignore:the account has charges")
def test_nothing_that_was_charged_is_ever_missing(bench: Bench, seed: int) -> None:
    """Whichever of two files charges, and whenever an older account is put back: each file finds
    all that it has charged itself."""
    rng, mine = random.Random(seed), {0: set[int](), 1: set[int]()}
    bench.charged(100)
    bench.charged(101, by=1)
    bench.keep()
    for step, number in _steps(rng):
        by = rng.randrange(2)
        if step == "keep":
            bench.keep()
        elif step == "restore":
            bench.restore()
        else:
            try:
                bench.charged(number, by=by)
            except PolicyError:
                bench.recover(by)
                bench.charged(number, by=by)
            mine[by].add(number)
            assert mine[by] <= set(bench.runs)
            assert len(bench.runs) == len(set(bench.runs))


# --- tables that were made wider -----------------------------------------------------------------

BUDGET = Budget(name="initial", most="0.000020", step=1)


def of_codes(*codes: str) -> SessionTable:
    """A table of one dimension."""
    return SessionTable(name="people", dimensions=(Category(name="c", codes=codes), BUDGET))


OLD, WIDER, WIDEST = of_codes("x"), of_codes("x", "y"), of_codes("x", "y", "z")
OTHER = of_codes("w", "x")
TABLES = {"old": OLD, "wider": WIDER, "widest": WIDEST, "other": OTHER}
EVERYBODY = ("0.000010", None)


class Migrated(Bench):
    """An account of records whose table is made wider."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file.unlink()
        accounts.of_records(self.file, "d").close()

    def went(self, *steps: str, by: int) -> None:
        """Charge a table by its name, or migrate from one to another."""
        with contextlib.closing(open_ledger(self.places[by])) as ledger:
            for step in steps:
                old, _, new = step.partition(" to ")
                if new:
                    widen(ledger, TABLES[old], TABLES[new])
                else:
                    table = TABLES[old]
                    request = f"{step} by {by}, {len(ledger.entries())}"
                    Payer(ledger, table).pay(request, order(table.space.box(initial=EVERYBODY)))
            ledger.keep_head()  # as whoever shows an answer

    def spent(self, table: str) -> list[int]:
        """Millionths of each code, of records whose budget was asked."""
        with contextlib.closing(open_ledger(self.places[0])) as ledger:
            return amounts_of(Payer(ledger, TABLES[table]).spent("epsilon"))[:, -1].tolist()


@pytest.mark.filterwarnings("ignore:the account has charges")
@pytest.mark.parametrize(
    ("head", "account", "table", "spent"),
    [
        (("old", "old to wider", "wider"), (), "wider", [3, 1]),
        (("old", "old to wider", "wider"), ("old",), "wider", [4, 1]),
        (("old", "old to wider", "wider"), ("old to wider", "wider"), "wider", [4, 2]),
        (("old", "old to wider", "wider", "wider to widest", "widest"), ("old to wider", "wider"),
         "widest", [5, 3, 1]),
        (("old", "old to wider", "wider"), ("old to wider", "wider to widest", "widest"),
         "widest", [4, 2, 1]),
        (("old", "old to wider", "wider", "wider to widest", "widest"),
         ("old", "old to widest", "widest"), "widest", [6, 3, 2]),
        (("old", "old to widest", "widest"), ("old to wider", "wider", "wider to widest"),
         "widest", [4, 2, 1]),
        (("old", "old to wider"), ("old to other", "other"), "other", [1, 3]),
    ],
)  # fmt: skip
def test_tables_that_both_histories_made_wider(
    tmp_path: Path, head: tuple[str, ...], account: tuple[str, ...], table: str, spent: list[int]
) -> None:
    """Each record pays what it paid in both: the first charge is common to them."""
    bench = Migrated(tmp_path)
    bench.went("old", by=0)
    bench.keep()
    bench.went(*head, by=0)
    bench.restore()
    bench.went(*account, by=1)
    bench.recover()
    assert bench.spent(table) == spent
    bench.went(table, by=0)
    bench.went(table, by=1)
    assert bench.spent(table) == [amount + 2 for amount in spent]


@pytest.mark.filterwarnings("ignore:the account has charges")
def test_a_second_answer_is_charged_to_the_wider_table(tmp_path: Path) -> None:
    """One charge got two answers, and the table was migrated behind the first."""
    bench = Migrated(tmp_path)
    bench.went("old", by=0)
    bench.keep()
    [charge] = accounts.charges(bench.file)

    def answered(answer: bytes, by: int) -> None:
        with contextlib.closing(open_ledger(bench.places[by])) as ledger:
            AnswerLog(ledger, "session").commit(charge.run_id, answer)
            ledger.keep_head()

    answered(b"first", by=0)
    bench.went("old to wider", by=0)
    bench.restore()
    answered(b"second", by=1)
    assert bench.recover() == (2, 1, ())
    assert bench.spent("wider") == [2, 0]


@pytest.mark.filterwarnings("ignore:the account has charges")
def test_charges_of_dimensions_that_the_account_has_not_are_refused(tmp_path: Path) -> None:
    bench = Migrated(tmp_path)
    bench.went("old", by=0)
    bench.keep()
    bench.went("old to wider", "wider", by=0)
    newest = tmp_path / "newest.db"
    shutil.copy(bench.file, newest)
    bench.restore()
    bench.went("old to other", "other", by=1)
    before = accounts.events(bench.file)
    with (
        contextlib.closing(open_ledger(bench.places[0], recovering=True)) as ledger,
        pytest.raises(PolicyError) as refused,
    ):
        recover(ledger)
    assert refused.value.field == "account.path" and "newest account" in refused.value.fix
    assert accounts.events(bench.file) == before
    shutil.copy(newest, bench.file)  # as the message says
    assert bench.spent("wider") == [2, 1]
