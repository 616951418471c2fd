"""Scans against the same totals in numpy, over boxes and cells of every form."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.accounting.regions.boxes import union, without
from dpstream.accounting.sessions.cells import Cells, totalled
from dpstream.pipelines.session import scan as scans
from dpstream.pipelines.session import scan_sql
from dpstream.pipelines.session.config import Config
from dpstream.pipelines.session.load import add, init
from dpstream.pipelines.session.scan import Scan
from tests.pipelines.session.tables import at_of, config_at, rides, write


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, np.ndarray]:
    """A loaded table of several parts, and its usable records as coordinates."""
    folder = tmp_path_factory.mktemp("rides")
    some = rides(4_000)
    some["hour"] = some["hour"].astype(float)
    some["hour"][::50] = np.nan  # 80 that are not usable
    write(folder / "rides-1.parquet", some)
    config = config_at(folder)
    init(config)
    more = rides(1_000, seed=1, first=4_000)
    add(config, [write(folder / "more.parquet", more)])
    good = ~np.isnan(some["hour"])
    some["hour"] = np.nan_to_num(some["hour"]).astype(int)
    return config, np.concatenate([at_of(some)[good], at_of(more)])


@pytest.fixture(scope="module", params=[False, True], ids=["files", "held"])
def opened(
    table: tuple[Config, np.ndarray], request: pytest.FixtureRequest
) -> Iterator[tuple[Scan, Config, np.ndarray]]:
    config, at = table
    with Scan(config.folder, config.table, held=request.param) as scan:
        yield scan, config, at


def box_of(space: object, **ranges: tuple[int, int]) -> np.ndarray:
    found = space.whole.copy()
    for name, edges in ranges.items():
        found[0, space.place(name)] = edges
    return found


def same(opened: tuple[Scan, Config, np.ndarray], boxes: np.ndarray, cells: Cells) -> None:
    scan, config, at = opened
    space = config.table.space
    got, want = scan.totals(boxes, cells, (1, 3, 0)), totalled(at, boxes, cells, space, (1, 3, 0))
    for one, other in zip(got, want, strict=True):
        assert (one == other).all()


def cells_of(space: object) -> list[Cells]:
    """None; even; uneven on a list; uneven by comparisons; of several dimensions; part of them."""
    return [
        Cells(space),
        Cells(space, (0,), (np.arange(0, 25, 4),)),
        Cells(space, (1,), (np.array([0, 3, 4, 11, 21]),)),
        Cells(space, (5,), (np.array([0, 1, 250_000, 250_001, 1_000_001]),)),
        Cells(space, (3, 0), (np.array([0, 1, 4]), np.array([2, 8, 14]))),
        Cells(space, (2, 1, 4), (np.arange(11), np.array([1, 20]), np.array([1, 2, 5]))),
    ]


def boxes_of(space: object) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    one = box_of(space, hour=(3, 17), x=(0, 20), epsilon=(1, 5))
    other = box_of(space, hour=(17, 22), day=(2, 9))
    hours = np.concatenate([box_of(space, hour=(h, h + 1)) for h in range(0, 24, 3)])
    random = np.concatenate(
        [
            box_of(
                space,
                **{
                    name: np.sort(rng.choice(size + 1, 2, replace=False)).tolist()
                    for name, size in (("hour", 24), ("x", 21), ("day", 10), ("epsilon", 5))
                },
            )
            for _ in range(12)
        ]
    )
    return {
        "whole": space.whole,
        "one": one,
        "two": np.concatenate([one, other]),
        "hours": hours,
        "many": union(random),
        "rest": without(space.whole, random),
        "nobody": box_of(space, rho=(0, 250_000)),
        "none": space.whole[:0],
    }


@pytest.mark.parametrize("name", ["whole", "one", "two", "hours",
                         "many", "rest", "nobody", "none"])  # fmt: skip
def test_totals_are_those_of_the_records(
    opened: tuple[Scan, Config, np.ndarray], name: str
) -> None:
    space = opened[1].table.space
    for cells in cells_of(space):
        same(opened, boxes_of(space)[name], cells)


def test_many_boxes_whose_cells_are_too_many(
    opened: tuple[Scan, Config, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer dimensions make the cells, and the others are compared."""
    space = opened[1].table.space
    for rows in (1, 200, 2_000):
        monkeypatch.setattr(scan_sql, "MAX_ROWS", rows)
        for name in ("hours", "many", "rest"):
            same(opened, boxes_of(space)[name], cells_of(space)[4])


