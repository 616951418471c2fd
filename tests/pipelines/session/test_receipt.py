"""Receipts: what was committed is read again, and nothing else is."""

import msgspec
import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.sessions.aggregates import COUNT, Question, sum_of
from dpstream.pipelines.formats.receipt import encoded, header_of
from dpstream.pipelines.session.receipt import Header, decoded
from dpstream.state.ledger.answers import Answer

ROWS = pa.table({"count": [3.0], "count_sd": [1.0], "count_low": [1.0], "count_high": [5.0]})
HEADER = Header(
    run_id="ab" * 16, plan_hash="12" * 16, table="cd" * 16, answered="2024-01-01T00:00:00Z",
    where="a < 2", question=Question(kind="rho", amount=5), drop=True, allotment="ef" * 16,
)  # fmt: skip


def committed(receipt: bytes) -> Answer:
    return Answer(HEADER.run_id, receipt, "digest", True)


def test_a_receipt_is_read_again() -> None:
    receipt = encoded(HEADER, ROWS)
    answer = decoded(committed(receipt), True)
    assert answer.header == HEADER == header_of(receipt, Header) and answer.table == ROWS
    assert (answer.value, answer.sd, answer.interval) == (3.0, 1.0, (1.0, 5.0))
    assert answer.charged and answer.insecure and answer.receipt == receipt


def test_one_value_is_asked_of_one_figure() -> None:
    question = Question(kind="epsilon", amount=5, aggregates=(COUNT, sum_of("b")))
    header = msgspec.structs.replace(HEADER, question=question)
    with pytest.raises(UsageError, match="several figures"):
        _ = decoded(committed(encoded(header, ROWS)), False).value
    two = pa.concat_tables([ROWS, ROWS])
    with pytest.raises(UsageError, match="several figures"):
        _ = decoded(committed(encoded(HEADER, two)), False).sd


@pytest.mark.parametrize("cut", [0, 3, 8, 40, -60])
def test_other_bytes_are_refused(cut: int) -> None:
    receipt = encoded(HEADER, ROWS)
    for wrong in (receipt[:cut], b"x" + receipt[1:]):
        with pytest.raises(PolicyError, match="another form"):
            decoded(committed(wrong), False)
