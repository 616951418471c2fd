"""How a workload is read, solved, planned and drawn, from its structure, before a charge."""

import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.limits import MAX_WORKLOAD_TEXT_BYTES
from dpstream.accounting.strategies.cells.auto import STRATEGIES, auto, largest
from dpstream.accounting.strategies.cells.residual import residual
from dpstream.accounting.strategies.cells.strategy import identity
from dpstream.accounting.workloads.attributes import interval, of_size
from dpstream.accounting.workloads.workload import Workload, from_dict, marginals, over, workload_of
from dpstream.pipelines.render.workload_plan import workload_text
from dpstream.pipelines.workload.picture import curve, draw, draw_matrices, save, strategy_matrices
from dpstream.pipelines.workload.planning import (
    domain_text,
    figures,
    folder_of,
    guarantee_of,
    planned,
    read_workload,
    solved_purely,
    way_of,
)
from tests.bench.paper.cell_baselines import haar
from tests.golden.pinned import check, of_refusals
from tests.pipelines.workload.survey import DOMAIN, workload, write

GUARANTEE = guarantee_of(None, None, 2.0, 1)
ONE = '{"domain": [{"name": "a", "size": 2}], "queries": [{"factors": {"a": %s}}]}'


def test_json_and_arrays(tmp_path: Path) -> None:
    assert read_workload(write(tmp_path / "w.json")).digest == workload().digest
    assert domain_text(workload()) == DOMAIN
    marked = tmp_path / "marked.json"
    marked.write_bytes(b"\xef\xbb\xbf" + (tmp_path / "w.json").read_bytes())
    assert read_workload(marked).digest == workload().digest
    np.savez(tmp_path / "w.npz", W=np.eye(3)[:2])
    assert read_workload(tmp_path / "w.npz").queries == 2


def _files(folder: Path) -> dict[str, Callable[[], object]]:
    """What is no workload, by its name: each read from a file."""
    texts = {
        "half an object": "{", "a list": "[1]", "half a pair of UTF-16": '"\ud83d',
        "a key twice": '{"domain": [], "domain": []}', "NaN": ONE % '{"matrix": [[NaN, 1]]}',
        "beyond a float": ONE % '{"matrix": [[1e400, 1]]}', "zeros": ONE % '{"matrix": [[0, 0]]}',
        "no row": ONE % '{"matrix": []}', "no factor": ONE % '"all"', "deep": "[" * 100_000,
    }  # fmt: skip
    for name, text in texts.items():
        (folder / f"{name}.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with open(folder / "too large.json", "wb") as file:
        file.truncate(MAX_WORKLOAD_TEXT_BYTES + 1)
    (folder / "no archive.npz").write_bytes(b"PK\x03\x04 no archive")
    np.savez(folder / "objects.npz", W=np.array([[object()]]))
    np.savez(folder / "no matrix.npz", V=np.eye(2))
    folder.joinpath("folder").mkdir()
    names = [*sorted(path.name for path in folder.iterdir()), "absent.json", "absent.npz"]
    return {name: partial(read_workload, folder / name) for name in names}


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    product, several = over([100] * 5, ["range"] * 5), tables(10, 20)
    numbers, each = tables(257, 3, ways=3), {axis: interval("prefix", 2) for axis in range(22)}
    joined = workload_of([of_size(str(a), 2) for a in each], [(1.0, each), (1.0, {0: each[0]})])
    guarantees: dict[str, tuple[Any, ...]] = {
        "nothing": (None, None, None, 1), "no delta": (1.0, None, None, 1),
        "both forms": (1.0, 1e-8, 1.0, 1), "a delta and mu": (None, 1e-8, 1.0, 1),
        "no contribution": (None, None, 1.0, 0), "no epsilon": (0, 1e-8, None, 1),
        "a delta of 0": (1, 0, None, 1), "a delta of 1": (1, 1, None, 1),
        "a mu of 0": (None, None, 0, 1), "no number": (math.nan, 1e-8, None, 1),
        "infinite": (None, None, math.inf, 1),
    }  # fmt: skip
    plan = planned(workload(), tmp_path / "cache")
    calls: dict[str, Callable[[], object]] = {
        **{name: partial(guarantee_of, *given) for name, given in guarantees.items()},
        "a strategy": lambda: planned(workload(), tmp_path, "total", "optimun"),
        "an objective": lambda: planned(workload(), tmp_path, "mean"),
        "a matrix too large": lambda: planned(over([16385], ["prefix"]), tmp_path),
        "a union too large": lambda: planned(joined, tmp_path),
        "cells too many": lambda: way_of(product, auto(product).strategy),
        "numbers too many": lambda: way_of(numbers, residual(numbers)[0]),
        "an attribute too large": lambda: way_of(
            over([9000, 2], ["identity"] * 2), identity(over([9000, 2], ["identity"] * 2))
        ),
        "a product of 10^20 cells": lambda: way_of(several, haar(several)),
        "a picture's ending": lambda: save(plan, GUARANTEE, Path("a.gif")),
        "a matrix's ending": lambda: save(plan, GUARANTEE, None, Path("m.txt")),
        "a picture's folder": lambda: save(plan, GUARANTEE, Path("none", "a.png")),
        "a picture of many": lambda: curve(planned(over([300, 300], ["range"] * 2), tmp_path)),
    }
    (tmp_path / "files").mkdir()
    refusals = of_refusals(_files(tmp_path / "files") | calls)
    check(Path(__file__).with_name("refusals_planning.txt"), refusals)


def test_the_second_time_it_is_read(tmp_path: Path) -> None:
    query_set = over([512], ["range"])
    _, first, path, cache_hit = planned(query_set, tmp_path / "cache")
    assert not cache_hit and path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    before = time.process_time()
    _, again, same, cache_hit = planned(query_set, tmp_path / "cache")
    assert cache_hit and same == path and time.process_time() - before < 0.1
    assert (again.error, again.floor, again.strategy.name) == (
        first.error, first.floor, first.strategy.name,
    )  # fmt: skip
    assert again.strategy.error(query_set) == first.strategy.error(query_set)


def test_what_is_damaged_is_solved_again(tmp_path: Path) -> None:
    query_set = over([16], ["prefix"])
    _, first, path, _ = planned(query_set, tmp_path)
    content = path.read_bytes()
    at = content.index(np.asarray(first.error).tobytes())
    for broken in (content[:-20], b"", content[:at] + b"\0\0" + content[at + 2 :]):
        path.write_bytes(broken)
        _, again, _, cache_hit = planned(query_set, tmp_path)
        assert not cache_hit and again.error == first.error and path.read_bytes() == content
    _, other, foreign, _ = planned(over([17], ["prefix"]), tmp_path)
    path.write_bytes(foreign.read_bytes())
    assert planned(query_set, tmp_path).plan.error == first.error != other.error


def test_strategies_for_pure_epsilon_are_kept_too(tmp_path: Path) -> None:
    query_set = over([24], ["range"])
    name, first, cache_hit = solved_purely(query_set, tmp_path)
    [path] = tmp_path.iterdir()
    assert not cache_hit and path.stat().st_mode & 0o777 == 0o600
    again = solved_purely(query_set, tmp_path)
    assert again[0] == name and again[2] and np.array_equal(again[1].factors[0], first.factors[0])
    content = path.read_bytes()
    for broken in (content[:-9], b""):
        path.write_bytes(broken)
        assert not solved_purely(query_set, tmp_path)[2] and path.read_bytes() == content


def test_by_name(tmp_path: Path) -> None:
    query_set = over([16], ["range"])
    best = planned(query_set, tmp_path).plan
    for name in STRATEGIES:
        named_plan = planned(query_set, tmp_path, "total", name).plan
        assert named_plan.floor == best.floor <= named_plan.error
        assert best.error <= named_plan.error * (1 + 1e-3)
        worst = planned(query_set, tmp_path, "worst", name).plan
        assert worst.error == pytest.approx(largest(query_set, worst.strategy), rel=1e-3)
    assert len(list(tmp_path.iterdir())) == 2 * len(STRATEGIES)


def test_without_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    _, _, path, cache_hit = planned(workload(), tmp_path / "file" / "below")
    assert not cache_hit and not path.exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder_of(None) == tmp_path / "dpstream" / "strategies"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder_of(None).name == "strategies" and folder_of(tmp_path) == tmp_path


def tables(size: int, attributes: int, kind: str = "range", ways: int = 2) -> Workload:
    return marginals([of_size(str(k), size) for k in range(attributes)], [ways], kind)


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
        (over([2048, 2048], ["identity"] * 2), "cells"),  # as many as may have noise
        (over([8192, 2], ["identity"] * 2), "cells"),  # and of an attribute
    ],
)  # fmt: skip
def test_what_is_chosen_can_be_answered(workload: Workload, way: str) -> None:
    assert way_of(workload, auto(workload).strategy) == way


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


