"""Answers of a job's records, from end to end, and the family of their noise."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.composition import Cost
from dpstream.accounting.strategies.cells.auto import auto
from dpstream.accounting.strategies.cells.strategy import identity
from dpstream.dp_transforms.noise import mixing as noise
from dpstream.pipelines.ask.acceptance import room_of
from dpstream.pipelines.jobs.committed import unit_of
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream import begin
from dpstream.pipelines.stream import run as stream
from dpstream.pipelines.workload import execute as module
from dpstream.pipelines.workload import registered
from dpstream.pipelines.workload.estimate import Estimate
from dpstream.pipelines.workload.execute import Done, Order, execute
from dpstream.pipelines.workload.release import read_release
from dpstream.state import open as stores
from dpstream.state.ledger.open import read_history
from tests import accounts
from tests.bench.paper.cell_baselines import haar
from tests.fixed import fixed_run_ids
from tests.golden.pinned import check, of_refusals
from tests.pipelines.cli.called import call, refused
from tests.pipelines.workload.survey import (
    JOB,
    KEY,
    charges,
    exact,
    rows,
    survey,
    workload,
    write,
)

STRATEGY = auto(workload()).strategy


def answered(folder: Path, out: str = "out", text: str = JOB, **options: Any) -> Done:
    job = survey(folder, epsilon=options.pop("epsilon", 6.0), text=text)
    order = Order(workload(), job, options.pop("strategy", STRATEGY), folder / out)
    done = list[Done]()
    execute(order._replace(**options), show=done.append)
    return done[0]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "mixed", lambda components, mixing: np.zeros(mixing.size, np.int64))


@pytest.mark.usefixtures("silent")
def test_without_noise_answers_are_exact(tmp_path: Path) -> None:
    answered(tmp_path)
    for row in rows(tmp_path):
        assert row["value"] == exact(tmp_path, row)
    release = read_release(tmp_path / "out")
    assert release.receipt.aggregate == ("n", "count") and release.receipt.insecure
    dead = (tmp_path / "dead_letter").rglob("*")
    assert any(path.is_file() for path in dead)


@pytest.mark.usefixtures("silent")
def test_sums_at_every_trigger(tmp_path: Path) -> None:
    text = JOB.replace('kind = "count"', 'kind = "sum", column = "amount", bounds = [0, 9]')
    answered(tmp_path, text=text, over_time=True)
    answer_rows = rows(tmp_path)
    assert len(answer_rows) == 8 * workload().queries
    for row in [*answer_rows[:3], *answer_rows[-3:], *answer_rows[40:400:37]]:
        begin, until = row["window_start"], row["trigger_time"].isoformat()
        expected = exact(
            tmp_path, row, f"sum(amount) FILTER (WHERE records.at >= '{begin.isoformat()}')", until
        )
        assert row["value"] == expected


@pytest.mark.usefixtures("silent")
def test_rows_that_went_through_a_query(tmp_path: Path) -> None:
    (tmp_path / "halves.sql").write_text("SELECT age / 2 AS age, sex FROM records WHERE amount > 3")
    columns = 'columns = {{ age = "FLOAT64", sex = "STRING", amount = "INT64" }}'
    text = JOB.replace("time_column", f"{columns}\ntime_column")
    answered(tmp_path, text=text.replace("\nkey =", '\nquery = "halves.sql"\nkey ='))
    total = rows(tmp_path)[-1]["value"]
    path = tmp_path / "records.parquet"
    [[expected]] = duckdb.execute(
        f"SELECT count(*) FROM '{path}' WHERE amount > 3 AND age BETWEEN 0 AND 159.9"
        " AND sex IN ('f', 'm')"
    ).fetchall()
    assert total == expected > 0


def test_errors_are_those_of_the_release_in_its_own_units(tmp_path: Path) -> None:
    """Of sums in steps of 0.5, where the sink has each cell's sd too."""
    text = JOB.replace(
        'kind = "count"', 'kind = "sum", column = "amount", bounds = [0, 9], grid = 0.5'
    )
    done = answered(tmp_path, text=text)
    estimate = read_release(tmp_path / "out").estimate
    assert isinstance(estimate, Estimate) and done.receipt.aggregate == ("n", "sum")
    [file] = (tmp_path / "releases").rglob("*.parquet")
    released = pq.read_table(file, partitioning=None).sort_by("cell")
    assert np.array_equal(released.column("n").to_numpy(), estimate.cells[0])
    mix_matrix = estimate.mix[0] if len(estimate.mix) == 1 else np.kron(*estimate.mix)
    sds = estimate.scale[0] * np.linalg.norm(mix_matrix, axis=1)
    assert np.allclose(released.column("n_sd").to_numpy(), sds, rtol=1e-9)


