"""`dpstream choose`: receipts, units and proxies that are checked before and after."""

import gzip
import json
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream.begin import begin
from dpstream.state.ledger.answers import Register
from dpstream.state.ledger.sqlite import SqliteLedger
from dpstream.state.sqlite.database import sqlite3
from tests import accounts
from tests.pipelines.tuning.asking import (  # noqa: F401
    ASK,
    JOB,
    call,
    choose,
    closed,
    done,
    entries,
    job_file,
    load,
    pairs_of,
    records,
)

EDITS = {
    "contributions": (r"contributions = \d+", "contributions = 3"),
    "aggregate.total.clamp": (r"clamp = \[.*\]", "clamp = [-1, 1]"),
    "choice.epsilon": (r"epsilon = 1.0", "epsilon = 0.5"),
    "choice.mu": (r"mu = [\d.]+", "mu = 0.1"),
    "choice.first": (r'first = "12h"', 'first = "6h"'),
    "choice.bounds": (r'clamps = \["total"\]', "clamps = []"),
    "choice.run_id": (r'run_id = "..', 'run_id = "zz'),
    "choice.receipt": (r'receipt = "..', 'receipt = "zz'),
    "choice.question": (r'question = "..', 'question = "zz'),
    "choice.how": (r'how = "private"', 'how = "proxy"'),
    "table.unit_column": (r'unit = \{ column = "user" \}', 'unit = { column = "key" }'),
    "account": (r"(?s)\[ledger\].*\[sink\]", "[sink]"),
}


def test_edited_figures_are_refused(job: Path) -> None:
    done(choose(job))
    text, edited = job.with_name("new.toml").read_text(), job.with_name("edited.toml")
    assert load(job.with_name("new.toml")) == ""
    for field, (old, new) in EDITS.items():
        assert re.search(old, text), field
        accounts.write(edited, re.sub(old, new, text))
        assert load(edited) == field
    accounts.write(
        edited, text.replace("epsilon = 2.0", "epsilon = 1.5")
    )  # the stream's own budget
    assert load(edited) == ""


PERIOD = JOB.replace("[privacy]", '[privacy]\nperiod = "1d"')
#: The unit of the tuning, written otherwise: what `dpstream run` would charge to another unit.
UNITS = {
    "start": ('start = "2024-01-01T00:00:00Z"', 'start = "2023-12-31T23:00:00Z"'),
    "budget.covers": ('period = "1d"', 'period = "2d"'),
    "table.time_column": ('event_time = { column = "time" }', 'event_time = { column = "at" }'),
    "table.unit_column": ('{ column = "user" }', '{ column = "user", type = "bytes" }'),
    "unit.name": ('data_set = "deliveries"', 'data_set = "deliveries"\nunit = "person"'),
}


def test_the_unit_of_a_tuning_cannot_be_edited(job: Path) -> None:
    accounts.write(job, PERIOD)
    done(choose(job, ask=("--first", "12h", "--epsilon", "1")))
    text, edited = job.with_name("new.toml").read_text(), job.with_name("edited.toml")
    assert load(job.with_name("new.toml")) == ""
    for field, (old, new) in UNITS.items():
        assert text.count(old) == 1, field
        accounts.write(edited, text.replace(old, new))
        assert load(edited) == field
    accounts.write(edited, text.replace("2024-01-01T00:00:00Z", "2023-12-31T00:00:00Z"))  # a period
    assert load(edited) == ""


def test_a_tuning_without_its_charge_is_refused(job: Path) -> None:
    """Also by ``begin``, for a job that was loaded in time."""
    done(choose(job))
    made = load_job(job.with_name("new.toml"))
    for sql in (
        "UPDATE requests SET receipt = NULL",
        "DELETE FROM requests",
        "DELETE FROM entries",
    ):
        with sqlite3.connect(job.with_name("ledger.db")) as db:
            db.execute(sql)
        with pytest.raises(PolicyError):
            begin(made)
    job.with_name("ledger.db").unlink()
    with pytest.raises(UsageError) as refused:
        load_job(job.with_name("new.toml"))
    assert refused.value.field == "account.path"
    assert not job.with_name("ledger.db").exists()


