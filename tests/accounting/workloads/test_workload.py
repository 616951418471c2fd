"""Workloads against what they are written out; weights, norms, hashes and limits.

Attributes: cells of values, refusals, and bytes that tell them apart; factors, written out.
"""

import copy
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.limits import MAX_ATTRIBUTE_CELLS
from dpstream.accounting.workloads import attributes as module
from dpstream.accounting.workloads.attributes import (
    Factor,
    domain_of,
    explicit,
    interval,
    of_edges,
    of_size,
    of_values,
)
from dpstream.accounting.workloads.workload import (
    codes,
    from_arrays,
    from_dict,
    marginals,
    of_matrix,
    over,
    workload_of,
)
from tests.accounting.strategies.cells.shapes import attributes, listed, rows, small
from tests.golden.refusals import Refused


@pytest.mark.parametrize("name", small())
def test_implicit_equals_written_out(name: str) -> None:
    workload = small()[name]
    matrix = rows(workload)
    x = np.random.default_rng(0).integers(0, 50, workload.cells)
    np.testing.assert_allclose(workload.gram(), matrix.T @ matrix, atol=1e-9)
    answers = np.concatenate([answer.ravel() for answer in workload.apply(x)])
    np.testing.assert_allclose(answers, matrix @ x, atol=1e-9)
    assert workload.queries == len(matrix) and workload.weight == len(matrix)


def test_weights_count_in_squares() -> None:
    a = attributes(3, 2)
    workload = workload_of(a, [(2.5, {0: interval("range", 3)}), (1, {1: interval("identity", 2)})])
    matrix = rows(workload)
    np.testing.assert_allclose(workload.gram(), matrix.T @ matrix)
    assert workload.weight == 2.5 * 6 + 2 and workload.queries == 8


def test_large_unions_stay_implicit(refused: Refused) -> None:
    workload = marginals(attributes(*[10] * 100), [3])
    assert len(workload.products) == 161_700 and workload.queries == 161_700_000
    assert workload.cells == 10**100 and workload.marginal
    assert over([64] * 4, ["range"] * 4).queries == 2080**4
    refused(lambda: workload.apply(np.zeros(1)))


def test_hashes_are_stable_and_tell_workloads_apart() -> None:
    # Names of files on disk: a change makes every cached strategy a new one.
    assert over([4], ["range"]).structure == over([4], ["range"]).structure
    assert over([4], ["range"]).structure.startswith("531f8d43854ae419")
    different = [over([4], [kind]) for kind in ("range", "prefix", "identity", "total")]
    different += [
        over([2, 2], ["range"] * 2),
        over([4, 1], ["range", "total"]),
        of_matrix(np.eye(4)),
    ]
    different += [workload_of(attributes(4), [(2.0, {0: interval("range", 4)})])]
    assert len({workload.structure for workload in different}) == len(different)
    renamed = workload_of([of_values("b", "wxyz")], [(1, {0: interval("range", 4)})])
    assert renamed.structure == different[0].structure and renamed.digest != different[0].digest


@pytest.mark.parametrize(
    "weight", [0, -1, float("nan"), float("inf"), True, "1", None, 1e-300, 1e300]
)
def test_weights_that_are_refused(weight: Any, refused: Refused) -> None:
    refused(lambda: workload_of(attributes(2), [(weight, {})]))


def test_codes_of_records() -> None:
    cells = np.array([[0, 1, 2, -1], [3, 0, -1, 2]])
    assert codes((3, 4), cells).tolist() == [3, 4, -1, -1]


def test_the_same_factor_has_the_same_axis_workload() -> None:
    workload = marginals(attributes(3, 4, 5), [2], "range")
    first, second = (workload.axes(product) for product in workload.products[:2])
    assert first[0] is second[0] and first[1] is not second[1]


