"""Columns are checked by type, and guessed by name for a question only."""

import pyarrow as pa
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field
from dpstream.pipelines.drafting.columns import column_of, text_column
from dpstream.pipelines.drafting.roles import (
    field_of,
    guessed_key,
    guessed_time,
    guessed_unit,
    time_of,
    value_of,
)

COLUMNS = (
    column_of("sha", pa.string()), column_of("author_id", pa.int32()),
    column_of("lang", pa.string()), column_of("at", pa.string()),
    column_of("pushed", pa.timestamp("us")), column_of("size", pa.float64()),
    column_of("micros", pa.int64()), column_of("twice", pa.string()),
    column_of("twice", pa.string()),
)  # fmt: skip


def test_types_of_the_schema_are_taken() -> None:
    assert field_of("author_id", COLUMNS, "--unit") == Field("author_id", "int")
    assert field_of("who", None, "--unit") == Field("who")
    assert time_of("micros", COLUMNS, micros=True) == "micros"
    assert value_of("size", COLUMNS) == "size"


def test_what_will_not_do_names_flag_and_fix() -> None:
    for call, field, message in (
        (lambda: field_of("size", COLUMNS, "--unit"), "--unit", "names nobody"),
        (lambda: field_of("pushed", COLUMNS, "--key"), "--key", "names nobody"),
        (lambda: field_of("user", COLUMNS, "--unit"), "--unit", "name one of sha, author_id"),
        (lambda: field_of("twice", COLUMNS, "--key"), "--key", "2 columns 'twice'. Fix: rename"),
        (lambda: field_of("", None, "--key"), "--key", "must not be empty"),
        (lambda: time_of("size", COLUMNS, micros=True), "--time", "is no time"),
        (lambda: time_of("micros", COLUMNS, micros=False), "--time", "--micros"),
        (lambda: value_of("pushed", COLUMNS), "--value", "is no number"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            call()
        assert error.value.field == field


def test_names_of_a_text_file_are_not_listed() -> None:
    with pytest.raises(UsageError) as error:
        field_of("user", [text_column("alice")], "--unit")
    assert "alice" not in str(error.value)


def test_guesses() -> None:
    assert guessed_unit(COLUMNS) == "author_id" and guessed_time(COLUMNS) == "pushed"
    assert guessed_time(COLUMNS[:4]) == "at" and guessed_time(COLUMNS[:2]) is None
    assert guessed_key(COLUMNS, ("author_id", "pushed")) == "lang"
    assert guessed_unit(COLUMNS[2:]) is None and guessed_key((), ()) is None
