"""What plans say of the ledger is what the command that charges does, in every system: accepted,
beyond the limit, answered before (free), a damaged ledger; and ``--fresh`` charges once more."""

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.state.ledger.events import Created
from dpstream.state.ledger.open import created_of, make
from tests import accounts
from tests.pipelines.cli.called import call, loaded, printed
from tests.pipelines.cli.mistakes import visits, with_account
from tests.pipelines.sql.asking import COUNTED, data_set, dp
from tests.pipelines.tabulation.office import office, project
from tests.pipelines.tuning.asking import PROJECT as TUNED
from tests.pipelines.tuning.asking import USERS, records
from tests.pipelines.workload.survey import survey, write

Words = Sequence[str | Path]


class System(NamedTuple):
    """The two commands of a system, for a folder.

    Attributes:
        plan: says what ``ask`` would be told; free: ``ask`` again for the same answer, with
            whatever place it needs.
        fresh: words for a new charge, of both.
        narrow: makes the limit too small for any charge.
    """

    plan: Words
    ask: Words
    free: Words
    fresh: Words
    narrow: Callable[[], object]


def narrowed(folder: Path, epsilon: float) -> Callable[[], object]:
    return lambda: accounts.set_limit(folder / "ledger.db", (epsilon, 1e-6))


def sql(folder: Path) -> System:
    path, text = data_set(folder), dp(f"page, {COUNTED} AS n")
    ask = ("sql", "--project", path, text)
    return System((*ask, "--explain"), ask, ask, ask, narrowed(folder, 0.5))


def choose(folder: Path) -> System:
    (folder / "in").mkdir()
    (folder / "in" / "records.csv").write_text(records(USERS))
    (folder / "keys").mkdir()
    new_secret(folder / "keys" / "noise.secret")
    text = TUNED.replace("deliveries.account.db", "ledger.db")
    accounts.write(folder / "dpstream.toml", text.replace("epsilon = 3.0", "epsilon = 30.0"))
    ask = ("choose", "hourly", "--project", folder, "--first", "12h", "--epsilon", "1")
    first, second, third = (("--as", name) for name in "abc")
    narrow = narrowed(folder, 0.5)
    return System((*ask, "--dry-run"), (*ask, *first), (*ask, *second), (*ask, *third), narrow)


def session(folder: Path) -> System:
    table = loaded(folder)
    text = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = {}) COUNT(*) AS n FROM small"
    ask = ("sql", *table[1:], f"{text.format(0.1)} WHERE epsilon >= 0.5")

    def narrow() -> None:
        narrowing = f"{text.format(0.45)} WHERE epsilon >= 0.5 AND b >= 0"
        assert call("sql", *table[1:], narrowing).exit_code == 0

    return System((*ask, "--explain"), ask, ask, ask, narrow)


def census(folder: Path) -> System:
    new_secret(folder / "noise.secret")
    file = project(folder, office(folder), secret="file:noise.secret")
    account = 'account = { path = "ledger.db", limit = { epsilon = 60.0, delta = 1e-9 } }'
    text = file.read_text()
    assert "[census." in text
    accounts.write(file, text.replace("[census.", f"{account}\n[census."))
    plan = ("census", "plan", "--project", file)
    ask, free, fresh = (
        ("census", "execute", "--project", file, "--out", folder / out) for out in "aab"
    )
    return System(plan, ask, free, fresh, narrowed(folder, 20.0))


def answer(folder: Path, *more: str) -> System:
    survey(folder, 300)
    narrow = narrowed(folder, 2.0)
    words: Words = ("workload", "answer", folder / "asked.json", "--project", folder, "--cache",
                    folder / "c", *more)  # fmt: skip
    first, fresh = (*words, "--out", folder / "a"), (*words, "--out", folder / "b")
    return System((*words, "--dry-run"), first, first, fresh, narrow)


def answer_purely(folder: Path) -> System:
    of = answer(folder, "--mechanism=geometric")
    write(folder / "asked.json", [{"factors": {"age": "range", "sex": "identity"}}])
    return of


