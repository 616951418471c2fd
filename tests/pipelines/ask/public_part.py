"""What of a world may depend on its rows, and what may not: released values, and the rest.

`public_part` is the rest.  First answers on neighbouring rows must have the same.
"""

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.state.ledger.events import Received, text_of
from tests import accounts
from tests.pipelines.ask.kinds import ACCOUNT, Kind, Outcome, left

#: Keyed by rows that they may not name: digests of released bytes, and of all that has those.
_DIGEST = re.compile(r"\b[0-9a-f]{16}([0-9a-f]{16})?\b")


def public_part(kind: Kind, outcome: Outcome) -> dict[str, object]:
    """Of the current folder, and of what a command said."""
    files = left(Path(), kind.private)
    return {
        "exit code": outcome.code,
        "stdout": shape(outcome.stdout),
        "stderr": outcome.stderr,
        "account": account(kind.selects),
        **{
            _DIGEST.sub("digest", name): _of_file(name, data, kind.selects)
            for name, data in files.items()
            if isinstance(data, bytes)
        },
    }


def shape(text: str) -> str:
    """A text without its figures and digests."""
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", _DIGEST.sub("digest", text))


def _of_file(name: str, data: bytes, selects: bool) -> object:
    if name.endswith(".parquet"):
        file = pq.ParquetFile(io.BytesIO(data))
        return str(file.schema_arrow), None if selects else file.metadata.num_rows
    if name.endswith(".npz"):
        with np.load(io.BytesIO(data)) as arrays:
            return {name: (arrays[name].shape, arrays[name].dtype) for name in arrays.files}
    if name.endswith(".head"):
        return len(data)
    text = data.decode()
    if name.endswith((".csv", ".jsonl")):
        head, *rows = text.splitlines() or [""]
        return shape(head), None if selects else len(rows)
    return shape(text)


def account(selects: bool) -> list[object]:
    """All that the account holds: of charges and requests every byte."""
    out = list[object]()
    with contextlib.closing(accounts.opened(ACCOUNT)) as ledger:
        out.append(len(ledger.storage.rows(0)))
        for entry in ledger.history().entries:
            text = re.sub(r'"at":\d+', "", text_of(entry.event))  # the time
            out.append(shape(text) if isinstance(entry.event, Received) else text)
        for charge in ledger.entries():
            out.append(len(ledger.tokens(charge.run_id)))  # they are random
            stored = ledger.request_of(charge.run_id) or ()
            answer = [part for part in (*stored[3:4], *stored[5:6]) if isinstance(part, bytes)]
            out.append((stored[:3], *(_of_answer(part, selects) for part in answer)))
    return out


def _of_answer(data: bytes, selects: bool) -> object:
    """The header of a receipt and its table's columns; of a view there is a table alone."""
    end = data.find(b"\0") if data.startswith(b"{") else -1
    header = data if data.startswith(b"{") and end < 0 else data[: max(end, 0)]
    if data is header:
        return shape(header.decode())
    table = pa.ipc.open_stream(data[end + 1 :]).read_all()
    return shape(header.decode()), str(table.schema), None if selects else table.num_rows
