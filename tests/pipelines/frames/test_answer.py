"""Charged before it is counted, committed before it is seen, paid once.

The answer's table is everybody's, and its words say what is promised.
"""

from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dpstream
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.formats.receipt import table_of
from dpstream.pipelines.frames import answer as module
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.state.ledger.events import Charge
from tests import accounts
from tests.pipelines.frames.visits import KEY, LIBRARIES, account, visits, with_secret
from tests.pipelines.stream.test_begin import CutOff, cut_off

TABLE = visits()


def test_libraries_take_it_as_a_table() -> None:
    answer = dpstream.histogram(TABLE, unit="user", key="page", epsilon=2.0)
    names = ["page", "units", "units_sd", "units_noise_low", "units_noise_high"]
    assert answer.table.column_names == names and len(answer) == answer.table.num_rows > 3
    assert pa.table(answer).equals(answer.table)
    frame = answer.to_pandas()
    assert isinstance(frame, pd.DataFrame) and list(frame.columns) == names
    assert pl.DataFrame(answer).rows() == [tuple(row.values()) for row in answer.table.to_pylist()]
    assert answer.table["page"].to_pylist() == sorted(answer.table["page"].to_pylist())


def test_the_words_name_what_of_a_unit_counts() -> None:
    both: dict[str, Any] = {"unit": "user", "key": "page", "epsilon": 2.0}
    text = repr(dpstream.histogram(TABLE, **both, max_keys=3))
    assert "(2, 1e-09)-differential privacy" in text and "'user'" in text
    assert "at most 3 of its keys" in text and "if enough units have it" in text
    text = repr(dpstream.count(TABLE, **both, max_rows=2, public_keys=["p0"]))
    assert "at most 2 of its rows in each" in text and "public ones: all are here" in text
    text = repr(dpstream.sum(TABLE, unit="user", value="seconds", bounds=(0, 99.5), epsilon=0.1,
                            max_rows=5))  # fmt: skip
    assert "at most 5 of its rows, with values within 0 and 99.5" in text and "keys" not in text
    assert "(0.1, 0)" in text
    text = repr(dpstream.histogram(TABLE, **both, delta=0, public_keys=["p0"]))
    assert "(2, 0)-differential privacy" in text


def test_figures_of_a_guarantee_are_rounded_up() -> None:
    answer = dpstream.histogram(TABLE, unit="user", key="page", epsilon=1.23456789)
    assert "(1.23457, 1e-09)" in answer.guarantee and answer.epsilon == 1.23456789


def test_the_first_rows_are_shown_and_the_rest_counted() -> None:
    text = repr(dpstream.count(TABLE, unit="user", key="page", epsilon=1.0,
                                public_keys=[f"p{i}" for i in range(13)]))  # fmt: skip
    assert "... 3 more rows" in text and "count_noise_high" in text
    [line] = [line for line in text.splitlines() if line.split()[:1] == ["p0"]]
    assert len(line.split()) == 5
    empty = dpstream.mean(TABLE.slice(0, 0), unit="user", value="seconds", bounds=(0, 1), epsilon=1)
    assert repr(empty).splitlines()[-1].split() in (["–"] * 4, repr(empty).splitlines()[-1].split())


def test_nothing_is_printed_that_was_not_released() -> None:
    data = pa.table({"user": ["alice"], "page": ["secret"]})
    answer = dpstream.histogram(data, unit="user", key="page", epsilon=1.0)
    assert "alice" not in repr(answer) and "secret" not in repr(answer)


@pytest.mark.parametrize("name", ["table", "header", "guarantee", "receipt", "digest"])
def test_an_answer_says_all_of_itself(name: str) -> None:
    answer = dpstream.count(TABLE, unit="user", epsilon=1.0, mechanism="gaussian")
    assert getattr(answer, name) is not None and answer.charged is None and answer.delta == 1e-9


QUESTION: dict[str, Any] = {"unit": "user", "key": "page", "epsilon": 1.0}


def entries(folder: Path) -> list[Charge]:
    return accounts.charges(folder / "ledger.db")


def test_the_same_question_is_paid_once_whatever_the_rows_are(tmp_path: Path) -> None:
    paid = account(tmp_path)
    first = dpstream.histogram(TABLE, **QUESTION, **paid)
    tables = [LIBRARIES[name](TABLE) for name in LIBRARIES]
    again = [
        dpstream.histogram(table, **QUESTION, **paid) for table in (*tables, TABLE.slice(0, 0))
    ]
    assert first.charged and not any(one.charged for one in again)
    assert {one.receipt for one in again} == {first.receipt}
    assert all(one.table.equals(first.table) for one in again)
    assert all(first.header.answered in one.guarantee for one in again)
    assert [charge.kind for charge in entries(tmp_path)] == ["frame"]
    assert first.header.run_id == entries(tmp_path)[0].run_id


def test_other_questions_labels_and_fresh_ones_are_charged(tmp_path: Path) -> None:
    paid = account(tmp_path)
    first = dpstream.histogram(TABLE, **QUESTION, **paid)
    others = [
        dpstream.histogram(TABLE.slice(1), **QUESTION, **paid, as_of="Tuesday"),
        dpstream.histogram(TABLE, **{**QUESTION, "epsilon": 2.0}, **paid),
        dpstream.count(TABLE, **QUESTION, **paid),
        dpstream.histogram(TABLE, **QUESTION, **paid, fresh=True),
    ]
    assert all(one.charged for one in others)
    assert len({first.receipt, *(one.receipt for one in others)}) == 5
    assert len(entries(tmp_path)) == 5
    last = dpstream.histogram(TABLE, **QUESTION, **paid)
    assert last.receipt == others[-1].receipt and not last.charged


