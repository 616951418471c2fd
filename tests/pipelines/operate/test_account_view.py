"""``dpstream account show``: entries, what they spend together, what is left."""

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.figures import down
from dpstream.accounting.gaussian import epsilon_of, mu_of
from dpstream.pipelines.cli.main import cli
from dpstream.state.ledger.contract import AnswerLog, Decision
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.open import history_of, read_ledger
from tests import accounts
from tests.audit.replays import text_of
from tests.fixed import fixed_date

MU = mu_of(1.0, 0.6e-3)


def stream(run: int, epoch: int = 0) -> Charge:
    return Charge(f"{run:032x}", "plan", accounts.USER, 1.0, 1e-3, MU, 0.4e-3, "stream", epoch)


TABLE = Charge("5e" * 16, "q", accounts.USER, 0.5, 0.0, None, 0.0, "table")
CHARGES = (stream(1), stream(1, 1), TABLE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An account of three charges."""
    place = tmp_path / "book" / "ledger.db"
    ledger = accounts.opened(place, "visits", limit=(4.0, 0.004))
    for charge in CHARGES:
        ledger.charge(charge)
    ledger.close()
    return place


def call(*args: object) -> Result:
    return CliRunner().invoke(cli, ["account", "show", *(str(a) for a in args)])


def view_of(*args: object) -> dict[str, Any]:
    result = call(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_charge_has_the_date_of_its_entry(tmp_path: Path) -> None:
    """Of a run and of an answer; a charge that an older build wrote has none."""
    place = tmp_path / "book" / "ledger.db"
    ledger = accounts.opened(place, "visits", limit=(4.0, 0.004))
    with fixed_date():
        ledger.charge(stream(1))
        answered = AnswerLog(ledger, "table").begin("q", lambda _, __: Decision(TABLE))
    with ledger.transaction():
        ledger.append(stream(2))
    assert answered.charge == ledger.entries()[1]
    ledger.close()
    dates = [entry["at"] for entry in view_of(place)["entries"][1:]]
    assert dates == ["2024-01-05T00:00:00Z", "2024-01-05T00:00:00Z", None]
    assert call(place).stdout.count("  2024-01-05T00:00:00Z  (") == 2


def test_a_charge_is_named_after_what_was_run(tmp_path: Path) -> None:
    """A job, tables or an analyst: in a column of its own, which an account without names lacks."""
    place = tmp_path / "ledger.db"
    ledger = accounts.opened(place, "visits", limit=(4.0, 0.004))
    ledger.charge(TABLE)
    assert not view_of(place)["entries"][1]["label"]
    without = call(place).stdout
    ledger.charge(msgspec.structs.replace(stream(1), label="daily"))
    ledger.close()
    assert [entry["label"] for entry in view_of(place)["entries"][1:]] == ["", "daily"]
    lines = {line.split()[1]: line for line in call(place).stdout.splitlines() if " (" in line}
    assert lines["stream"].index(f"{1:032x}") == lines["table"].index(TABLE.run_id)
    assert f"stream   daily  {1:032x}" in lines["stream"] and f"table    {TABLE.run_id}" in without


def test_what_an_account_holds(path: Path) -> None:
    account = view_of(path)
    assert (account["id"], account["data_set"]) == (accounts.ID, "visits")
    assert account["unit"] == {
        "name": "user",
        "type": "string",
        "text": "user (string), all records",
    }
    assert account["head"]["seq"] == 4 and account["charges"] == 3
    first, *rest = account["entries"]
    assert first["event"] == "created" and first["limit"] == [4.0, 0.004]
    assert [(e["event"], e["kind"], e["epoch"], e["mu"]) for e in rest] == [
        ("charge", "stream", 0, MU), ("charge", "stream", 1, MU), ("charge", "table", 0, None),
    ]  # fmt: skip
    # The plain epsilon comes on top of the Gaussians'.
    together = 0.5 + epsilon_of(math.sqrt(2) * MU, 4e-3 - 0.8e-3)
    assert account["spent"] == {"epsilon": pytest.approx(together), "delta": 4e-3}


def test_what_is_left_fits_and_no_more(path: Path) -> None:
    account = view_of(path)
    left = account["left"]
    for part, more in (("epsilon", 1e-6), ("mu", 1e-4)):
        for factor, fits in ((1 - more, True), (1 + more, False)):
            figures: tuple[float, float, float | None] = (left["epsilon"] * factor, 0.0, None)
            if part == "mu":
                figures = (99.0, 0.5, left["mu"] * factor)
            one = Charge("aa" * 16, "p", accounts.USER, *figures, 0.0)
            with contextlib.closing(accounts.opened(path)) as ledger:
                if fits:
                    assert ledger.history().check([one])
                else:
                    with pytest.raises(PolicyError, match=r"account\.limit"):
                        ledger.history().check([one])
    text = call(path).stdout
    assert f"epsilon {down(left['epsilon'])}" in text and "epsilon 4" in text
    assert "epoch 1" in text and accounts.ID in text
    accounts.set_limit(path, (1.0, 0.0005))
    used_up = call(path).stdout
    assert "more than any epsilon" in used_up and "epsilon 0," in used_up
    assert "guarantees nothing" in used_up
    assert view_of(path)["entries"][-1]["event"] == "limit"


def test_zcdp_is_shown_and_never_rounded_down(tmp_path: Path) -> None:
    place = tmp_path / "ledger.db"
    ledger = accounts.opened(place, "cells", limit=(9.0, 1e-6))
    rho = 0.123456789
    ledger.charge(Charge("7a" * 16, "t", accounts.USER, 9.0, 1e-9, None, 0.0, "table", rho=rho))
    ledger.charge(TABLE)
    ledger.close()
    account = view_of(place)
    entry, left = account["entries"][1], account["left"]["rho"]
    assert entry["kind"] == "table" and entry["rho"] == rho and entry["mu"] is None
    one = Charge("7b" * 16, "t", accounts.USER, 9.0, 1e-9, None, 0.0, rho=left)
    assert history_of(read_ledger(place)).check([one])
    text = call(place).stdout
    (figure,) = re.findall(r"rho (\S+)\n.*table", text)
    assert float(figure) >= rho and float(figure) == pytest.approx(rho, rel=1e-3)
    (figure,) = re.findall(r"zCDP of rho (\S+);", text)
    assert 0 < float(figure) <= left


def test_the_account_of_a_data_set(path: Path, tmp_path: Path) -> None:
    project = tmp_path / "dpstream.toml"
    accounts.write(project, text_of())
    for named in ((), ("visits",)):
        account = view_of(*named, "--project", project)
        assert account["limit"] == {"epsilon": 40.0, "delta": 0.05}
        assert account["data_set"] == "visits"
        assert account["charges"] == 3 and account["left"]["epsilon"] > 20
    text, before = project.read_text(), path.read_bytes()
    for old, new, field in (
        (accounts.ID, "f" * 16, "account.id"), ("[data_set.visits]", "[data_set.clicks]", "data_"),
        ("book/", "none/", "account.path"), (", id = ", ", di = ", "data_set.visits.account"),
    ):  # fmt: skip
        project.write_text(text.replace(old, new))
        result = call("--project", project)
        assert result.exit_code in (2, 3) and field in result.stderr, result.output
    assert path.read_bytes() == before and not (tmp_path / "none").exists()


def test_refusals(tmp_path: Path) -> None:
    accounts.write(tmp_path / "dpstream.toml", text_of(account=False))
    without = call("--project", tmp_path)
    assert without.exit_code == 2 and "account" in without.stderr
    result = call(tmp_path / "missing.db")
    assert result.exit_code == 2 and ": FILE: " in result.stderr, result.output