GOOD: dict[str, Any] = {
    "domain": [
        {"name": "age", "edges": [0, 18, 65, 120]},
        {"name": "sex", "values": ["f", "m"]},
        {"name": "code", "size": 4},
    ],
    "queries": [
        {"weight": 2, "factors": {"age": "range"}},
        {"factors": {"code": {"width": 2}, "sex": "identity"}},
        {"factors": {"age": {"matrix": [[1, 0, -1]]}}},
        {"factors": {}},
        {"ways": 2},
        {"ways": 1, "kind": "range", "weight": 0.5},
    ],
}


def test_a_file_means_what_it_says() -> None:
    workload = from_dict(GOOD)
    assert workload.sizes == (3, 2, 4) and [a.name for a in workload.attributes] == [
        "age",
        "sex",
        "code",
    ]
    assert [p.rows for p in workload.products] == [6, 6, 1, 1, 6, 12, 8, 6, 3, 10]
    assert [p.axes for p in workload.products[:4]] == [(0,), (1, 2), (0,), ()]
    x = np.arange(24).reshape(3, 2, 4)
    answers = workload.apply(x)
    assert answers[0].ravel().tolist() == [28, 120, 276, 92, 248, 156]
    assert answers[2].item() == 28 - 156 and answers[3].item() == 276


def mended(*path: str | int, value: Any = None) -> Any:
    text = copy.deepcopy(GOOD)
    at: Any = text
    for step in path[:-1]:
        at = at[step]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return text


BAD = [
    None,
    [],
    {},
    "secret",
    mended("queries"),
    mended("domain"),
    mended("domain", value=[]),
    mended("queries", value=[]),
    mended("domain", value={}),
    mended("queries", value={"factors": {}}),
    mended("more", value=1),
    mended("domain", 0, "name"),
    mended("domain", 0, "name", value=""),
    mended("domain", 0, "name", value=7),
    mended("domain", 0, "name", value="sex"),
    mended("domain", 0, "edges"),
    mended("domain", 0, "size", value=3),
    mended("domain", 0, value={"name": "a", "secret": [1]}),
    mended("domain", 0, "edges", value=[3, 2]),
    mended("domain", 0, "edges", value="secret"),
    mended("domain", 1, "values", value=["f", "f"]),
    mended("domain", 1, "values", value="secret"),
    mended("domain", 2, "size", value=0),
    mended("domain", 2, "size", value=10**9),
    mended("queries", 0, value={}),
    mended("queries", 0, value=["secret"]),
    mended("queries", 0, "secret", value=1),
    mended("queries", 0, "weight", value=0),
    mended("queries", 0, "weight", value=-1),
    mended("queries", 0, "weight", value="secret"),
    mended("queries", 0, "factors", value={"secret": "range"}),
    mended("queries", 0, "factors", value={"age": "ranges"}),
    mended("queries", 0, "factors", value=["age"]),
    mended("queries", 0, "factors", value={"age": {"width": 0}}),
    mended("queries", 0, "factors", value={"age": {"width": 4}}),
    mended("queries", 0, "factors", value={"age": {"width": 1.5}}),
    mended("queries", 0, "factors", value={"age": {"width": 1, "matrix": [[1, 1, 1]]}}),
    mended("queries", 0, "factors", value={"age": {"matrix": [[1, 1]]}}),
    mended("queries", 0, "factors", value={"age": {"matrix": [[0, 0, 0]]}}),
    mended("queries", 0, "factors", value={"age": {"matrix": [[1, "secret", 1]]}}),
    mended("queries", 0, "factors", value={"age": {"matrix": [[1, float("nan"), 1]]}}),
    mended("queries", 0, "factors", value={"age": {"matrix": [[1, True, 1]]}}),
    mended("queries", 0, "factors", value={"age": {"matrix": [[1, "1", 1]]}}),
    mended("queries", 0, "factors", value={"age": {"matrix": [[1, None, 1]]}}),
    mended("queries", 0, "factors", value={"age": {"matrix": "secret"}}),
    mended("queries", 0, "factors", value={"age": 3}),
    mended("domain", 1, "values", value=["\u00e9", "e\u0301"]),
    mended("queries", 0, "kind", value="range"),
    mended("queries", 4, "ways", value=4),
    mended("queries", 4, "ways", value=-1),
    mended("queries", 4, "ways", value=True),
    mended("queries", 4, "factors", value={}),
    mended("queries", 4, "kind", value="secret"),
]


