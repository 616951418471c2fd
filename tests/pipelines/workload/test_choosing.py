"""The family of an answer, before its charge: by the account, and the same when asked again."""

import contextlib
import json
from pathlib import Path

import pytest

from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.workload.choosing import left_of
from dpstream.state.ledger.charges import Charge
from dpstream.state.ledger.open import read_book
from tests import accounts
from tests.pipelines.cli.called import call, refused
from tests.pipelines.workload.survey import JOB, survey, write

RANGES = [{"factors": {"age": "range", "sex": "identity"}}]
UNION = [*RANGES, {"factors": {"age": "prefix"}}]


def charges(folder: Path) -> list[Charge]:
    with contextlib.closing(accounts.opened(folder / "ledger.db", "people")) as ledger:
        return ledger.entries()


def asked(folder: Path, out: str, *more: str, queries: list[dict[str, object]] = RANGES) -> None:
    file = write(folder / "r.json", queries)
    done = call("answer", file, folder / "job.toml", "--out", folder / out, "--cache",
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
    asked(tmp_path, "out", "--optimise", optimise)
    assert families(tmp_path) == [taken]
    receipt = json.loads((tmp_path / "out" / "release.json").read_text())
    assert (receipt["mu"] is None) == (taken == "geometric")


def test_asked_again_it_is_the_same_question(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    asked(tmp_path, "out", "--optimise", "answer")
    first = (tmp_path / "out" / "release.json").read_bytes()
    # By the limit it would be the other one; it was charged already.
    asked(tmp_path, "out", "--optimise", "limit")
    assert (tmp_path / "out" / "release.json").read_bytes() == first
    assert families(tmp_path) == ["geometric"]
    asked(tmp_path, "again", "--optimise", "limit", "--fresh")
    assert families(tmp_path) == ["geometric", "gaussian"]
    asked(tmp_path, "again", "--optimise", "answer")
    assert families(tmp_path) == ["geometric", "gaussian"]


def test_what_geometric_noise_cannot_answer_is_gaussian(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    asked(tmp_path, "union", "--optimise", "answer", queries=UNION)
    asked(tmp_path, "told", "--mechanism", "geometric")
    assert families(tmp_path) == ["gaussian", "geometric"]


@pytest.mark.parametrize("more", [(), ("--mechanism", "geometric")])
def test_without_a_delta_noise_is_geometric(tmp_path: Path, more: tuple[str, ...]) -> None:
    survey(tmp_path, 300)
    text = (tmp_path / "job.toml").read_text()
    (tmp_path / "job.toml").write_text(text.replace("delta = 1e-9", "delta = 0"))
    asked(tmp_path, "out", *more)
    assert families(tmp_path) == ["geometric"]
    asked(tmp_path, "out", *more)
    assert len(charges(tmp_path)) == 1
    given = ("answer", tmp_path / "r.json", tmp_path / "job.toml", "--out", tmp_path / "new")
    assert "--mechanism" in refused(*given, "--mechanism", "gaussian")
    assert "--tables" in refused(*given, "--tables")
    assert "--over-time" in refused(*given, "--over-time")
    assert "privacy.delta" in refused("plan", tmp_path / "job.toml")


def test_a_strategy_by_name_is_for_gaussian_noise(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    asked(tmp_path, "named", "--optimise", "answer", "--strategy", "eigen")
    assert families(tmp_path) == ["gaussian"]


def test_what_is_left_of_a_limit(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    asked(tmp_path, "out", "--mechanism", "geometric")
    ledger = load_job(tmp_path / "job.toml").ledger
    assert ledger is not None
    remaining = left_of(read_book(ledger))
    assert remaining is not None and remaining.epsilon == pytest.approx(894.0) and remaining.mu > 30
