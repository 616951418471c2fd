"""What of a world may depend on its rows, and what may not: released values, and the rest.

`public_part` is the rest.  First answers on neighbouring rows must have the same.
"""

import contextlib
import io
import re
import sqlite3
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

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
    with contextlib.closing(sqlite3.connect(ACCOUNT)) as db:
        tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for [table] in tables:
            rows = db.execute(f"SELECT * FROM {table}")
            names = [column[0] for column in rows.description]
            for row in rows:
                of = {n: v for n, v in zip(names, row, strict=True) if not n.endswith("digest")}
                if table == "tokens":  # they are random
                    of = {"run_id": of["run_id"]}
                if of.get("name") == "seal":
                    of["value"] = shape(of["value"])
                if '"event":"receipt"' in of.get("entry", ""):
                    of["entry"] = re.sub('"digest":"[0-9a-f]{32}"', "", of["entry"])
                of["entry"] = re.sub(r'"at":\d+', "", of.get("entry", ""))  # the time
                for name in {"receipt", "view"} & {n for n in of if of[n] is not None}:
                    of[name] = _of_answer(of[name], selects)
                out.append((table, of))
    return out


def _of_answer(data: bytes, selects: bool) -> object:
    """The header of a receipt and its table's columns; of a view there is a table alone."""
    end = data.find(b"\0") if data.startswith(b"{") else -1
    header = data if data.startswith(b"{") and end < 0 else data[: max(end, 0)]
    if data is header:
        return shape(header.decode())
    table = pa.ipc.open_stream(data[end + 1 :]).read_all()
    return shape(header.decode()), str(table.schema), None if selects else table.num_rows
