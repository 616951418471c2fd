"""What a plan says of a workload."""

import json
import math
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.workloads.attributes import of_size
from dpstream.accounting.workloads.factors import interval
from dpstream.accounting.workloads.workload import marginals, over, workload_of
from dpstream.pipelines.workload.planning import figures, guarantee_of, planned, words
from tests.pipelines.workload.survey import workload, write


def test_figures_are_at_the_guarantee(tmp_path: Path) -> None:
    """All ranges of 8 cells, as the singular value bound of Example 4 has them: 14.933 a total."""
    asked = over([8], ["range"])
    found = planned(asked, tmp_path)
    one = figures(found, guarantee_of(None, None, 1.0, 1))
    assert one["rmse"] == pytest.approx(math.sqrt(found.plan.error / 36))
    assert one["floor"] <= one["rmse"] <= one["floor"] * math.sqrt(1.001)
    assert one["strategies"]["identity"] == pytest.approx(math.sqrt(120 / 36))
    [product] = one["products"]
    assert product["queries"] == 36 and product["rmse"] == pytest.approx(one["rmse"], rel=1e-6)
    assert product["least"] < product["rmse"] < product["most"]
    three = figures(found, guarantee_of(1.0, 1e-8, None, 3))
    assert three["rmse"] == pytest.approx(3 / mu_of(1.0, 1e-8) * one["rmse"])
    shown = words(three)
    for text in ("36 queries of 8 cells", "identity", "3 record(s)", "0: range"):
        assert text in shown


def test_the_comparison_is_kept(tmp_path: Path) -> None:
    first = planned(workload(), tmp_path)
    again = planned(workload(), tmp_path)
    assert again.cached and not first.cached and again.compared == first.compared
    assert {"gaussian", "identity", "haar", "eigen"} <= set(first.compared.errors)
    (first.place.with_suffix(".json")).write_text("[")
    assert planned(workload(), tmp_path).compared == first.compared
    json.loads(first.place.with_suffix(".json").read_text())


def test_objectives(tmp_path: Path) -> None:
    guarantee = guarantee_of(None, None, 1.0, 1)
    worst = planned(workload(), tmp_path, "worst")
    assert max(p["most"] for p in figures(worst, guarantee)["products"][:1]) <= (
        worst.per_query(worst.plan.error) * 1.001
    )
    assert min(worst.compared.errors.values()) >= worst.plan.floor
    assert "largest" in words(figures(worst, guarantee))
    relative = planned(workload(), tmp_path, "relative")
    assert relative.compared.errors["identity"] >= relative.plan.floor
    assert "norm" in words(figures(relative, guarantee))


@pytest.mark.parametrize("kind", ["range", "prefix"])
@pytest.mark.parametrize(("sizes", "ways"), [([10] * 20, 2), ([100] * 3, 3), ([100] * 5, 5)])
def test_domains_beyond_one_matrix(tmp_path: Path, kind: str, sizes: list[int], ways: int) -> None:
    asked = marginals([of_size(str(k), size) for k, size in enumerate(sizes)], [ways], kind)
    shown = figures(planned(asked, tmp_path), guarantee_of(None, None, 1.0, 1))
    assert shown["floor"] <= shown["rmse"] <= min(shown["strategies"].values()) * (1 + 1e-6)
    assert set(shown["strategies"]) >= {"gaussian", "identity", "haar"}
    assert all(shown["absent"].values()) and words(shown)
    for product in shown["products"]:
        assert product["least"] <= product["rmse"] <= product["most"]
    # 10^20 cells are answered by tables, 10^6 by cells, and 10^10 cells of one table by nothing.
    ways_of = {2: "tables", 3: "cells", 5: None}
    assert shown["answered_by"] == ways_of[ways] and bool(shown["refused"]) == (ways == 5)


@pytest.mark.parametrize("objective", ["total", "worst"])
def test_products_of_many_attributes(tmp_path: Path, objective: str) -> None:
    """A product of 25 attributes has 2^25 residual spaces, which only a comparison needs."""
    asked = over([3] * 25, ["prefix"] * 25)
    start = time.process_time()
    shown = figures(planned(asked, tmp_path, objective), guarantee_of(None, None, 1.0, 1))
    assert time.process_time() - start < 5
    assert shown["floor"] <= shown["rmse"] <= min(shown["strategies"].values()) * (1 + 1e-6)
    assert {"fourier", "datacube"} <= set(shown["absent"]) and words(shown)


def test_a_union_with_a_product_of_many_attributes(tmp_path: Path) -> None:
    each = {axis: interval("prefix", 2) for axis in range(22)}
    attributes = [of_size(str(axis), 2) for axis in range(22)]
    start = time.process_time()
    few = workload_of(
        attributes[:14], [(1.0, {a: each[a] for a in range(14)}), (1.0, {0: each[0]})]
    )
    shown = figures(planned(few, tmp_path), guarantee_of(None, None, 1.0, 1))
    assert shown["floor"] <= shown["rmse"] and shown["answered_by"]
    with pytest.raises(PolicyError) as refused:
        planned(workload_of(attributes, [(1.0, each), (1.0, {0: each[0]})]), tmp_path)
    assert refused.value.field == "queries"
    with pytest.raises(PolicyError):  # named, it is refused before its spaces are listed
        planned(workload_of(attributes, [(1.0, each)]), tmp_path, strategy="datacube")
    assert time.process_time() - start < 10


def test_an_absent_comparison_names_a_strategy_that_is_computed(tmp_path: Path) -> None:
    asked = over([2] * 15, ["prefix"] * 15)
    shown = figures(planned(asked, tmp_path), guarantee_of(None, None, 1.0, 1))
    fixes = [re.search(r"--strategy (\w+)", reason) for reason in shown["absent"].values()]
    names = {fix[1] for fix in fixes if fix}
    assert {"fourier", "datacube"} <= names
    for name in names - {"eigen"}:  # over 2^15 cells eigen is refused with a reason of its own
        assert planned(asked, tmp_path, strategy=name).plan.strategy.name == name


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


def _process(folder: Path, queries: list[object], domain: list[object]) -> resource.struct_rusage:
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
    asked = marginals([of_size(str(k), 7) for k in range(20)], [3])
    shown = figures(planned(asked, tmp_path), guarantee_of(None, None, 1.0, 1))
    assert len(shown["products"]) == 1140 and shown["strategy"] and shown["gap"] < 1e-9
    assert "more products" in words(shown)


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
    with pytest.raises(PolicyError):
        guarantee_of(*given, 1)