@pytest.mark.parametrize(
    "entry",
    [{"name": "a", "values": ["\ud800"]}, {"name": "\udfff", "size": 2},
     {"name": "a", "values": [2**63]}, {"name": "a", "values": [-(2**63) - 1]},
     {"name": "a", "edges": [0, 10**400]}, {"name": "a", "edges": [float("-inf"), 0]}],
)  # fmt: skip
def test_what_no_record_can_hold_is_refused(entry: dict[str, Any], refused: Refused) -> None:
    refused(lambda: from_dict({"domain": [entry], "queries": [{"factors": {}}]}))


@pytest.mark.parametrize("row", [[5e-324, 0], [0, 1e-170], [10**400, 1]])
def test_rows_whose_squares_floats_lose_are_refused(row: list[float], refused: Refused) -> None:
    queries = [{"factors": {"a": {"matrix": [[1, 1], row]}}}]
    refused(lambda: from_dict({"domain": [{"name": "a", "size": 2}], "queries": queries}))


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_refused_by_field_rule_and_fix(text: Any, refused: Refused) -> None:
    caught = refused(lambda: from_dict(text))
    assert re.split(r"[.\[]", caught.field)[0] in ("workload", "domain", "queries")


@pytest.mark.parametrize(
    ("wrong", "field", "name", "fix"),
    [
        (("querys",), "workload", "querys", "'queries'? known here: domain, queries"),
        (("domain", 1, "valeus"), "domain[1]", "valeus", "'values'? known here: edges, name, "),
        (("queries", 1, "wieght"), "queries[1]", "wieght", "'weight'? known here: factors, kind"),
        (("queries", 0, "factors", "aeg"), "queries[0].factors", "aeg", "'age'? known here: age, "),
    ],
)
def test_a_wrong_key_is_named_with_the_nearest_one(
    wrong: tuple[str | int, ...], field: str, name: str, fix: str, refused: Refused
) -> None:
    caught = refused(lambda: from_dict(mended(*wrong, value="range")))
    assert caught.field == field and repr(name) in caught.rule
    assert caught.fix.startswith(f"did you mean {fix}")


def test_a_wrong_factor_is_named_with_the_nearest_one(refused: Refused) -> None:
    refused(lambda: from_dict(mended("queries", 0, "factors", "age", value="rnage")))


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"V": np.eye(2)},
        {"W": np.eye(2), "x": np.eye(2)},
        {"W": np.array([["a", "b"]])},
        {"W": np.ones(3)},
        {"W": np.ones((2, 2, 2))},
        {"W": np.zeros((2, 2))},
        {"W": np.ones((0, 2))},
        {"W": np.ones((2, 0))},
        {"W": np.array([[1, np.nan]])},
        {"W": np.array([[1.0, None]], object)},
    ],
)
def test_bad_arrays(arrays: dict[str, Any], refused: Refused) -> None:
    refused(lambda: from_arrays(arrays))


def test_more_sets_of_attributes_than_a_workload_may_have(refused: Refused) -> None:
    """Half of 100 attributes: 10^29 sets, none of which is made."""
    domain = [{"name": f"a{k}", "size": 2} for k in range(100)]
    refused(lambda: from_dict({"domain": domain, "queries": [{"ways": 50}]}))


def test_more_queries_than_a_float_counts(refused: Refused) -> None:
    domain = [{"name": f"a{k}", "size": 50} for k in range(100)]
    factors = {f"a{k}": "range" for k in range(100)}
    refused(lambda: from_dict({"domain": domain, "queries": [{"factors": factors}]}))


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
def test_refusals_name_the_rule_and_no_value(make: Callable[[], object], refused: Refused) -> None:
    caught = refused(make)
    assert caught.field.startswith("domain") and caught.fix
    assert "secret" not in str(caught)


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


