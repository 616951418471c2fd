"""The family of an answer, before its charge: by the account, and the same when asked again."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest

from dpstream.accounting.query.calibration import Cost
from dpstream.pipelines.ask.acceptance import room_of
from dpstream.pipelines.jobs.committed import unit_of
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream import begin
from dpstream.pipelines.workload import execute, registered
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.open import read_history
from tests import accounts
from tests.pipelines.cli.called import call, refused
from tests.pipelines.workload.survey import JOB, KEY, survey, write

RANGES: list[dict[str, Any]] = [{"factors": {"age": "range", "sex": "identity"}}]
UNION = [*RANGES, {"factors": {"age": "prefix"}}]


def charges(folder: Path) -> list[Charge]:
    with contextlib.closing(accounts.opened(folder / "ledger.db", "people")) as ledger:
        return ledger.entries()


def answered(folder: Path, out: str, *more: str, queries: list[dict[str, Any]] = RANGES) -> None:
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
    answered(tmp_path, "out", "--optimise", optimise)
    assert families(tmp_path) == [taken]
    receipt = json.loads((tmp_path / "out" / "release.json").read_text())
    assert (receipt["mu"] is None) == (taken == "geometric") and receipt["mechanism"] == taken


def test_asked_again_it_is_the_same_question(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    answered(tmp_path, "out", "--optimise", "answer")
    first = (tmp_path / "out" / "release.json").read_bytes()
    # By the limit it would be the other one; it was charged already.
    answered(tmp_path, "out", "--optimise", "limit")
    assert (tmp_path / "out" / "release.json").read_bytes() == first
    assert families(tmp_path) == ["geometric"]
    answered(tmp_path, "again", "--optimise", "limit", "--fresh")
    assert families(tmp_path) == ["geometric", "gaussian"]
    answered(tmp_path, "again", "--optimise", "answer")
    assert families(tmp_path) == ["geometric", "gaussian"]


@pytest.mark.parametrize(("first", "then"), [("answer", "limit"), ("limit", "answer")])
def test_a_question_behind_one_of_the_other_family_keeps_its_own(
    tmp_path: Path, first: str, then: str
) -> None:
    survey(tmp_path, 300)
    other = UNION if first == "answer" else [{"factors": {"age": "range"}}]
    answered(tmp_path, "other", "--optimise", then, queries=other)
    answered(tmp_path, "out", "--optimise", first)
    charged = families(tmp_path)
    assert sorted(charged) == ["gaussian", "geometric"]
    answered(tmp_path, "out", "--optimise", then)
    assert families(tmp_path) == charged


def test_a_fresh_question_behind_a_run_may_take_the_other_family(tmp_path: Path) -> None:
    """A run has no receipt in the account, and is not continued for that."""
    survey(tmp_path, 300)
    answered(tmp_path, "out", "--optimise", "limit")
    answered(tmp_path, "new", "--optimise", "answer", "--fresh")
    assert families(tmp_path) == ["gaussian", "geometric"]


def test_what_geometric_noise_cannot_answer_is_gaussian(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    answered(tmp_path, "union", "--optimise", "answer", queries=UNION)
    answered(tmp_path, "told", "--mechanism", "geometric")
    assert families(tmp_path) == ["gaussian", "geometric"]


@pytest.mark.parametrize("more", [(), ("--mechanism", "geometric")])
def test_without_a_delta_noise_is_geometric(tmp_path: Path, more: tuple[str, ...]) -> None:
    survey(tmp_path, 300)
    text = (tmp_path / "dpstream.toml").read_text()
    assert "delta = 1e-9" in text
    (tmp_path / "dpstream.toml").write_text(text.replace("delta = 1e-9", "delta = 0"))
    answered(tmp_path, "out", *more)
    assert families(tmp_path) == ["geometric"]
    answered(tmp_path, "out", *more)
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
    answered(tmp_path, "out")
    job = (tmp_path / "dpstream.toml").read_text()
    assert 'release_every = "6h"' in job and "delta = 0," in job and 'window = "2d"' in job
    (tmp_path / "dpstream.toml").write_text(job.replace('release_every = "6h"', line))
    answered(tmp_path, "again")
    assert families(tmp_path) == ["geometric"]  # the same question
    (tmp_path / "dpstream.toml").write_text(job.replace('end = "2024-01-03T00:00:00Z"\n', ""))
    given = ("workload", "answer", tmp_path / "r.json", "--project", tmp_path, "--out",
             tmp_path / "new")  # fmt: skip
    assert "end" in refused(*given)


def test_a_strategy_by_name_is_for_gaussian_noise(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    answered(tmp_path, "named", "--optimise", "answer", "--strategy", "eigen")
    assert families(tmp_path) == ["gaussian"]


def test_what_is_left_of_a_limit(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    answered(tmp_path, "out", "--mechanism", "geometric")
    job = load_job(tmp_path / "dpstream.toml")
    assert job.ledger is not None
    room = room_of(read_history(job.ledger), unit_of(job))
    assert room is not None and float(room.spent.pieces[0].total.plain) == 6.0
    assert room.further_charges(Cost(6.0, 0.0, None, 0.0)) == 149


@pytest.mark.parametrize(
    ("first", "module", "name"),
    [("limit", execute, "run_job"), ("limit", begin, "charge"), ("answer", registered, "bounded"),
     ("answer", registered, "answer_once")],
)  # fmt: skip
def test_two_who_ask_at_once_are_charged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, module: ModuleType, name: str
) -> None:
    """Whoever has chosen one family is overtaken, before or behind its charge, by whoever would
    choose the other: the one who is charged first decides."""
    survey(tmp_path, 300)
    other = "answer" if first == "limit" else "limit"
    overtaking = [lambda: answered(tmp_path, "overtaking", "--optimise", other)]

    def overtaken(act: Callable[..., Any]) -> Callable[..., Any]:
        def after(*args: Any, **options: Any) -> Any:
            if overtaking:
                overtaking.pop()()
            return act(*args, **options)

        return after

    monkeypatch.setattr(module, name, overtaken(getattr(module, name)))
    answered(tmp_path, "out", "--optimise", first)
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
    answered(tmp_path, "out", "--optimise", "limit", *fresh)
    assert families(tmp_path) == ["geometric"]
    answered(tmp_path, "new", "--optimise", "limit", "--fresh")
    assert families(tmp_path) == ["geometric", "gaussian"]
