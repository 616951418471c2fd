"""A receipt is read back as it was written, or refused."""

import msgspec
import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.formats.receipt import Header, answered_now, encoded, header_of, table_of
from tests.state.ledger.conformance import charge


class Own(Header, frozen=True, kw_only=True):
    """The header of a kind."""

    note: str


HEADER = Own(**answered_now(charge(7)), note="two\nlines\0and a NUL")
ROWS = pa.table({"page": ["a", None], "n": [1.5, 2.5]})


def test_header_and_table_are_read_back() -> None:
    made = charge(7)
    receipt = encoded(HEADER, ROWS)
    assert header_of(receipt, Own) == HEADER and table_of(receipt).equals(ROWS)
    assert (HEADER.run_id, HEADER.plan_hash) == (made.run_id, made.plan_hash)
    assert encoded(HEADER, ROWS.slice(0, 1).combine_chunks()) != receipt
    parts = pa.concat_tables([ROWS.slice(0, 1), ROWS.slice(1)])
    assert encoded(HEADER, parts) == receipt  # whatever chunks the table has


def test_a_receipt_without_a_table_is_json_that_people_can_read() -> None:
    receipt = encoded(HEADER)
    assert msgspec.json.decode(receipt)["note"] == HEADER.note and receipt.count(b"\n") > 4
    assert header_of(receipt, Own) == HEADER
    with pytest.raises(PolicyError):
        table_of(receipt)


def test_bytes_of_another_form_are_refused() -> None:
    receipt = encoded(HEADER, ROWS)
    of_version_2 = receipt.replace(b'"format": 1', b'"format": 2')
    other_field = receipt.replace(b'"note"', b'"mote"')
    assert len({receipt, of_version_2, other_field}) == 3
    for bad in (b"", b"{}", receipt[:20], b"x" + receipt, of_version_2, other_field):
        with pytest.raises(PolicyError) as caught:
            header_of(bad, Own, "a field")
        assert caught.value.field == "a field"
    for bad in (receipt[:-40], receipt[: receipt.index(b"\0") + 1]):
        with pytest.raises(PolicyError):
            table_of(bad)
