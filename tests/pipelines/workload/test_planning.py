"""How a workload is answered is decided from its structure, before a charge."""

import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.strategies.cells.auto import auto, largest
from dpstream.accounting.strategies.cells.residual import residual
from dpstream.accounting.strategies.cells.strategy import identity
from dpstream.accounting.workloads.attributes import interval, of_size
from dpstream.accounting.workloads.workload import Workload, from_dict, marginals, over, workload_of
from dpstream.pipelines.render.workload_plan import workload_text
from dpstream.pipelines.workload import planning
from dpstream.pipelines.workload.planning import figures, guarantee_of, planned, way_of
from tests.bench.paper.cell_baselines import haar
from tests.pipelines.workload.survey import workload, write


def tables(size: int, attributes: int, kind: str = "range") -> Workload:
    return marginals([of_size(str(k), size) for k in range(attributes)], [2], kind)


@pytest.mark.parametrize(
    ("workload", "way"),
    [
        (over([100] * 3, ["range"] * 3), "cells"),
        (tables(100, 3), "tables"),
        (tables(10, 20), "tables"),
        (tables(100, 5), "tables"),
        (tables(10, 4, "identity"), "tables"),
        (tables(5, 3, "identity"), "cells"),
        (over([300, 300], ["identity"] * 2), "cells"),
    ],
)  # fmt: skip
def test_what_is_chosen_can_be_answered(workload: Workload, way: str) -> None:
    assert way_of(workload, auto(workload).strategy) == way


def test_what_cannot_be_answered_is_refused() -> None:
    product = over([100] * 5, ["range"] * 5)
    with pytest.raises(UsageError):
        way_of(product, auto(product).strategy)
    large = tables(60, 3)
    with mock.patch.object(planning, "MAX_PUBLISHED", 3), pytest.raises(UsageError):
        way_of(large, residual(large)[0])
    with pytest.raises(UsageError):
        way_of(over([9000, 2], ["identity"] * 2), identity(large))
    with pytest.raises(UsageError):  # a product answers nothing of 10^20 cells
        way_of(tables(10, 20), haar(tables(10, 20)))


def test_figures_are_at_the_guarantee(tmp_path: Path) -> None:
    """All ranges of 8 cells, as the singular value bound of Example 4 has them: 14.933 a total."""
    query_set = over([8], ["range"])
    workload_plan = planned(query_set, tmp_path)
    one = figures(workload_plan, guarantee_of(None, None, 1.0, 1))
    assert one["rmse"] == pytest.approx(math.sqrt(workload_plan.plan.error / 36))
    assert one["floor"] <= one["rmse"] <= one["floor"] * math.sqrt(1.001)
    [product] = one["products"]
    assert product["queries"] == 36 and product["rmse"] == pytest.approx(one["rmse"], rel=1e-6)
    assert product["least"] < product["rmse"] < product["most"]
    three = figures(workload_plan, guarantee_of(1.0, 1e-8, None, 3))
    assert three["rmse"] == pytest.approx(3 / mu_of(1.0, 1e-8) * one["rmse"])
    summary = workload_text(three)
    for text in ("36 queries of 8 cells", "3 record(s)", "0: range"):
        assert text in summary


def test_objectives(tmp_path: Path) -> None:
    guarantee = guarantee_of(None, None, 1.0, 1)
    worst = planned(workload(), tmp_path, "worst")
    assert max(p["most"] for p in figures(worst, guarantee)["products"][:1]) <= (
        worst.per_query(worst.plan.error) * 1.001
    )
    assert "largest" in workload_text(figures(worst, guarantee))
    relative = planned(workload(), tmp_path, "relative")
    assert "norm" in workload_text(figures(relative, guarantee))


def _of_cells(query_set: Workload) -> float:
    """RMSE of a query at mu = 1 with noise on every cell."""
    return math.sqrt(identity(query_set).error(query_set) / query_set.weight)


@pytest.mark.parametrize("kind", ["range", "prefix"])
@pytest.mark.parametrize(("sizes", "ways"), [([10] * 20, 2), ([100] * 3, 3), ([100] * 5, 5)])
def test_domains_beyond_one_matrix(tmp_path: Path, kind: str, sizes: list[int], ways: int) -> None:
    query_set = marginals([of_size(str(k), size) for k, size in enumerate(sizes)], [ways], kind)
    plan_figures = figures(planned(query_set, tmp_path), guarantee_of(None, None, 1.0, 1))
    assert plan_figures["floor"] <= plan_figures["rmse"] <= _of_cells(query_set) * (
        1 + 1e-6
    ) and workload_text(plan_figures)
    for product in plan_figures["products"]:
        assert product["least"] <= product["rmse"] <= product["most"]
    # 10^20 cells are answered by tables, 10^6 by cells, and 10^10 cells of one table by nothing.
    ways_of = {2: "tables", 3: "cells", 5: None}
    assert plan_figures["answered_by"] == ways_of[ways] and bool(plan_figures["refused"]) == (
        ways == 5
    )


