"""Snapshots of a table's account beside the table, so that a process need not replay every entry.

A snapshot is a convenience, never an authority:

* one that is torn, edited or of another form, table or data set is ignored, and all entries are
  replayed from the first;
* a whole one names the entry it was made behind.  The digest of that entry covers all entries
  before it, so a ledger that holds the same digest under the same name is the one that the
  snapshot was made from, and the rest is replayed from there;
* one whose entry the ledger does not hold is ignored too: what proves that entries are gone is
  the account's head file (`state.ledger.head`), as for every other kind of question.

The file has digests of its own against damage (`state.seals`), not against somebody who can write
to it: like the ledger, it is the operator's.
"""

import contextlib
import io
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.regions.spent import Spent, restored
from dpstream.accounting.sessions.table import SessionTable
from dpstream.state.durable import PRIVATE, replacing
from dpstream.state.ledger.balances import Balances
from dpstream.state.ledger.contract import Ledger
from dpstream.state.seals import digest, sealed_text, unsealed_text

_NAME, _HEADER = "session snapshot", "header"
#: A program ignores what it does not know.
_VERSION = 1
#: What reading a file of any other content raises.
_TORN = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
)


class _Account(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One account; ``analyst`` is ``None`` for that of all; digests are of its two arrays."""

    kind: str
    analyst: str | None
    boxes: str
    amounts: str


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a snapshot."""

    data_set: str
    table: str
    entries: int
    name: str
    digest: str
    at: int
    accounts: tuple[_Account, ...]
    version: int = _VERSION


def write(path: Path, data_set: str, state: Balances) -> None:
    """Write a snapshot atomically, readable by its owner alone; a failure is ignored.

    Args:
        path: the file, which is replaced.
        state: the state of committed entries.
    """
    arrays, accounts = dict[str, Any](), list[_Account]()
    every = [(kind, None, spent) for kind, spent in state.spent.items()]
    every += [(kind, who, spent) for (kind, who), spent in state.own.items()]  # type: ignore[misc]
    for number, (kind, who, spent) in enumerate(every):
        boxes = np.ascontiguousarray(spent.boxes.transpose(1, 2, 0))
        amounts = np.ascontiguousarray(spent.amounts)
        arrays |= {f"boxes{number}": boxes, f"amounts{number}": amounts}
        accounts.append(_Account(kind, who, _digest(boxes), _digest(amounts)))
    header = _Header(
        data_set,
        state.table.digest,
        state.entries,
        state.name,
        state.digest,
        state.at,
        tuple(accounts),
    )
    text = sealed_text(_NAME, msgspec.json.encode(header).decode())
    arrays[_HEADER] = np.frombuffer(text.encode(), np.uint8)
    # Without it everything is replayed.
    with contextlib.suppress(OSError), replacing(path, PRIVATE) as draft, open(draft, "wb") as out:
        np.savez(out, **arrays)


def read(path: Path, table: SessionTable, ledger: Ledger) -> Balances | None:
    """Return the state of a snapshot; ``None``: replay from the first entry."""
    state = _read(path, table, ledger.data_set)
    if state is None or not state.entries:
        return None
    charges = ledger.history().charges
    held = state.entries <= len(charges) and charges[state.entries - 1].name == state.name
    return state if held and ledger.digest_of(state.name) == state.digest else None


def _read(path: Path, table: SessionTable, data_set: str) -> Balances | None:
    """Return a complete snapshot of this table and data set."""
    try:
        data = io.BytesIO(path.read_bytes())
        with np.load(data, allow_pickle=False) as file:
            text = unsealed_text(_NAME, file[_HEADER].tobytes().decode())
            header = msgspec.json.decode(text, type=_Header)
            if (header.data_set, header.table, header.version) != (
                data_set,
                table.digest,
                _VERSION,
            ):
                return None
            state = Balances(table, header.entries, header.name, header.digest, header.at)
            for number, account in enumerate(header.accounts):
                spent = _account(table, account, file[f"boxes{number}"], file[f"amounts{number}"])
                if account.analyst is None:
                    state.spent[account.kind] = spent
                else:
                    state.own[account.kind, account.analyst] = spent
    except (*_TORN, DpstreamError, msgspec.MsgspecError):
        return None
    return state if state.spent.keys() == Balances.first(table).spent.keys() else None


def _account(table: SessionTable, account: _Account, boxes: Any, amounts: Any) -> Spent:
    if (_digest(boxes), _digest(amounts)) != (account.boxes, account.amounts):
        raise ValueError
    kind = "epsilon" if account.kind == "epsilon" else "rho"
    return restored(table.space, kind, boxes.transpose(2, 0, 1), amounts, table.cap)  # type: ignore[arg-type]


def _digest(array: Any) -> str:
    shape = ",".join(map(str, array.shape))
    return digest(f"{_NAME} {array.dtype} {shape}", memoryview(array).cast("B")).hex()
