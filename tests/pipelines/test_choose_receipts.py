"""The receipt of a private choice: edited figures and units, missing charges, old receipts."""

import re
import sqlite3
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from accounting.chosen import Receipt
from accounting.errors import PolicyError
from pipelines.jobs.job import load_job
from pipelines.stream import begin
from state.choices import ChoiceLedger
from state.ledger import Charge
from tests.pipelines.test_choose import JOB, call, choose, closed, done, entries, job

__all__ = ["closed", "job"]


def load(path: Path) -> str:
    """The field a job is refused for, or nothing."""
    try:
        load_job(path)
    except PolicyError as error:
        return error.field
    return ""


EDITS = {
    "privacy.contributions": (r"contributions = \d+", "contributions = 3"),
    "aggregate.total.clamp": (r"clamp = \[.*\]", "clamp = [-1, 1]"),
    "choice.epsilon": (r"epsilon = 1.0", "epsilon = 0.5"),
    "choice.mu": (r"mu = [\d.]+", "mu = 0.1"),
    "choice.first": (r'first = "12h"', 'first = "6h"'),
    "choice.clamps": (r'clamps = \["total"\]', "clamps = []"),
    "choice.run_id": (r'run_id = "..', 'run_id = "zz'),
    "choice.receipt": (r'receipt = "..', 'receipt = "zz'),
    "choice.question": (r'question = "..', 'question = "zz'),
    "choice.how": (r'how = "private"', 'how = "proxy"'),
    "schema.unit": (r'unit = \{ column = "user" \}', 'unit = { column = "key" }'),
    "ledger": (r"(?s)\[ledger\].*\[sink\]", "[sink]"),
}


def test_edited_figures_are_refused(job: Path) -> None:
    done(choose(job))
    text, edited = job.with_name("new.toml").read_text(), job.with_name("edited.toml")
    assert load(job.with_name("new.toml")) == ""
    for field, (old, new) in EDITS.items():
        assert re.search(old, text), field
        edited.write_text(re.sub(old, new, text))
        assert load(edited) == field
    edited.write_text(text.replace("epsilon = 2.0", "epsilon = 1.5"))  # the stream's own budget
    assert load(edited) == ""


def test_a_choice_without_its_charge_is_refused(job: Path) -> None:
    """Also by ``begin``, for a job that was loaded in time."""
    done(choose(job))
    made = load_job(job.with_name("new.toml"))
    for sql in ("UPDATE choices SET receipt = NULL", "DELETE FROM choices", "DELETE FROM entries"):
        with sqlite3.connect(job.with_name("ledger.db")) as db:
            db.execute(sql)
        with pytest.raises(PolicyError):
            begin(made)
    job.with_name("ledger.db").unlink()
    assert load(job.with_name("new.toml")) == "choice.run_id"
    assert not job.with_name("ledger.db").exists()


def test_an_uncharged_twin_is_caught(job: Path) -> None:
    with (
        mock.patch.object(ChoiceLedger, "charge_within"),
        mock.patch.object(ChoiceLedger, "_digest", lambda *_: "0" * 32),
    ):
        done(choose(job))
    assert entries(job) == 0 and load(job.with_name("new.toml")) != ""


def test_chosen_by_looking_is_refused_and_public_is_not(job: Path) -> None:
    text = JOB.replace("delta = 1e-8", "delta = 1e-8\ncontributions = 4")
    text = text.replace("grid = 0.5", "grid = 0.5\nclamp = [0, 9]")
    for how, field in (("data", "choice.how"), ("public", ""), ("proxy", "")):
        job.write_text(text.replace("[choice]", f'[choice]\nhow = "{how}"'))
        assert load(job) == field


PERIOD = JOB.replace("[privacy]", '[privacy]\nperiod = "1d"')
#: The unit of the choice, written otherwise: what `dpstream run` would charge to another unit.
UNITS = {
    "time.start": ('start = "2024-01-01T00:00:00Z"', 'start = "2023-12-31T23:00:00Z"'),
    "privacy.period": ('period = "1d"', 'period = "2d"'),
    "schema.event_time": ('event_time = { column = "time" }', 'event_time = { column = "at" }'),
    "schema.unit": ('{ column = "user" }', '{ column = "user", type = "bytes" }'),
    "ledger.unit": ('data_set = "deliveries"', 'data_set = "deliveries"\nunit = "person"'),
}


def test_the_unit_of_a_choice_cannot_be_edited(job: Path) -> None:
    job.write_text(PERIOD)
    done(choose(job, ask=("--first", "12h", "--epsilon", "1")))
    text, edited = job.with_name("new.toml").read_text(), job.with_name("edited.toml")
    assert load(job.with_name("new.toml")) == ""
    for field, (old, new) in UNITS.items():
        assert text.count(old) == 1, field
        edited.write_text(text.replace(old, new))
        # The words of the unit tell only of its column and, roughly, of the period's length.
        assert load(edited) == ("schema.unit" if field == "privacy.period" else field)
    edited.write_text(text.replace("2024-01-01T00:00:00Z", "2023-12-31T00:00:00Z"))  # a period
    assert load(edited) == ""


def test_a_receipt_from_before_units_were_kept_exactly(job: Path) -> None:
    """Its words are what there is to compare, and whoever chooses or runs is told."""
    job.write_text(PERIOD)
    real = msgspec.json.encode

    def encode(value: Any, **options: Any) -> bytes:
        if isinstance(value, Receipt | Charge):
            kept = msgspec.to_builtins(value)
            value = {k: v for k, v in kept.items() if k not in ("identity", "periods", "together")}
        return real(value, **options)

    with mock.patch("msgspec.json.encode", encode):
        done(choose(job))
    new = job.with_name("new.toml")
    assert load(new) == ""
    moved = new.read_text().replace(*UNITS["time.start"])
    new.write_text(moved)
    assert load(new) == ""
    # Another choice and a run say so.
    new.write_text(moved.replace("epsilon = 3.0", "epsilon = 9.0"))
    again = done(choose(new, "again.toml", "--clamps"))
    assert "Warning: 1 of the runs were charged by an older program" in again.stderr
    assert "Warning   2 of the runs" not in call("ledger", "show", new).stdout
    assert "Warning   1 of the runs were charged" in call("ledger", "show", new).stdout
    run = done(call("run", new, "--quiet"))
    assert "charged by an older program" in run.stderr