SYSTEMS = {
    "answer": answer,
    "pure": answer_purely,
    "sql": sql,
    "choose": choose,
    "session": session,
    "census": census,
}


def acceptance(words: Words) -> tuple[int, dict[str, Any]]:
    done = call(*words, "--json")
    report = printed(done.stdout.splitlines()[-1])
    return done.exit_code, report["acceptance"]


def charges(folder: Path) -> int:
    path = folder / "ledger.db"
    return len(accounts.charges(path))


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_plan_says_what_the_command_does(name: str, tmp_path: Path) -> None:
    of = SYSTEMS[name](tmp_path)
    code, report = acceptance(of.plan)
    assert (code, report["accepted"], report["run_id"]) == (0, True, None) and report["charged"]
    assert charges(tmp_path) == 0
    done = call(*of.ask)
    assert done.exit_code == 0, done.output
    assert charges(tmp_path) == 1
    # Answered before: free, and the plan says so.
    code, report = acceptance(of.plan)
    assert (code, report["accepted"], report["charged"]) == (0, True, None) and report["run_id"]
    done = call(*of.free)
    assert done.exit_code == 0 and charges(tmp_path) == 1, done.output
    # Anew: one more charge.
    code, report = acceptance((*of.plan, "--fresh"))
    assert code == 0 and report["charged"]
    done = call(*of.fresh, "--fresh")
    assert done.exit_code == 0 and charges(tmp_path) == 2, done.output
    run_ids = {charge.run_id for charge in accounts.charges(tmp_path / "ledger.db")}
    assert len(run_ids) == 2


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_plan_is_refused_as_the_command_is(name: str, tmp_path: Path) -> None:
    of = SYSTEMS[name](tmp_path)
    of.narrow()
    before = charges(tmp_path)
    code, decision = acceptance(of.plan)
    done = call(*of.ask, "--json")
    assert code == done.exit_code == 3 and decision["accepted"] is False
    refusal = printed(done.stderr.splitlines()[-1])  # of a session with the points that lack budget
    assert refusal | decision["refusal"] == refusal and decision["refusal"]["exit_code"] == 3
    assert charges(tmp_path) == before


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_damaged_ledger_refuses_both(name: str, tmp_path: Path) -> None:
    of = SYSTEMS[name](tmp_path)
    assert call(*of.ask).exit_code == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as db, db:
        db.execute("UPDATE log SET changes = changes || x'00' WHERE number = 2")
    code = call(*of.plan, "--json").exit_code
    assert code == call(*of.free, "--json").exit_code == 3


def test_a_fresh_answer_keeps_the_old_one(tmp_path: Path) -> None:
    of = answer(tmp_path, "--format", "csv")
    assert call(*of.ask).exit_code == 0
    old = (tmp_path / "a" / "answers.csv").read_bytes()
    assert call(*of.free, "--fresh").exit_code == 2  # its folder is taken
    assert call(*of.fresh, "--fresh").exit_code == 0 and charges(tmp_path) == 2
    assert (tmp_path / "a" / "answers.csv").read_bytes() == old
    assert (tmp_path / "b" / "answers.csv").read_bytes() != old


def test_answers_over_time_say_what_the_budget_covers(tmp_path: Path) -> None:
    plan = (*answer(tmp_path, "--over-time", "--units", "100", "--records", "300").plan,)
    assert {"Covers", "Cut"} <= {line.split(" ")[0] for line in call(*plan).stdout.splitlines()}
    covered = printed(call(*plan, "--json").stdout)["coverage"]
    assert covered["windows"] == 2 and covered["share_cut"] == pytest.approx(1 - 100 / 600)


def stream(folder: Path) -> System:
    pa.parquet.write_table(visits(), folder / "visits.parquet")
    new_secret(folder / "noise.secret")
    accounts.write(folder / "dpstream.toml", with_account(100.0, delta=1e-4))
    run = ("run", "--project", folder, "--quiet")
    return System(("plan", "--project", folder), run, run, run, narrowed(folder, 0.5))


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time of change and bytes, and every folder; not the cache of strategies,
    which is public."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns, b"" if path.is_dir() else path.read_bytes()
        )
        for path in sorted(folder.rglob("*")) if path.relative_to(folder).parts[0] != "c"
    }  # fmt: skip


