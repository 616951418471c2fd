"""The parts of a plan that name columns: bounds on a grid, and no word that nobody reads."""

import msgspec
import pytest

from dpstream.accounting.fields import Aggregate, Field


def test_grid_bounds_snap_inward_exactly() -> None:
    assert Aggregate("s", "sum", "x", (0.1, 0.7), 0.1).grid_bounds() == (1, 7)
    assert Aggregate("s", "sum", "x", (-0.25, 0.99), 0.5).grid_bounds() == (0, 1)
    assert Aggregate("s", "sum", "x", (-1e-3, 1e3), 1e-3).grid_bounds() == (-1, 10**6)
    with pytest.raises(ValueError, match="bounds"):
        Aggregate("n", "count").grid_bounds()


@pytest.mark.parametrize("bound", [0.1, 0.3, 0.7, 1.1, 2.2, 1e-3])
def test_a_bound_on_the_grid_is_kept_whatever_floats_make_of_it(bound: float) -> None:
    """In floats 0.7 / 0.1 and 0.3 / 0.1 lie below the whole numbers they are."""
    for size in (1, 3, 7, 1000):
        column = Aggregate("s", "sum", "x", (-bound, float(f"{bound * size:.9g}")), bound)
        assert column.grid_bounds() == (-1, size)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Field, '{"column": "user", "typ": "int"}'),
        (Field, '{"column": "user", "type": "float"}'),
        (Aggregate, '{"name": "n", "kind": "count", "clamps": [0, 1]}'),
        (Aggregate, '{"name": "n", "kind": "median"}'),
    ],
)
def test_a_word_that_nobody_reads_is_refused(kind: type, text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=kind)
    assert msgspec.json.decode('{"column": "user"}', type=Field) == Field("user", "string")