def test_a_join_that_forgets_a_dimension_is_noticed(
    opened: tuple[Scan, Config, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_sql, "_number", lambda chosen, edges: "0")
    with pytest.raises(AssertionError):
        same(opened, boxes_of(opened[1].table.space)["many"], Cells(opened[1].table.space))


def test_edges_by_comparisons(
    opened: tuple[Scan, Config, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_sql, "MAX_LIST", 0)
    for cells in cells_of(opened[1].table.space):
        same(opened, boxes_of(opened[1].table.space)["many"], cells)


def test_histograms_are_those_of_the_records(opened: tuple[Scan, Config, np.ndarray]) -> None:
    scan, config, at = opened
    space, leaves = config.table.space, np.array([0, 2, 4, 9, 20])
    boxes, cells = boxes_of(space)["two"], Cells(space, (0, 1), (np.array([0, 10, 24]), [0, 7, 15]))
    both = Cells(space, (0, 3), (np.array([0, 10, 24]), np.array([0, 2, 4])))
    wide = Cells(space, (0, 3, 1), (*both.edges, leaves))
    want = totalled(at, boxes, wide, space).counts.reshape(both.size, 4)
    assert (scan.histograms(boxes, both, 1, leaves) == want).all() and want.sum() > 100
    # The column may make cells too.
    inside = scan.histograms(boxes, cells, 1, np.array([0, 7, 15]))
    assert (inside[:, 0][1::2] == 0).all() and inside.sum() == scan.totals(
        boxes, cells
    ).counts.sum()


def test_boxes_that_are_none_of_the_space(opened: tuple[Scan, Config, np.ndarray]) -> None:
    scan, config, _ = opened
    space = config.table.space
    for wrong in (space.whole + 1, np.concatenate([space.whole] * 2), space.whole[:, :3]):
        with pytest.raises(UsageError, match="boxes"):
            scan.totals(wrong, Cells(space))


def test_a_sum_that_64_bits_might_not_hold(
    opened: tuple[Scan, Config, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    scan, config, _ = opened
    monkeypatch.setattr(scans, "MAX_SUMMED", 20)
    scan.totals(config.table.space.whole, Cells(config.table.space), (2,))
    with pytest.raises(UsageError, match="x: has more than 20 coordinates"):
        scan.totals(config.table.space.whole, Cells(config.table.space), (1,))


def test_duckdb_is_locked(opened: tuple[Scan, Config, np.ndarray], tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a\n1\n")
    for text in (
        f"SELECT * FROM read_csv('{tmp_path / 'other.csv'}')",
        f"COPY (SELECT 1) TO '{tmp_path / 'out.csv'}'",
        f"ATTACH '{tmp_path / 'a.db'}' AS a",
        "SET threads = 1",
        "INSTALL httpfs",
    ):
        with pytest.raises(RunError, match="cannot be scanned") as found:
            opened[0]._select(text, scan_sql.Where("true"))
        assert found.value.__cause__ is None and str(tmp_path) not in str(found.value)


def small(folder: Path) -> Config:
    write(folder / "rides-1.parquet", rides(50))
    config = config_at(folder)
    init(config)
    return config


def count(scan: Scan, config: Config) -> int:
    space = config.table.space
    return int(scan.totals(space.whole, Cells(space)).counts[0])


def test_a_flipped_bit_is_refused_when_the_table_is_opened(tmp_path: Path) -> None:
    config = small(tmp_path)
    [part] = config.folder.glob("part-*.parquet")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(bytes(data))
    with pytest.raises(RunError, match="not as it was written"):
        Scan(config.folder, config.table)
    part.unlink()
    with pytest.raises(RunError, match="cannot be read"):
        Scan(config.folder, config.table)


def test_a_part_that_changes_later_fails_the_query(tmp_path: Path) -> None:
    config = small(tmp_path)
    [part] = config.folder.glob("part-*.parquet")
    with Scan(config.folder, config.table) as scan:
        assert count(scan, config) == 50
        os.utime(part, ns=(1, 1))
        with pytest.raises(RunError, match="not as it was written"):
            count(scan, config)


def test_a_reader_keeps_its_version(tmp_path: Path) -> None:
    config = small(tmp_path)
    with Scan(config.folder, config.table) as scan:
        add(config, [write(tmp_path / "more.parquet", rides(7, first=50))])
        assert (scan.version, count(scan, config)) == (1, 50)
    with Scan(config.folder, config.table) as scan:
        assert (scan.version, count(scan, config)) == (2, 57)


def test_another_table_and_none(tmp_path: Path) -> None:
    config = small(tmp_path)
    (tmp_path / "other").mkdir()
    other = config_at(tmp_path / "other", more="cap = 50")
    with pytest.raises(PolicyError, match="holds another table"):
        Scan(config.folder, other.table)
    with pytest.raises(RunError, match="holds no table"):
        Scan(other.folder, other.table)


def test_a_table_without_usable_records(tmp_path: Path) -> None:
    found = rides(5) | {"hour": [99] * 5}
    write(tmp_path / "rides-1.parquet", found)
    config = config_at(tmp_path)
    assert init(config).usable == 0
    for held in (False, True):
        with Scan(config.folder, config.table, held=held) as scan:
            assert count(scan, config) == 0
