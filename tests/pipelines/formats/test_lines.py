"""A byte order mark is its own row's or text's; more lines with marks are in files.test_source."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.pipelines.formats import lines as source_lines
from dpstream.pipelines.formats.jsonl import Objects
from dpstream.pipelines.formats.lines import BOM
from tests.pipelines.connectors.files.test_source import csv_rows, json_rows


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_no_row_takes_the_byte_order_mark_of_another(marks: list[int], block: int) -> None:
    """One column too: there a row of nothing but a mark would be an empty line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_lines, "BLOCK_BYTES", block)
        texts = [n * "\ufeff" + "x" * (n != 2) for n in marks]
        data = "\n".join(texts).encode()
        assert csv_rows(b"a\n" + data, ("a",))[0] == {i: (t,) for i, t in enumerate(texts)}
        assert csv_rows(BOM + b"a\n" + data, ("a",)) == csv_rows(b"a\n" + data, ("a",))
        objects = b"\n".join(n * BOM + b'{"a": 1}' for n in marks)
        good = {i: ("1",) for i, n in enumerate(marks) if n < 2}
        assert json_rows(objects, ("a",))[0] == good


def test_messages_do_not_take_the_byte_order_mark_of_another() -> None:
    texts = [BOM + b'{"a": "x"}', b'{"a": "y"}', BOM + BOM + b"{}", b"{"]
    objects = Objects(("a",))
    alone = [objects.decode([text], 100)[0] for text in texts]
    assert objects.decode(texts, 100) == alone == [alone[0], alone[1], None, None]
    assert objects.arrays(alone[:2])[0].to_pylist() == ["x", "y"]
