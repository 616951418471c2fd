"""Attributes: cells of values, refusals, and bytes that tell them apart."""

from collections.abc import Callable

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.limits import MAX_ATTRIBUTE_CELLS
from dpstream.accounting.workloads.attributes import domain_of, of_edges, of_size, of_values


def test_bins_are_half_open() -> None:
    age = of_edges("age", [0, 18, 65.5])
    assert age.size == 2
    assert age.cells([-1, 0, 17.9, 18, 65, 65.5, float("nan")]).tolist() == [-1, 0, 0, 1, 1, -1, -1]


def test_values_keep_their_order() -> None:
    state = of_values("state", ["NY", "CA", "TX"])
    assert state.cells(["TX", "NY", "WA", "CA", ""]).tolist() == [2, 0, -1, 1, -1]
    assert of_values("code", [7, -3]).cells([-3, 7, 0]).tolist() == [1, 0, -1]
    assert of_size("n", 3).cells([0, 2, 3, -1]).tolist() == [0, 2, -1, -1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: of_values("a", []),
        lambda: of_values("a", ["x", "y", "x"]),
        lambda: of_values("a", ["x", 1]),
        lambda: of_values("a", [1, True]),
        lambda: of_values("a", [1.0, 2.0]),
        lambda: of_values("a", [None]),
        lambda: of_values("a", range(MAX_ATTRIBUTE_CELLS + 1)),
        lambda: of_edges("a", [1]),
        lambda: of_edges("a", [1, 1]),
        lambda: of_edges("a", [2, 1]),
        lambda: of_edges("a", [0, float("nan")]),
        lambda: of_edges("a", [0, float("inf")]),
        lambda: of_edges("a", [0, "secret"]),
        lambda: of_edges("a", [False, True]),
        lambda: of_size("a", 0),
        lambda: of_size("a", 2.0),  # type: ignore[arg-type]
        lambda: of_size("a", MAX_ATTRIBUTE_CELLS + 1),
        lambda: domain_of([]),
        lambda: domain_of([of_size("a", 2)] * 2),
        lambda: domain_of([of_size(str(k), 2) for k in range(101)]),
    ],
)
def test_refusals_name_the_rule_and_no_value(make: Callable[[], object]) -> None:
    with pytest.raises(PolicyError) as caught:
        make()
    assert caught.value.field.startswith("domain") and caught.value.fix
    assert "secret" not in str(caught.value)


def test_equal_bytes_are_equal_attributes() -> None:
    different = [
        of_values("a", ["1", "2"]),
        of_values("a", [1, 2]),
        of_values("a", [12]),
        of_edges("a", [1, 2]),
        of_values("a", ["12"]),
        of_values("a1", ["2"]),
        of_values("a", ["2", "1"]),
        of_size("a", 2),
    ]
    assert len({attribute.canonical() for attribute in different}) == len(different)
    assert of_size("a", 2).canonical() == of_values("a", [0, 1]).canonical()
