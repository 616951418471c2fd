"""Rows as blocks for a MAC: what they hold, byte by byte."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.dp_transforms.noise.framing import frame


@settings(max_examples=40)
@given(
    rows=st.lists(
        st.tuples(st.binary(max_size=34), st.binary(max_size=18), st.integers(-(2**63), 2**63 - 1)),
        max_size=5,
    )
)
def test_frames_are_length_context_and_components(
    rows: list[tuple[bytes, bytes, int]],
) -> None:
    """Block 0 holds bytes and context; components have a tag and a length; zeros at the end."""
    columns = []
    for number, tag in enumerate((3, 7)):
        data = b"".join(row[number] for row in rows)  # type: ignore[misc]
        ends = np.cumsum([0, *(len(row[number]) for row in rows)])  # type: ignore[arg-type]
        columns.append((tag, np.frombuffer(data or b"\0", np.uint8), ends.astype(np.int64)))
    message, lengths = frame(np.array([row[2] for row in rows], np.int64), columns)
    expected = []
    for first, second, context in rows:
        body = b"".join(
            bytes([tag]) + len(data).to_bytes(4, "little") + data
            for tag, data in ((3, first), (7, second))
        )
        head = len(body).to_bytes(8, "little") + context.to_bytes(8, "little", signed=True)
        expected.append(head + body + bytes(-len(body) % 16))
    assert lengths.tolist() == [len(one) // 16 for one in expected]
    assert message.tobytes() == b"".join(expected)
