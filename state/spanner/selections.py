"""What tests of the Spanner store's run selected, where later windows remember it.

Rows of ``Steps`` at a ``WindowIndex`` of their own, by the step's global trigger time, so that a
window reads what is new to it as one range.  They are written in the commit of their step, or of
the part of it that has the keys, and no two commits give a row the same number.
"""

from base64 import b64decode
from collections.abc import Iterable
from typing import Any

from google.cloud import spanner

from dpstream.accounting.arrays import Bool
from dpstream.state import arrow
from dpstream.state.retention_store import Selection
from dpstream.state.spanner import client
from dpstream.state.spanner.commits import Mutations
from dpstream.state.spanner.rows import STEP, release_cells
from dpstream.state.spanner.schema import SELECTED
from dpstream.state.spanner.shards import PendingStep, SpannerKeyShard

#: Numbers of rows that a copy wrote begin here, within their window's.
COPIED = 1 << 31
_WINDOW, _PIECE = 32, 12
_END = 1 << 62


def piece_of(window: int, number: int) -> int:
    """``Piece`` of a window's row with this number, below 2^32."""
    return (window << _WINDOW) + number


def of_step(
    states: SpannerKeyShard, step: PendingStep, slots: Bool | None = None
) -> Selection | None:
    """What a step that waits has selected, of the marked slots or of all; ``None``: nothing."""
    chosen = step.selected
    if chosen is not None and slots is not None:
        chosen = chosen[slots[chosen]]
    if chosen is None or not len(chosen):
        return None
    keys = arrow.selected_keys(states, chosen)
    return Selection(step.trigger_time, states.window, keys)


def add(
    out: Mutations,
    states: SpannerKeyShard,
    step: PendingStep,
    first: int,
    slots: Bool | None = None,
) -> None:
    """Write what a step selected together with the rows of ``Steps`` from number ``first`` on."""
    selection = of_step(states, step, slots)
    if selection is None:
        return
    rows = [
        [
            states.part,
            SELECTED,
            selection.trigger_time,
            piece_of(selection.window, (first << _PIECE) + n),
            out.writer,
            value,
        ]
        for n, value in enumerate(release_cells(selection.keys))
    ]
    out.insert("Steps", STEP, rows)


def between(part: int, after: int, upto: int | None) -> spanner.KeyRange:
    """Rows of a part behind a trigger time, and up to another."""
    last = _END if upto is None else upto + 1
    return client.between((part, SELECTED, after + 1), (part, SELECTED, last))


def of_rows(rows: Iterable[list[Any]]) -> list[Selection]:
    """(step, piece, releases) of rows, in the order of their keys."""
    return [
        Selection(int(step), int(piece) >> _WINDOW, arrow.from_bytes(b64decode(value)))
        for step, piece, value in sorted(rows, key=lambda row: (row[0], row[1]))
    ]


def forget(out: Mutations, part: int, trigger_time: int) -> None:
    """Delete the rows up to a trigger time."""
    out.delete_between("Steps", (part, SELECTED, 0), (part, SELECTED, trigger_time + 1))
