"""Published totals find their groups by the names of regions and iterations."""

from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.accounting.tabulation.parameters import Level
from dpstream.dp_transforms.tabulation.domain import domain_of
from dpstream.dp_transforms.tabulation.published import published_of
from tests.dp_transforms.tabulation.worlds import parameters, public_files


def table(rows: list[tuple[str, str, str, int]]) -> pa.Table:
    names = ("REGION_TYPE", "REGION_ID", "ITERATION_CODE", "COUNT")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {
        name: pa.array([], pa.int64() if name == "COUNT" else pa.string()) for name in names
    }  # fmt: skip
    arrow_table = pa.table({name: pa.array(column) for name, column in columns.items()})
    for i, name in enumerate(names[:3]):
        arrow_table = arrow_table.set_column(i, name, arrow_table.column(name).dictionary_encode())
    return arrow_table


def test_totals_are_those_of_their_groups_in_any_order() -> None:
    files, settings = public_files(), parameters("h")
    domain = domain_of(files, settings)
    rng = np.random.default_rng(0)
    rows, wanted = [], {}
    for level in domain.levels:
        for r, region in enumerate(level.regions.to_pylist()):
            for i, code in enumerate(level.iterations.to_pylist()):
                if rng.random() < 0.5:
                    count = int(rng.integers(-9, 100))
                    rows.append((level.level.region_type, region, code, count))
                    wanted[level.level, r * len(level.iterations) + i] = count
    rng.shuffle(rows)
    rows = [(kind, region, code, int(count)) for kind, region, code, count in rows]
    by_level = published_of(domain, table(rows))
    seen = dict[Any, int]()
    for key, of in by_level.items():
        assert (np.diff(of.groups) > 0).all()
        seen |= {(key, g): t for g, t in zip(of.groups.tolist(), of.totals.tolist(), strict=True)}
        assert of.within(3, 40).groups.tolist() == [g for g in of.groups.tolist() if 3 <= g < 40]
    assert seen == wanted


def test_groups_of_no_level_are_left_out() -> None:
    files, settings = public_files(), parameters("h", run_pr=False)
    domain = domain_of(files, settings)
    tract = domain.of(Level(1, "TRACT"))
    assert tract is not None
    code, region = tract.iterations[0].as_py(), tract.regions[0].as_py()
    rows = [
        ("TRACT", region, code, 5),
        ("TRACT", region, "nobody", 6),
        ("PR-TRACT", region, code, 7),
        ("TRACT", "nowhere", code, 8),
    ]
    by_level = published_of(domain, table(rows))
    assert {level: of for level, of in by_level.items() if len(of.groups)}.keys() == {
        Level(1, "TRACT")
    }
    assert by_level[Level(1, "TRACT")].totals.tolist() == [5]
    assert not any(len(of.groups) for of in published_of(domain, table([])).values())