def test_an_uncharged_one_is_caught(job: Path) -> None:
    with (
        mock.patch.object(SqliteLedger, "append"),
        mock.patch.object(Register, "_mine", lambda *_: True),
        mock.patch.object(Register, "_digest", lambda *_: "0" * 32),
    ):
        assert choose(job).exit_code == 3
    assert entries(job) == 0 and not job.with_name("new.toml").exists()


def test_tuned_by_looking_is_refused_and_public_is_not(job: Path) -> None:
    text = JOB.replace("delta = 1e-8", "delta = 1e-8\ncontributions = 4")
    text = text.replace("grid = 0.5", "grid = 0.5\nclamp = [0, 9]")
    for how, field in (("data", "choice.how"), ("public", ""), ("proxy", "")):
        accounts.write(job, text.replace("[choice]", f'[choice]\nhow = "{how}"'))
        assert load(job) == field


# --- other data -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["path", "copy", "link", "glob"])
def test_the_jobs_own_data_is_no_proxy(job: Path, tmp_path: Path, how: str) -> None:
    """Its exact figures would be a release without noise and without a charge."""
    own = job.parent / "in" / "a.csv"
    proxy = {"path": own, "copy": tmp_path / "c.csv", "link": tmp_path / "l.csv"}.get(how, own)
    if how == "copy":
        proxy.write_bytes(own.read_bytes())
    if how == "link":
        proxy.hardlink_to(own)
    pattern = own.parent / "*.csv" if how == "glob" else proxy
    result = choose(job, "new.toml", "--json", ask=("--proxy", str(pattern)))
    assert result.exit_code == 3 and json.loads(result.stderr)["field"] == "--proxy"
    assert not job.with_name("new.toml").exists()


def test_proxy_is_exact_uncharged_and_labelled(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.parent / "old.csv").write_text(records(50).replace("2024", "2020"))
    monkeypatch.chdir(job.parent)
    accounts.write(job, JOB[: JOB.index("[ledger]")] + JOB[JOB.index("[sink]") :])
    flags = ("--proxy", "old.csv", "--proxy-start", "2020-01-01T00:00:00Z", "--quantile", "0.9")
    made = json.loads(done(choose(job, "a.toml", "--json", ask=(*flags, "--first", "12h"))).stdout)
    pairs = [pairs_of(u) for u in range(50)]
    assert made["contributions"] == 4 * np.quantile(pairs, 0.9, method="inverted_cdf")
    assert made["run_id"] is None and entries(job) == 0
    plan_text = done(call("plan", job.with_name("a.toml"))).stdout
    assert "contributions and clamps of total chosen from other data: no charge" in plan_text
    proposal = json.loads(done(choose(job, "b.toml", "--json", ask=flags)).stdout)
    everyone = pairs + [1] * 150
    assert proposal["contributions"] == np.quantile(everyone, 0.9, method="inverted_cdf")
    assert choose(job, "c.toml", "--epsilon", "1", ask=flags).exit_code == 2
    empty = choose(job, "c.toml", ask=(*flags[:2], "--proxy-start", "1999-01-01T00:00:00Z"))
    assert empty.exit_code == 2 and "no usable record" in empty.stderr


@pytest.mark.parametrize("ask", [ASK, ("--proxy", "in/a.csv", "--first", "12h")])
def test_a_file_that_is_cut_off_is_refused_before_the_charge(
    job: Path, ask: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.parent)
    packed = gzip.compress((job.parent / "in" / "a.csv").read_bytes())
    (job.parent / "in" / "a.csv").write_bytes(packed[:-5])
    if ask is not ASK:
        (job.parent / "in").rename(job.parent / "old")
        (job.parent / "in").mkdir()
        ask = ("--proxy", "old/a.csv", *ask[2:])
    result = choose(job, "new.toml", "--json", ask=ask)
    field = "table.path" if ask is ASK else "--proxy"
    assert result.exit_code == 2 and json.loads(result.stderr)["field"] == field
    assert entries(job) == 0


# --- bad input ------------------------------------------------------------------------------------