@pytest.mark.parametrize("objective", ["total", "worst"])
def test_products_of_many_attributes(tmp_path: Path, objective: str) -> None:
    """A product of 25 attributes has 2^25 residual spaces, which a plan does not list."""
    query_set = over([3] * 25, ["prefix"] * 25)
    start = time.process_time()
    plan_figures = figures(
        planned(query_set, tmp_path, objective), guarantee_of(None, None, 1.0, 1)
    )
    assert time.process_time() - start < 5
    worst = objective == "worst"
    most = math.sqrt(largest(query_set, identity(query_set))) if worst else _of_cells(query_set)
    assert plan_figures["floor"] <= plan_figures["rmse"] <= most * (1 + 1e-6) and workload_text(
        plan_figures
    )


def test_a_union_with_a_product_of_many_attributes(tmp_path: Path) -> None:
    each = {axis: interval("prefix", 2) for axis in range(22)}
    attributes = [of_size(str(axis), 2) for axis in range(22)]
    start = time.process_time()
    few = workload_of(
        attributes[:14], [(1.0, {a: each[a] for a in range(14)}), (1.0, {0: each[0]})]
    )
    plan_figures = figures(planned(few, tmp_path), guarantee_of(None, None, 1.0, 1))
    assert plan_figures["floor"] <= plan_figures["rmse"] and plan_figures["answered_by"]
    with pytest.raises(UsageError) as refused:
        planned(workload_of(attributes, [(1.0, each), (1.0, {0: each[0]})]), tmp_path)
    assert refused.value.field == "queries"
    assert time.process_time() - start < 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["range", "prefix"])
def test_one_attribute_of_8192_cells(tmp_path: Path, kind: str) -> None:
    domain = [{"name": "a", "size": 8192}]
    used = _process(tmp_path, [{"factors": {"a": kind}}], domain)
    assert used.ru_utime + used.ru_stime <= 600 and used.ru_maxrss <= 4 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "ways", "kind", "seconds"),
    [([10] * 20, 2, "range", 3), ([10] * 20, 2, "prefix", 3), ([100] * 3, 3, "range", 3),
     ([100] * 3, 3, "prefix", 3), ([100] * 5, 5, "range", 3), ([100] * 5, 5, "prefix", 3),
     ([10] * 100, 3, "identity", 5)],
)  # fmt: skip
def test_a_plan_takes_3_cpu_seconds_and_1_gib(
    tmp_path: Path, sizes: list[int], ways: int, kind: str, seconds: int
) -> None:
    """The whole process, `dpstream workload plan`; 5 seconds for 161,700 tables."""
    domain = [{"name": f"a{k}", "size": size} for k, size in enumerate(sizes)]
    used = _process(tmp_path, [{"ways": ways, "kind": kind}], domain)
    assert used.ru_utime + used.ru_stime <= seconds and used.ru_maxrss <= 1 << 20


def _process(
    folder: Path, queries: list[dict[str, Any]], domain: list[dict[str, Any]]
) -> resource.struct_rusage:
    """What the process of a plan used; it succeeds."""
    write(folder / "w.json", queries, domain)
    command = [sys.executable, "-m", "dpstream.pipelines.cli.main", "workload", "plan", "w.json",
               "--epsilon", "1", "--delta", "1e-8", "--cache", "cache"]  # fmt: skip
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = status
    assert status == 0
    return used


def test_many_tables(tmp_path: Path) -> None:
    query_set = marginals([of_size(str(k), 7) for k in range(20)], [3])
    plan_figures = figures(planned(query_set, tmp_path), guarantee_of(None, None, 1.0, 1))
    assert (
        len(plan_figures["products"]) == 1140
        and plan_figures["strategy"]
        and plan_figures["gap"] < 1e-9
    )
    assert "more products" in workload_text(plan_figures)


@pytest.mark.parametrize(
    "given",
    [(None, None, None, 1), (1.0, None, None, 1), (1.0, 1e-8, 1.0, 1), (None, 1e-8, 1.0, 1),
     (None, None, 1.0, 0)],
)  # fmt: skip
def test_options_that_do_not_fit(given: tuple[float, float, float, int]) -> None:
    with pytest.raises(UsageError):
        guarantee_of(*given)


@pytest.mark.parametrize("given", [(0, 1e-8, None), (1, 0, None), (1, 1, None), (None, None, 0),
                                   (math.nan, 1e-8, None), (None, None, math.inf)])  # fmt: skip
def test_no_budget(given: tuple[float, float, float]) -> None:
    with pytest.raises(UsageError):
        guarantee_of(*given, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attributes", "size", "query", "rmse", "floor"),
    [(20, 10, {"ways": 2, "kind": "range"}, 21.27, 21.00),
     (40, 4, {"ways": 3, "kind": "prefix"}, 44.12, 15.33)],
)  # fmt: skip
def test_errors_and_floors_of_large_unions_are_those_of_the_guide(
    attributes: int, size: int, query: dict[str, object], rmse: float, floor: float, tmp_path: Path
) -> None:
    domain = [{"name": f"a{n}", "size": size} for n in range(attributes)]
    query_set = from_dict({"domain": domain, "queries": [query]})
    plan = figures(planned(query_set, tmp_path), guarantee_of(None, None, 1.0, 1))
    assert round(plan["rmse"], 2) == rmse and round(plan["floor"], 2) == floor