def test_errors_of_all_queries(tmp_path: Path) -> None:
    workload_plan = planned(workload(), tmp_path)
    errors = curve(workload_plan)
    assert len(errors) == workload_plan.workload.queries and (np.diff(errors) >= 0).all()
    [axes] = draw(workload_plan, GUARANTEE).axes
    floor = next(line for line in axes.lines if "floor" in str(line.get_label()))
    drawn = workload_plan.per_query(workload_plan.plan.floor) / 2
    assert np.asarray(floor.get_ydata())[0] == pytest.approx(drawn)
    save(workload_plan, GUARANTEE, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")


def test_the_curve_is_of_what_the_objective_is_about(tmp_path: Path) -> None:
    """So that the floor in the picture is a floor of what is drawn."""
    query_set = workload(
        [{"factors": {"age": "prefix"}}, {"weight": 9, "factors": {"sex": "identity"}}]
    )
    worst = planned(query_set, tmp_path, "worst")
    assert curve(worst)[-1] == pytest.approx(worst.plan.error**0.5, rel=1e-6)
    cells = planned(query_set, tmp_path, "relative", "identity")
    # A cell's variance is 1, a query's its norm.
    assert curve(cells) == pytest.approx(np.ones(query_set.queries))
    relative = planned(query_set, tmp_path, "relative")
    label = draw(relative, GUARANTEE).axes[0].get_ylabel()
    assert "norm" in label and "weighted" in draw(worst, GUARANTEE).axes[0].get_ylabel()


def test_the_strategy(tmp_path: Path) -> None:
    one = planned(workload([{"factors": {"age": "range", "sex": "identity"}}]), tmp_path)
    age, sex = strategy_matrices(one.plan.strategy, one.workload.sizes)
    assert age.shape == (5, 5) and np.allclose(sex, np.eye(2))
    gram = age @ age
    assert gram.diagonal().max() == pytest.approx(1)
    inverse = np.asarray(np.linalg.inv(gram), np.float64)
    error = one.workload.products[0].factors[0].variances(inverse).sum() * 2
    assert error == pytest.approx(one.plan.error, rel=1e-6)
    titles = [axes.get_title() for axes in draw_matrices(one).axes[:2]]
    assert titles == ["age: 5 cells", "sex: 2 cells"]
    workload_plan = planned(workload(), tmp_path)
    assert draw_matrices(workload_plan).axes[0].get_title() == "all cells: 10 cells"
    save(workload_plan, GUARANTEE, None, tmp_path / "m.png")
    assert (tmp_path / "m.png").stat().st_size > 5000 and not (tmp_path / "a.svg").exists()
