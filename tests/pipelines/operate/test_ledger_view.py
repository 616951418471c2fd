"""``dpstream ledger show``: entries, what they spend together, what is left."""

import json
import math
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpstream.accounting.composition import within
from dpstream.accounting.figures import down
from dpstream.accounting.gaussian import epsilon_of, mu_of
from dpstream.pipelines.cli.main import cli
from dpstream.state.ledger.charges import Charge
from dpstream.state.ledger.open import open_ledger
from tests.audit.replays import JOB, LEDGER

UNIT = "user over the whole stream"
MU = mu_of(1.0, 0.6e-3)


def stream(run: int, epoch: int = 0) -> Charge:
    return Charge(f"{run:032x}", "plan", UNIT, 1.0, 1e-3, MU, 0.4e-3, "stream", epoch)


SESSION = Charge("5e" * 16, "q", UNIT, 0.5, 0.0, None, 0.0, "session")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A ledger of two data sets."""
    path = tmp_path / "book" / "ledger.db"
    for data_set, charges in (
        ("visits", [stream(1), stream(1, 1), SESSION]), ("weather", [stream(2)]),
    ):  # fmt: skip
        ledger = open_ledger(path, data_set)
        for charge in charges:
            ledger.charge(charge, 9.0, 0.1)
        ledger.close()
    return path


def call(*args: object) -> Result:
    return CliRunner().invoke(cli, ["ledger", "show", *(str(a) for a in args)])


def test_all_data_sets(book: Path) -> None:
    found = json.loads(call(book, "--json").stdout)
    visits, weather = found["data_sets"]
    assert found["head"] == {"seq": 4, "entries": 4}
    assert [(e["kind"], e["epoch"], e["mu"]) for e in visits["entries"]] == [
        ("stream", 0, MU), ("stream", 1, MU), ("session", 0, None),
    ]  # fmt: skip
    assert visits["unit"] == UNIT and visits["left"] is visits["limit"] is None
    # At the sum of the deltas; the session's epsilon comes on top of the Gaussians'.
    together = 0.5 + epsilon_of(math.sqrt(2) * MU, 2e-3 - 0.8e-3)
    assert visits["spent"] == {"epsilon": pytest.approx(together), "delta": 2e-3}
    # One run alone has spent its own guarantee.
    assert weather["spent"] == {"epsilon": 1.0, "delta": 1e-3}


def test_what_is_left_fits_and_no_more(book: Path) -> None:
    limit = ("--data-set", "visits", "--epsilon", "4", "--delta", "0.004")
    (found,) = json.loads(call(book, *limit, "--json").stdout)["data_sets"]
    spent, left = found["spent"]["epsilon"], found["left"]
    assert left["epsilon"] == pytest.approx(4 - spent)
    have = [stream(1), stream(1, 1), SESSION]
    for part, more in (("epsilon", 1e-6), ("mu", 1e-4)):
        for factor, fits in ((1 - more, True), (1 + more, False)):
            figures = (left["epsilon"] * factor, 0.0, None) if part == "epsilon" else (
                99.0, 0.5, left["mu"] * factor,
            )  # fmt: skip
            one = Charge("aa" * 16, "p", UNIT, *figures, 0.0)
            assert within([*have, one], 4.0, 0.004) is fits
    text = call(book, *limit).stdout
    assert f"Left      epsilon {down(left['epsilon'])}" in text and "Limit     epsilon 4" in text
    assert "epoch 1" in text and "weather" not in text
    used_up = call(book, "--data-set", "visits", "--epsilon", "1", "--delta", "0.0005")
    assert "more than any epsilon" in used_up.stdout and "Left      epsilon 0" in used_up.stdout


def test_zcdp_is_shown_and_never_rounded_down(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path / "ledger.db", "cells")
    rho = 0.123456789
    ledger.charge(Charge("7a" * 16, "t", UNIT, 9.0, 1e-9, None, 0.0, "table", rho=rho), 9.0, 1e-6)
    ledger.charge(SESSION, 9.0, 1e-6)
    ledger.close()
    limit = ("--epsilon", "9", "--delta", "1e-6")
    (found,) = json.loads(call(tmp_path / "ledger.db", *limit, "--json").stdout)["data_sets"]
    entry, left = found["entries"][0], found["left"]["rho"]
    assert entry["kind"] == "table" and entry["rho"] == rho and entry["mu"] is None
    have = [Charge("7a" * 16, "t", UNIT, 9.0, 1e-9, None, 0.0, rho=r) for r in (rho, left)]
    assert within([*have, SESSION], 9.0, 1e-6)
    text = call(tmp_path / "ledger.db", *limit).stdout
    (shown,) = re.findall(r"rho (\S+)\n.*session", text)
    assert float(shown) >= rho and float(shown) == pytest.approx(rho, rel=1e-3)
    (shown,) = re.findall(r"zCDP of rho (\S+)\n", text)
    assert 0 < float(shown) <= left


def test_a_jobs_ledger(book: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB + LEDGER)
    (found,) = json.loads(call(job, "--json").stdout)["data_sets"]
    assert found["data_set"] == "visits" and found["limit"] == {"epsilon": 30.0, "delta": 0.05}
    assert len(found["entries"]) == 3 and found["left"]["epsilon"] > 20
    assert "Data set  visits" in call(job).stdout
    before = book.read_bytes()
    # A data set that has spent nothing yet.
    job.write_text(JOB + LEDGER.replace("visits", "clicks"))
    (empty,) = json.loads(call(job, "--json").stdout)["data_sets"]
    assert empty["entries"] == [] and empty["left"]["epsilon"] == 30.0
    assert "none yet" in call(job).stdout and book.read_bytes() == before


def test_refusals(book: Path, tmp_path: Path) -> None:
    def refused(code: int, field: str, *args: object) -> None:
        result = call(*args)
        assert result.exit_code == code and f": {field}: " in result.stderr, result.output

    job = tmp_path / "job.toml"
    job.write_text(JOB)
    refused(2, "ledger", job)
    job.write_text(JOB + LEDGER.replace("book/", "none/"))
    refused(2, "ledger.path", job)
    assert not (tmp_path / "none").exists()
    refused(2, "ledger", tmp_path / "missing.db")
    refused(2, "--data-set", book, "--data-set", "clicks")
    for limit in (["--epsilon", 1], ["--delta", 0.1], ["--epsilon", 0, "--delta", 0.1],
                  ["--epsilon", 1, "--delta", 1], ["--epsilon", 1, "--delta", 0]):  # fmt: skip
        refused(2, "--epsilon", book, *limit)