def test_noise_has_the_size_that_is_said(tmp_path: Path) -> None:
    answered(tmp_path)
    answer_rows = rows(tmp_path)
    off = np.array([(row["value"] - exact(tmp_path, row)) / row["sd"] for row in answer_rows])
    assert 0.2 < np.sqrt(np.mean(off**2)) < 3 and np.abs(off).max() < 6
    receipt = read_release(tmp_path / "out").receipt
    assert receipt.mu is not None
    planned = np.concatenate(STRATEGY.variances(workload())) ** 0.5 / receipt.mu
    assert np.allclose([row["sd"] for row in answer_rows], planned, rtol=2e-3)


@pytest.mark.parametrize(("owner", "name"), [(stream, "_connect"), (module, "write_release")])
def test_cut_off_anywhere_it_is_one_charge_and_the_same_bytes(
    owner: ModuleType, name: str, tmp_path: Path
) -> None:
    with (
        mock.patch.object(owner, name, side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        answered(tmp_path)
    stores.close_all()
    assert len(charges(tmp_path)) == 1 and not (tmp_path / "out").exists()
    done = answered(tmp_path)
    assert done.result.resumed
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert answered(tmp_path).receipt == done.receipt
    shutil.rmtree(tmp_path / "out")
    answered(tmp_path)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == files
    assert len(charges(tmp_path)) == 1


def test_the_identity_is_a_workload_too(tmp_path: Path) -> None:
    answered(tmp_path, strategy=identity(workload()))
    assert len(charges(tmp_path)) == 1
    receipt = read_release(tmp_path / "out").receipt
    cells = next(r for r in rows(tmp_path) if (r["age"], r["sex"]) == ("[0, 10)", "f"))
    assert receipt.mu is not None and cells["sd"] == pytest.approx(1 / receipt.mu, rel=1e-3)


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken" / "out").mkdir(parents=True)
    with fixed_run_ids():
        answered(tmp_path / "first")
    other = haar(workload())
    calls: dict[str, Callable[[], object]] = {
        "a folder that exists": lambda: answered(tmp_path / "taken"),
        "beyond the limit": lambda: answered(tmp_path / "much", epsilon=950.0),
        "another strategy in one store": lambda: answered(
            tmp_path / "first", "second", strategy=other
        ),
        "the place of another answer": lambda: answered(
            tmp_path / "other", "../first/out", strategy=other
        ),
    }
    check(Path(__file__).with_name("refusals_execute.txt"), of_refusals(calls))
    assert not (tmp_path / "much" / "people.store.db").exists()
    made = {path.parent.name: len(charges(path.parent)) for path in tmp_path.glob("*/ledger.db")}
    assert {name: number for name, number in made.items() if number} == {"first": 1}


def test_the_receipt_is_json(tmp_path: Path) -> None:
    answered(tmp_path, form="csv", nonnegative=True)
    receipt = json.loads((tmp_path / "out" / "release.json").read_bytes())
    assert receipt["strategy"] == STRATEGY.name and set(receipt["files"]) == {
        "answers.csv", "estimate.npz",
    }  # fmt: skip


RANGES: list[dict[str, Any]] = [{"factors": {"age": "range", "sex": "identity"}}]
UNION = [*RANGES, {"factors": {"age": "prefix"}}]


def ask_command(folder: Path, out: str, *more: str, queries: list[dict[str, Any]] = RANGES) -> None:
    file = write(folder / "r.json", queries)
    done = call("workload", "answer", file, "--project", folder, "--out", folder / out, "--cache",
                folder / "cache", "--quiet", *more)  # fmt: skip
    assert done.exit_code == 0, done.output


def families(folder: Path) -> list[str]:
    return ["geometric" if charge.mu is None else "gaussian" for charge in charges(folder)]


@pytest.mark.parametrize(
    ("optimise", "limit", "taken"),
    [("answer", "epsilon = 900.0", "geometric"), ("limit", "epsilon = 900.0", "gaussian"),
     ("limit", "epsilon = 6.0", "geometric")],
)  # fmt: skip
def test_taken_by(tmp_path: Path, optimise: str, limit: str, taken: str) -> None:
    delta = "delta = 1e-6" if limit == "epsilon = 900.0" else "delta = 1e-9"
    text = JOB.replace("epsilon = 900.0, delta = 1e-6", f"{limit}, {delta}")
    survey(tmp_path, 300, text=text)
    ask_command(tmp_path, "out", "--optimise", optimise)
    assert families(tmp_path) == [taken]
    receipt = json.loads((tmp_path / "out" / "release.json").read_text())
    assert (receipt["mu"] is None) == (taken == "geometric") and receipt["mechanism"] == taken


def test_asked_again_it_is_the_same_question(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    ask_command(tmp_path, "out", "--optimise", "answer")
    first = (tmp_path / "out" / "release.json").read_bytes()
    # By the limit it would be the other one; it was charged already.
    ask_command(tmp_path, "out", "--optimise", "limit")
    assert (tmp_path / "out" / "release.json").read_bytes() == first
    assert families(tmp_path) == ["geometric"]
    ask_command(tmp_path, "again", "--optimise", "limit", "--fresh")
    assert families(tmp_path) == ["geometric", "gaussian"]
    ask_command(tmp_path, "again", "--optimise", "answer")
    assert families(tmp_path) == ["geometric", "gaussian"]


@pytest.mark.parametrize(("first", "then"), [("answer", "limit"), ("limit", "answer")])
def test_a_question_behind_one_of_the_other_family_keeps_its_own(
    tmp_path: Path, first: str, then: str
) -> None:
    survey(tmp_path, 300)
    other = UNION if first == "answer" else [{"factors": {"age": "range"}}]
    ask_command(tmp_path, "other", "--optimise", then, queries=other)
    ask_command(tmp_path, "out", "--optimise", first)
    charged = families(tmp_path)
    assert sorted(charged) == ["gaussian", "geometric"]
    ask_command(tmp_path, "out", "--optimise", then)
    assert families(tmp_path) == charged


def test_a_fresh_question_behind_a_run_may_take_the_other_family(tmp_path: Path) -> None:
    """A run has no receipt in the account, and is not continued for that."""
    survey(tmp_path, 300)
    ask_command(tmp_path, "out", "--optimise", "limit")
    ask_command(tmp_path, "new", "--optimise", "answer", "--fresh")
    assert families(tmp_path) == ["gaussian", "geometric"]


def test_what_geometric_noise_cannot_answer_is_gaussian(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    ask_command(tmp_path, "union", "--optimise", "answer", queries=UNION)
    ask_command(tmp_path, "told", "--mechanism", "geometric")
    assert families(tmp_path) == ["gaussian", "geometric"]


@pytest.mark.parametrize("more", [(), ("--mechanism", "geometric")])
def test_without_a_delta_noise_is_geometric(tmp_path: Path, more: tuple[str, ...]) -> None:
    survey(tmp_path, 300)
    text = (tmp_path / "dpstream.toml").read_text()
    assert "delta = 1e-9" in text
    (tmp_path / "dpstream.toml").write_text(text.replace("delta = 1e-9", "delta = 0"))
    ask_command(tmp_path, "out", *more)
    assert families(tmp_path) == ["geometric"]
    ask_command(tmp_path, "out", *more)
    assert len(charges(tmp_path)) == 1
    given = ("workload", "answer", tmp_path / "r.json", "--project", tmp_path, "--out",
             tmp_path / "new")  # fmt: skip
    assert "--mechanism" in refused(*given, "--mechanism", "gaussian")
    assert "--tables" in refused(*given, "--tables")
    assert "write budget.delta = 1e-9" in refused(*given, "--over-time")
    assert "budget.delta" in refused("plan", "--project", tmp_path)


@pytest.mark.parametrize(
    "line", ['release_every = "1m"', 'release_every = "6h"\nallowed_lateness = "1d"']
)
def test_without_a_delta_the_triggers_of_a_job_do_not_matter(tmp_path: Path, line: str) -> None:
    """Geometric noise takes few triggers a window, and one answer has one."""
    text = JOB.replace('window = "1d"', 'window = "2d"').replace("delta = 1e-9", "delta = 0")
    survey(tmp_path, 300, text=JOB)
    accounts.write(tmp_path / "dpstream.toml", text.format(epsilon=6.0, key=KEY))
    ask_command(tmp_path, "out")
    job = (tmp_path / "dpstream.toml").read_text()
    assert 'release_every = "6h"' in job and "delta = 0," in job and 'window = "2d"' in job
    (tmp_path / "dpstream.toml").write_text(job.replace('release_every = "6h"', line))
    ask_command(tmp_path, "again")
    assert families(tmp_path) == ["geometric"]  # the same question
    (tmp_path / "dpstream.toml").write_text(job.replace('end = "2024-01-03T00:00:00Z"\n', ""))
    given = ("workload", "answer", tmp_path / "r.json", "--project", tmp_path, "--out",
             tmp_path / "new")  # fmt: skip
    assert "end" in refused(*given)


def test_a_strategy_by_name_is_for_gaussian_noise(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    ask_command(tmp_path, "named", "--optimise", "answer", "--strategy", "eigen")
    assert families(tmp_path) == ["gaussian"]


def test_what_is_left_of_a_limit(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    ask_command(tmp_path, "out", "--mechanism", "geometric")
    job = load_job(tmp_path / "dpstream.toml")
    assert job.ledger is not None
    room = room_of(read_history(job.ledger), unit_of(job))
    assert room is not None and float(room.spent.pieces[0].total.plain) == 6.0
    assert room.further_charges(Cost(6.0, 0.0, None, 0.0)) == 149


@pytest.mark.parametrize(
    ("first", "module", "name"),
    [("limit", module, "run_job"), ("limit", begin, "charge"), ("answer", registered, "bounded"),
     ("answer", registered, "answer_once")],
)  # fmt: skip
def test_two_who_ask_at_once_are_charged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, module: ModuleType, name: str
) -> None:
    """Whoever has chosen one family is overtaken, before or behind its charge, by whoever would
    choose the other: the one who is charged first decides."""
    survey(tmp_path, 300)
    other = "answer" if first == "limit" else "limit"
    overtaking = [lambda: ask_command(tmp_path, "overtaking", "--optimise", other)]

    def overtaken(act: Callable[..., Any]) -> Callable[..., Any]:
        def after(*args: Any, **options: Any) -> Any:
            if overtaking:
                overtaking.pop()()
            return act(*args, **options)

        return after

    monkeypatch.setattr(module, name, overtaken(getattr(module, name)))
    ask_command(tmp_path, "out", "--optimise", first)
    assert not overtaking
    decides = first if name == "bounded" else other
    assert families(tmp_path) == ["geometric" if decides == "answer" else "gaussian"]
    receipts = [json.loads((tmp_path / out / "release.json").read_text())
                for out in ("out", "overtaking")]  # fmt: skip
    assert receipts[0]["run_id"] == receipts[1]["run_id"]
    values = [pq.read_table(tmp_path / out / "answers.parquet") for out in ("out", "overtaking")]
    assert values[0].equals(values[1])


def test_an_account_that_cannot_be_read_is_refused_by_the_charge(tmp_path: Path) -> None:
    """The choice needs no account, so that the refusal says what is wrong with the file."""
    survey(tmp_path, 300)
    (tmp_path / "ledger.db").write_bytes(b"no database" * 100)
    file = write(tmp_path / "r.json", RANGES)
    out = tmp_path / "out"
    reason = refused("workload", "answer", file, "--project", tmp_path, "--out", out, code=3)
    assert "account.path" in reason and not out.exists()


@pytest.mark.parametrize("fresh", [(), ("--fresh",)])
def test_what_was_cut_off_keeps_its_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: tuple[str, ...]
) -> None:
    survey(tmp_path, 300)
    with monkeypatch.context() as cut:
        cut.setattr(registered, "bounded", mock.Mock(side_effect=KeyboardInterrupt))
        file = write(tmp_path / "r.json", RANGES)
        call("workload", "answer", file, "--project", tmp_path, "--out", tmp_path / "out",
             "--cache", tmp_path / "cache", "--optimise", "answer", "--quiet", *fresh)  # fmt: skip
    assert families(tmp_path) == ["geometric"] and not (tmp_path / "out").exists()
    ask_command(tmp_path, "out", "--optimise", "limit", *fresh)
    assert families(tmp_path) == ["geometric"]
    ask_command(tmp_path, "new", "--optimise", "limit", "--fresh")
    assert families(tmp_path) == ["geometric", "gaussian"]