KINDS = [
    (k, n, w, r)
    for n in (1, 2, 5, 8)
    for r in (False, True)
    for k, w in [
        ("identity", 0),
        ("total", 0),
        ("prefix", 0),
        ("range", 0),
        ("width", max(1, n // 2)),
    ]
]


def factors() -> list[Factor]:
    rng = np.random.default_rng(1)
    matrices = [explicit(rng.normal(size=(4, 5)), 5, r) for r in (False, True)]
    return [interval(k, n, w, r) for k, n, w, r in KINDS] + matrices


@pytest.mark.parametrize("factor", factors(), ids=lambda f: f"{f.kind}-{f.size}-{f.relative}")
def test_attributes_implicit_equals_written_out(factor: Factor) -> None:
    rows = np.array(listed(factor))
    rng = np.random.default_rng(2)
    x, root = rng.normal(size=(3, factor.size, 2)), rng.normal(size=(factor.size,) * 2)
    covariance = root @ root.T
    assert factor.rows == len(rows)
    np.testing.assert_allclose(factor.dense(), rows, atol=1e-12)
    np.testing.assert_allclose(factor.gram(), rows.T @ rows, atol=1e-12)
    np.testing.assert_allclose(factor.apply(x, 1), np.einsum("qi,aib->aqb", rows, x), atol=1e-12)
    np.testing.assert_allclose(
        factor.variances(covariance), np.diag(rows @ covariance @ rows.T), atol=1e-10
    )
    along = rows.sum(1) ** 2 / factor.size
    np.testing.assert_allclose(factor.parts[0], along, atol=1e-12)
    np.testing.assert_allclose(factor.parts[1], (rows**2).sum(1) - along, atol=1e-12)
    gram = rows.T @ rows
    assert factor.reversible == np.allclose(gram, gram[::-1, ::-1], atol=1e-13)


def test_answers_in_integers_are_exact() -> None:
    x = np.full(6, 2**53 + 1)
    assert interval("range", 6).apply(x)[1] == 2 * (2**53 + 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: interval("ranges", 4),
        lambda: interval("width", 4),
        lambda: interval("width", 4, 5),
        lambda: interval("range", 4, 2),
        lambda: interval("width", 4, -1),
        lambda: explicit([], 2),
        lambda: explicit([[]], 2),
        lambda: explicit(np.zeros((0, 2)), 2),
        lambda: explicit([[1, 2, 3]], 2),
        lambda: explicit([[1, 2], [3]], 2),
        lambda: explicit([[0, 0], [1, 1]], 2),
        lambda: explicit([[1, float("nan")]], 2),
        lambda: explicit([[1, -float("inf")]], 2),
        lambda: explicit([[1e10, 1]], 2),
        lambda: explicit([["secret", 1]], 2),  # type: ignore[arg-type]
        lambda: explicit("secret", 2),
    ],
)
def test_refusals(make: Callable[[], object], refused: Refused) -> None:
    caught = refused(make)
    assert caught.field.startswith("queries.factors") and "secret" not in str(caught)


def test_duplicate_negative_and_deficient_rows_are_taken_as_they_are() -> None:
    factor = explicit([[1, -1], [1, -1]], 2)
    np.testing.assert_array_equal(factor.gram(), [[2, -2], [-2, 2]])


def test_bytes_tell_factors_apart() -> None:
    many = [interval(k, n, w, r) for k, n, w, r in KINDS]
    many += [explicit([[1, 0]], 2), explicit([[0, 1]], 2), explicit([[1, 0], [0, 1]], 2)]
    assert len({factor.canonical() for factor in many}) == len(many)
    assert explicit([[0.0, 1]], 2).canonical() == explicit([[-0.0, 1]], 2).canonical()


@pytest.mark.parametrize("relative", [False, True])
def test_masses_of_ranges_are_counted_by_their_lengths(relative: bool) -> None:
    masses = interval("range", 50, relative=relative).masses
    with mock.patch.object(module, "_LISTED", 0):
        assert interval("range", 50, relative=relative).masses == pytest.approx(masses, rel=1e-12)
