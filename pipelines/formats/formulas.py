"""Text in CSV that a spreadsheet would compute.

Whoever makes a key popular chooses its text, and a spreadsheet takes text that begins with ``=``,
``+``, ``-``, ``@``, a tab or a line break for a formula, also between quotes.  Such text gets an
apostrophe in front, which spreadsheets take for "this is text".  So does such text behind
apostrophes of its own, so that taking one away always gives back what was written: text is guarded
if and only if it consists of an apostrophe and text that would be guarded.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

#: What a formula begins with; full-width forms count in some locales.
_FORMULA = r"[=+\-@\t\r\n\x{FF1D}\x{FF0B}\x{FF0D}\x{FF20}]"

#: A table, or a batch of one.
_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)


def guarded(table: _Rows) -> _Rows:
    """The table with every text that a spreadsheet would compute behind an apostrophe."""
    return _where(
        table, rf"\A'*{_FORMULA}", lambda column: pc.binary_join_element_wise("'", column, "")
    )


def unguarded(table: _Rows) -> _Rows:
    """The table that `guarded` was given."""
    return _where(
        table, rf"\A'+{_FORMULA}", lambda column: pc.utf8_slice_codeunits(column, 1, None)
    )


def ambiguous(table: pa.Table) -> bool:
    """Whether some text, written as it is, would be read as another that is guarded."""
    return unguarded(table) is not table


def _where(table: _Rows, form: str, change: Callable[[Any], Any]) -> _Rows:
    """Texts of a form changed; the table itself where there are none."""
    for i, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            column = table.column(i)
            mask = pc.match_substring_regex(column, form)
            if pc.any(mask).as_py():
                table = table.set_column(i, field, pc.if_else(mask, change(column), column))
    return table
