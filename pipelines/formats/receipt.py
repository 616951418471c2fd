"""The stored form of an answer in an account: one format for all kinds, written and read here.

    header (JSON, names sorted), a newline; of an answer that is one table: NUL, the table (Arrow)

The header says what was answered, and when; each kind has a header with fields of its own.  JSON
has no NUL, so the first one ends it.  An answer of many files names them in its header, and its
receipt is the manifest in the folder that is published (`ask.folder`).
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.figures import time_text
from dpstream.state.ledger.events import Charge

if TYPE_CHECKING:
    import pyarrow as pa

#: What an interval's columns are called after the column's own name.
LABELS = {"sd": "sd", "low": "noise_low", "high": "noise_high"}
_END = b"\0"


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The common fields of every answer; public.

    Attributes:
        run_id, plan_hash: of its charge.
        answered: when it was drawn (UTC, to the second); empty where that is no one moment (the
            releases of a stream), or where workers may write it several times.
        format: of the receipt.
    """

    run_id: str
    plan_hash: str
    answered: str = ""
    format: Literal[1] = 1


H = TypeVar("H", bound=Header)


def answered_now(charge: Charge) -> dict[str, Any]:
    """Return the fields that every header has, of an answer that is drawn now."""
    answered = time_text(datetime.now(UTC).replace(microsecond=0))
    return {"run_id": charge.run_id, "plan_hash": charge.plan_hash, "answered": answered}


def encoded(header: Header, table: "pa.Table | None" = None) -> bytes:
    """Return the receipt of an answer."""
    text = msgspec.json.format(msgspec.json.encode(header, order="sorted"), indent=1) + b"\n"
    return text if table is None else text + _END + table_bytes(table)


def header_of(receipt: bytes, kind: type[H], field: str = "account.path") -> H:
    """Return the header of a receipt.

    Args:
        field: what a refusal names.

    Raises:
        PolicyError: it is of another form.
    """
    end = receipt.find(_END)
    try:
        return msgspec.json.decode(receipt[:end] if end >= 0 else receipt, type=kind)
    except (msgspec.MsgspecError, UnicodeError):
        raise _foreign_receipt(field) from None


def table_of(receipt: bytes) -> "pa.Table":
    """Return the table of a receipt.

    Raises:
        PolicyError: it has none.
    """
    import pyarrow as pa  # which no plan needs

    end = receipt.find(_END)
    return read_table(pa.py_buffer(receipt)[end + 1 :])


def sorted_rows(table: "pa.Table", columns: Sequence[str]) -> "pa.Table":
    """Return a table sorted by some columns; as it is where there are none."""
    return table.sort_by([(name, "ascending") for name in columns]) if columns else table


def table_bytes(table: "pa.Table") -> bytes:
    """Return a table as it is kept: an Arrow stream of one batch."""
    import pyarrow as pa

    with pa.ipc.new_stream(sink := pa.BufferOutputStream(), table.schema) as stream:
        stream.write_table(table.combine_chunks())
    return bytes(sink.getvalue().to_pybytes())


def read_table(data: "bytes | pa.Buffer") -> "pa.Table":
    """Return the table of `table_bytes`.

    Raises:
        PolicyError: it is of another form.
    """
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(data).read_all()
    except (ValueError, OSError, pa.ArrowException):
        raise _foreign_receipt("account.path") from None


def _foreign_receipt(field: str) -> PolicyError:
    return PolicyError(
        field, "holds an answer of another form", "use the version of the program that wrote it"
    )
