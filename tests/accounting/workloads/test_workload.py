"""Workloads against what they are written out; weights, norms, hashes and limits."""

import copy
import re
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.workloads.attributes import interval, of_size, of_values
from dpstream.accounting.workloads.workload import (
    codes,
    from_arrays,
    from_dict,
    marginals,
    of_matrix,
    over,
    workload_of,
)
from tests.accounting.strategies.cells.shapes import attributes, rows, small


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


@pytest.mark.parametrize("name", small())
def test_relative_queries_have_norm_one(name: str) -> None:
    norms = np.linalg.norm(rows(small()[name].relative()), axis=1)
    np.testing.assert_allclose(norms, 1.0)


def test_large_unions_stay_implicit() -> None:
    workload = marginals(attributes(*[10] * 100), [3])
    assert len(workload.products) == 161_700 and workload.queries == 161_700_000
    assert workload.cells == 10**100 and workload.marginal
    assert over([64] * 4, ["range"] * 4).queries == 2080**4
    with pytest.raises(UsageError, match="histogram"):
        workload.apply(np.zeros(1))


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
def test_weights_that_are_refused(weight: Any) -> None:
    with pytest.raises(UsageError, match="weight"):
        workload_of(attributes(2), [(weight, {})])


def test_a_workload_asks_something() -> None:
    with pytest.raises(UsageError, match="1 to"):
        workload_of([of_size("a", 2)], [])


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


def test_arrays() -> None:
    workload = from_arrays({"W": np.array([[1, 0], [1, 1]])})
    assert workload.sizes == (2,) and workload.queries == 2


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
def test_what_no_record_can_hold_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        from_dict({"domain": [entry], "queries": [{"factors": {}}]})


@pytest.mark.parametrize("row", [[5e-324, 0], [0, 1e-170], [10**400, 1]])
def test_rows_whose_squares_floats_lose_are_refused(row: list[float]) -> None:
    queries = [{"factors": {"a": {"matrix": [[1, 1], row]}}}]
    with pytest.raises(UsageError):
        from_dict({"domain": [{"name": "a", "size": 2}], "queries": queries})


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_refused_by_field_rule_and_fix(text: Any) -> None:
    with pytest.raises(UsageError) as caught:
        from_dict(text)
    assert re.split(r"[.\[]", caught.value.field)[0] in ("workload", "domain", "queries")
    assert caught.value.rule and caught.value.fix


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
    wrong: tuple[str | int, ...], field: str, name: str, fix: str
) -> None:
    with pytest.raises(UsageError) as caught:
        from_dict(mended(*wrong, value="range"))
    assert caught.value.field == field and repr(name) in caught.value.rule
    assert caught.value.fix.startswith(f"did you mean {fix}")


def test_a_wrong_factor_is_named_with_the_nearest_one() -> None:
    with pytest.raises(UsageError) as caught:
        from_dict(mended("queries", 0, "factors", "age", value="rnage"))
    assert caught.value.field == "queries[0].factors.age" and "'rnage'" in caught.value.rule
    assert caught.value.fix == "did you mean 'range'? known here: identity, prefix, range, total"


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
def test_bad_arrays(arrays: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        from_arrays(arrays)


def test_more_sets_of_attributes_than_a_workload_may_have() -> None:
    """Half of 100 attributes: 10^29 sets, none of which is made."""
    domain = [{"name": f"a{k}", "size": 2} for k in range(100)]
    with pytest.raises(UsageError) as refused:
        from_dict({"domain": domain, "queries": [{"ways": 50}]})
    assert refused.value.field == "queries[0].ways"


def test_more_queries_than_a_float_counts() -> None:
    domain = [{"name": f"a{k}", "size": 50} for k in range(100)]
    factors = {f"a{k}": "range" for k in range(100)}
    with pytest.raises(UsageError) as refused:
        from_dict({"domain": domain, "queries": [{"factors": factors}]})
    assert refused.value.field == "queries"
