"""What plans say of the ledger is what the command that charges does, in every system: accepted,
beyond the limit, answered before (free), a damaged ledger; and ``--fresh`` charges once more."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dpstream.pipelines.jobs.noise_key import new_key
from dpstream.state.ledger.open import read_ledger
from tests.pipelines.cli.called import call
from tests.pipelines.cli.sessions import loaded
from tests.pipelines.sql.asking import COUNTED, data_set, dp
from tests.pipelines.tabulation.office import office
from tests.pipelines.tuning.asking import JOB as TUNED
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


def narrowed(path: Path, old: str, new: str) -> Callable[[], object]:
    assert old in path.read_text()
    return lambda: path.write_text(path.read_text().replace(old, new))


def sql(folder: Path) -> System:
    path, text = data_set(folder), dp(f"page, {COUNTED} AS n")
    ask = ("sql", path, text)
    return System((*ask, "--explain"), ask, ask, ask, narrowed(path, "100.0", "0.5"))


def choose(folder: Path) -> System:
    (folder / "in").mkdir()
    (folder / "in" / "records.csv").write_text(records(USERS))
    (folder / "keys").mkdir()
    new_key(folder / "keys" / "noise.key")
    path, limit = folder / "job.toml", "limit = { epsilon = 30.0"
    path.write_text(TUNED.replace("limit = { epsilon = 3.0", limit))
    ask = ("choose", path, "--first", "12h", "--epsilon", "1")
    first, second, third = (("--out", folder / f"{name}.toml") for name in "abc")
    narrow = narrowed(path, limit, "limit = { epsilon = 0.5")
    return System((*ask, "--dry-run"), (*ask, *first), (*ask, *second), (*ask, *third), narrow)


def session(folder: Path) -> System:
    table = loaded(folder)
    words = (table, "count", "--where", "epsilon >= 0.5", "--epsilon")
    ask = ("session", "ask", *words, "0.1")

    def narrow() -> None:
        assert call("session", "ask", *words, "0.45").exit_code == 0

    return System(("session", "plan", *words, "0.1"), ask, ask, ask, narrow)


def tabulate(folder: Path) -> System:
    made = office(folder)
    new_key(folder / "noise.key")
    ledger = ("--ledger", folder / "ledger.db", "--data-set", "persons")
    key = ("--key-file", folder / "noise.key", *ledger, "--limit-delta", "1e-9")
    words = [*key, "--limit-epsilon", "60"]
    lists = [["tabulate", "plan", *made, *words]]
    lists += [["tabulate", "execute", *made, folder / out, *words] for out in "aab"]

    def narrow() -> None:
        for one in lists:
            one[-1] = "20"

    return System(*lists, narrow)


def answer(folder: Path, *more: str) -> System:
    narrow = narrowed(survey(folder, 300).path, "epsilon = 900.0", "epsilon = 2.0")
    words = ("answer", folder / "asked.json", folder / "job.toml", "--cache", folder / "c", *more)
    first, fresh = (*words, "--out", folder / "a"), (*words, "--out", folder / "b")
    return System((*words, "--dry-run"), first, first, fresh, narrow)


def answer_purely(folder: Path) -> System:
    of = answer(folder, "--pure")
    write(folder / "asked.json", [{"factors": {"age": "range", "sex": "identity"}}])
    return of


SYSTEMS = {
    "answer": answer,
    "pure": answer_purely,
    "sql": sql,
    "choose": choose,
    "session": session,
    "tabulate": tabulate,
}


def acceptance(words: Words) -> tuple[int, dict[str, Any]]:
    done = call(*words, "--json")
    told = json.loads(done.stdout.splitlines()[-1])
    return done.exit_code, told["acceptance"]


def charges(folder: Path) -> int:
    path = folder / "ledger.db"
    return len(read_ledger(path)) if path.exists() else 0


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_plan_says_what_the_command_does(name: str, tmp_path: Path) -> None:
    of = SYSTEMS[name](tmp_path)
    code, told = acceptance(of.plan)
    assert (code, told["accepted"], told["run_id"]) == (0, True, None) and told["charged"]
    assert not (tmp_path / "ledger.db").exists() or name == "session"
    done = call(*of.ask)
    assert done.exit_code == 0, done.output
    assert charges(tmp_path) == 1
    # Answered before: free, and the plan says so.
    code, told = acceptance(of.plan)
    assert (code, told["accepted"], told["charged"]) == (0, True, None) and told["run_id"]
    done = call(*of.free)
    assert done.exit_code == 0 and charges(tmp_path) == 1, done.output
    # Anew: one more charge.
    code, told = acceptance((*of.plan, "--fresh"))
    assert code == 0 and told["charged"]
    done = call(*of.fresh, "--fresh")
    assert done.exit_code == 0 and charges(tmp_path) == 2, done.output
    run_ids = {entry.charge.run_id for entry in read_ledger(tmp_path / "ledger.db")}
    assert len(run_ids) == 2


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_plan_is_refused_as_the_command_is(name: str, tmp_path: Path) -> None:
    of = SYSTEMS[name](tmp_path)
    of.narrow()
    before = charges(tmp_path)
    code, told = acceptance(of.plan)
    done = call(*of.ask, "--json")
    assert code == done.exit_code == 3 and told["accepted"] is False
    assert told["refusal"] == json.loads(done.stderr.splitlines()[-1])
    assert charges(tmp_path) == before


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_damaged_ledger_refuses_both(name: str, tmp_path: Path) -> None:
    of = SYSTEMS[name](tmp_path)
    assert call(*of.ask).exit_code == 0
    path = tmp_path / "ledger.db"
    data = bytearray(path.read_bytes())
    at = data.index(b'"epsilon":') + len(b'"epsilon":')
    data[at : at + 1] = b"9" if data[at : at + 1] != b"9" else b"8"
    path.write_bytes(data)
    code = call(*of.plan, "--json").exit_code
    assert code == call(*of.free, "--json").exit_code == 3


def test_a_fresh_answer_keeps_the_old_one(tmp_path: Path) -> None:
    of = answer(tmp_path, "--format", "csv")
    assert call(*of.ask).exit_code == 0
    old = (tmp_path / "a" / "answers.csv").read_bytes()
    assert call(*of.free, "--fresh").exit_code == 3  # its folder is taken
    assert call(*of.fresh, "--fresh").exit_code == 0 and charges(tmp_path) == 2
    assert (tmp_path / "a" / "answers.csv").read_bytes() == old
    assert (tmp_path / "b" / "answers.csv").read_bytes() != old


def test_answers_over_time_say_what_the_budget_covers(tmp_path: Path) -> None:
    plan = (*answer(tmp_path, "--over-time", "--units", "100", "--records", "300").plan,)
    assert {"Covers", "Cut"} <= {line.split(" ")[0] for line in call(*plan).stdout.splitlines()}
    covered = json.loads(call(*plan, "--json").stdout)["coverage"]
    assert covered["windows"] == 2 and covered["share_cut"] == pytest.approx(1 - 100 / 600)