def test_beyond_the_limit_nothing_is_counted(tmp_path: Path) -> None:
    paid = account(tmp_path, epsilon=1.2)
    dpstream.histogram(TABLE, **QUESTION, **paid)
    with (
        cut_off(module, "_drawn", 1, False),
        pytest.raises(PolicyError, match="account") as error,
    ):
        dpstream.count(TABLE, **{**QUESTION, "epsilon": 5.0}, **paid)
    assert "raise the limit" in error.value.fix and len(entries(tmp_path)) == 1


@pytest.mark.parametrize("after", [False, True])
def test_what_is_cut_off_goes_on_with_its_noise_at_no_charge(tmp_path: Path, after: bool) -> None:
    paid = account(tmp_path)
    with cut_off(module, "_drawn", 1, after), pytest.raises(CutOff):
        dpstream.histogram(TABLE, **QUESTION, **paid)
    [charge] = entries(tmp_path)
    answer = dpstream.histogram(TABLE, **QUESTION, **paid)
    assert not answer.charged and answer.header.run_id == charge.run_id
    assert len(entries(tmp_path)) == 1


def test_noise_is_named_by_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that both draw before either commits draw the same."""
    paid, drawn = account(tmp_path), list[bytes]()
    real = module._drawn

    def twice(*arguments: Any) -> bytes:
        drawn.extend(real(*arguments) for _ in range(2))
        return drawn[-1]

    monkeypatch.setattr(module, "_drawn", twice)
    dpstream.histogram(TABLE, **QUESTION, **paid)
    one, other = (table_of(receipt) for receipt in drawn)
    assert one.equals(other)


def test_another_key_asks_anew(tmp_path: Path) -> None:
    paid = account(tmp_path)
    dpstream.histogram(TABLE, **QUESTION, **paid)
    new_secret(tmp_path / "other.secret")
    paid = with_secret(paid, SecretSource(f"file:{tmp_path / 'other.secret'}"))
    assert dpstream.histogram(TABLE, **QUESTION, **paid).charged


def test_a_key_is_needed_where_answers_are_given_again(tmp_path: Path) -> None:
    paid = account(tmp_path)
    paid = with_secret(paid, SecretSource())
    with pytest.raises(UsageError, match="dpstream secret new") as error:
        dpstream.histogram(TABLE, **QUESTION, **paid)
    assert error.value.field == "secret" and entries(tmp_path) == []


def test_without_an_account_every_answer_has_noise_of_its_own() -> None:
    one, other = (dpstream.histogram(TABLE, **QUESTION, public_keys=["p0", "p1"]) for _ in range(2))
    assert one.charged is None and one.header.run_id != other.header.run_id
    assert one.table != other.table and "no account" in one.guarantee


def test_a_fixed_test_key_is_said(tmp_path: Path) -> None:
    paid = with_secret(account(tmp_path), SecretSource(None, KEY))
    answer = dpstream.histogram(TABLE, **QUESTION, **paid)
    assert answer.guarantee.startswith("NOT PRIVATE")


def test_streams_statements_and_tables_share_one_account(tmp_path: Path) -> None:
    """A unit of another type is another unit, whose costs do not add up."""
    paid = account(tmp_path)
    dpstream.histogram(TABLE, **QUESTION, **paid)
    named = TABLE.set_column(0, "user", TABLE["user"].cast(pa.string()))
    with pytest.raises(PolicyError):
        dpstream.histogram(named, **QUESTION, **paid)


def test_automatic_bounds_are_released_and_cost_nothing_more(tmp_path: Path) -> None:
    paid = account(tmp_path)
    options = {**QUESTION, "epsilon": 20.0, "max_keys": 2}
    answer = dpstream.sum(TABLE, **options, **paid, value="seconds", bounds="auto")
    low, high = answer.header.bounds["sum"]
    assert low < high and answer.cuts["sum"].low == pytest.approx(low)
    assert len(entries(tmp_path)) == 1 and entries(tmp_path)[0].epsilon == 20.0
    few = TABLE.slice(0, 3)
    none = dpstream.mean(
        few, **QUESTION, **paid, value="seconds", bounds="auto", public_keys=["p0"]
    )
    assert none.table.column("mean").null_count == 1 and "missing" in none.guarantee


def test_receipts_hold_no_row_and_metadata_say_what_holds(tmp_path: Path) -> None:
    data = pa.table({"user": ["alice"] * 3, "page": ["of-alice-alone"] * 3})
    paid = account(tmp_path)
    (tmp_path / "ledger.db").unlink()
    accounts.create(tmp_path / "ledger.db", "visits", (100.0, 1e-5))
    answer = dpstream.histogram(data, **QUESTION, **paid)
    assert len(answer) == 0 and b"alice" not in answer.receipt
    metadata = answer.table.schema.metadata
    assert metadata[b"dpstream.guarantee"].decode() == answer.guarantee
    assert float(metadata[b"dpstream.epsilon"]) == answer.epsilon == 1.0
    written = b"".join(path.read_bytes() for path in tmp_path.glob("ledger*"))
    assert b"alice" not in written
