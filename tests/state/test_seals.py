"""Digests: every bit, every place; one error for what libraries make of damaged bytes."""

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state import seals
from dpstream.state.seals import sealed, sealed_text, unsealed, unsealed_text


@pytest.mark.parametrize("size", [0, 1, 100])
def test_every_bit_counts(size: int) -> None:
    data = bytes(range(size))
    blob = sealed("steps/1/2/3/keys", data)
    assert unsealed("steps/1/2/3/keys", blob) == data and len(blob) == size + seals.SIZE
    for bit in range(8 * len(blob)):
        other = bytearray(blob)
        other[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PolicyError, match="is damaged"):
            unsealed("steps/1/2/3/keys", bytes(other))


@pytest.mark.parametrize(
    "name", ["steps/1/2/3/states", "steps/12/3/keys", "carried/1/2/3/keys", ""]
)
def test_another_place_counts(name: str) -> None:
    with pytest.raises(PolicyError):
        unsealed(name, sealed("steps/1/2/3/keys", b"data"))


@pytest.mark.parametrize("blob", [None, "text", 7, 1.5, b"", b"short"])
def test_what_is_no_blob_any_more(blob: object) -> None:
    """A flip in a record's header makes a number, a text or NULL of a blob."""
    with pytest.raises(PolicyError):
        unsealed("x", blob)


def test_texts() -> None:
    text = sealed_text("meta/note.x/value", "a b")
    assert unsealed_text("meta/note.x/value", text) == "a b" and text.endswith(" a b")
    broken = (text[:-1], text.upper(), "\udcff" + text[1:], text + "\udc80", "a b", "", None, b"x")
    for other in broken:
        with pytest.raises(PolicyError):
            unsealed_text("meta/note.x/value", other)
    with pytest.raises(PolicyError):
        unsealed_text("meta/note.y/value", text)