def refusal(words: Words) -> tuple[int, dict[str, Any]]:
    """The exit code of a command, and its refusal: in a plan's output, or as its error."""
    done = call(*words, "--json")
    output = printed((done.stdout or done.stderr).splitlines()[-1])
    inner = output["acceptance"]["refusal"] if "acceptance" in output else None
    return done.exit_code, inner or printed(done.stderr.splitlines()[-1])


def same_refusal(ask: Words, plan: Words, folder: Path) -> None:
    """The plan is refused with the code and the reason of the command; it writes nothing."""
    before = contents(folder)
    planned = refusal(plan)
    assert contents(folder) == before
    assert planned == refusal(ask) and planned[0] != 0


ALL = {**SYSTEMS, "stream": stream}


@pytest.mark.parametrize("name", ALL)
def test_a_plan_writes_nothing(name: str, tmp_path: Path) -> None:
    of = ALL[name](tmp_path)
    for ask in (of.ask, of.free):
        before = contents(tmp_path)
        for more in ((), ("--json",), ("--fresh",)):
            assert call(*of.plan, *more).exit_code == 0
        assert contents(tmp_path) == before
        assert call(*ask).exit_code == 0


@pytest.mark.parametrize("name", ALL)
def test_a_ledger_of_another_unit_refuses_both(name: str, tmp_path: Path) -> None:
    of = ALL[name](tmp_path)
    assert call(*of.ask).exit_code == 0
    created, *_ = accounts.events(tmp_path / "ledger.db")
    (tmp_path / "ledger.db").unlink()
    assert isinstance(created, Created)
    unit = UnitIdentity("another", created.unit.type)
    make(tmp_path / "ledger.db", created_of(created.id, created.data_set, unit, (9.0, 1e-3)))
    if name == "stream":
        for path in (*tmp_path.glob("*.db*"), tmp_path / "releases"):
            if path.name != "ledger.db":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    same_refusal(of.fresh, of.plan, tmp_path)


@pytest.mark.parametrize("name", ["answer", "pure", "census", "choose"])
def test_a_place_that_is_taken_refuses_both(name: str, tmp_path: Path) -> None:
    of = ALL[name](tmp_path)
    if name == "choose":
        place: tuple[str | Path, ...] = ("--as", "a")
        with open(tmp_path / "dpstream.toml", "a") as file:
            file.write('[job.a]\ntable = "another"\n')
    else:
        place = ("--out", tmp_path / "a")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "file").write_text("another")
    assert set(place) <= set(of.ask)
    same_refusal(of.ask, (*of.plan, *place), tmp_path)
    assert charges(tmp_path) == 0


def test_a_draw_on_an_allotment_is_planned(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    head = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = {}{}) {} FROM small".format

    def ask(amount: str, name: str = "half") -> Words:
        return ("sql", *table[1:], head(amount, f", allotment = '{name}'", "COUNT(*) AS n"))

    def plan(amount: str, name: str = "half") -> Words:
        return (*ask(amount, name), "--explain")

    allot = f"CREATE ALLOTMENT half AS {head('0.2', '', '*')} WHERE epsilon >= 0.5"
    assert call("sql", *table[1:], allot).exit_code == 0
    done = call(*plan("0.15"), "--json")
    plan_json = printed(done.stdout)
    assert (plan_json["allotment_left"], plan_json["charged"]) == (0.2, []) and plan_json["errors"]
    assert plan_json["acceptance"]["accepted"] and plan_json["acceptance"]["charged"] is None
    same_refusal(ask("0.25"), plan("0.25"), tmp_path)
    assert call(*ask("0.15")).exit_code == 0
    assert acceptance(plan("0.15"))[1]["run_id"]
    same_refusal(ask("0.1"), plan("0.1"), tmp_path)
    assert call(*plan("0.1", "none")).exit_code == 3
