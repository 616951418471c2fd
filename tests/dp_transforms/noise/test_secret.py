"""A key in memory is overwritten where it stands, in all of its buffers."""

import pytest

from dpstream.dp_transforms.noise.secret import KEY_BYTES, wipe


@pytest.mark.parametrize("size", [0, 1, KEY_BYTES, 1000])
def test_buffers_are_overwritten_in_place(size: int) -> None:
    one, other = bytearray(b"\xff" * size), bytearray(range(200))
    seen = memoryview(one), memoryview(other)
    wipe(one, other)
    assert one == bytes(size) and other == bytes(200)
    assert bytes(seen[0]) == bytes(size) and not any(seen[1]), "the same memory, not a copy"
    wipe()


def test_what_cannot_be_overwritten_is_an_error() -> None:
    """Better than a key that is believed to be gone."""
    with pytest.raises(TypeError):
        wipe(b"\x07" * KEY_BYTES)  # type: ignore[arg-type]


def test_a_key_has_256_bits() -> None:
    assert KEY_BYTES * 8 == 256
