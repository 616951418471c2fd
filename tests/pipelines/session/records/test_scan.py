"""Scans against the same totals in numpy, over boxes and cells of every form."""

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.regions.boxes import union, without
from dpstream.accounting.regions.space import Space
from dpstream.accounting.sessions.aggregates import COUNT, Aggregate, Axis, Cells, Needs, Question
from dpstream.dp_transforms.session import tallied
from dpstream.pipelines.session.config import Config
from dpstream.pipelines.session.records import scan as scans
from dpstream.pipelines.session.records.load import add, delete, init, tidied
from dpstream.pipelines.session.records.scan import BOXES, Scan, cell, where
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.session.tables import at_of, config_at, rides, without_ids, write
from tests.sessions import average, median, sum_of


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, np.ndarray]:
    """A loaded table of several parts, and its usable records as coordinates."""
    folder = tmp_path_factory.mktemp("rides")
    records = rides(4_000)
    records["hour"] = records["hour"].astype(float)
    records["hour"][::50] = np.nan  # 80 that are not usable
    write(folder / "rides-1.parquet", records)
    config = config_at(folder)
    init(config)
    more = rides(1_000, seed=1, first=4_000)
    add(config, [write(folder / "more.parquet", more)])
    good = ~np.isnan(records["hour"])
    records["hour"] = np.nan_to_num(records["hour"]).astype(int)
    return config, np.concatenate([at_of(records)[good], at_of(more)])


@pytest.fixture(scope="module", params=[False, True], ids=["files", "held"])
def opened(
    table: tuple[Config, np.ndarray], request: pytest.FixtureRequest
) -> Iterator[tuple[Scan, Config, np.ndarray]]:
    config, at = table
    with Scan(config.folder, config.table, held=request.param) as scan:
        yield scan, config, at


def box_of(space: Space, **ranges: tuple[int, int]) -> np.ndarray:
    box = space.everything.copy()
    for name, edges in ranges.items():
        box[0, space.place(name)] = edges
    return box


NOTHING = Needs((), ())
#: Counts; sums; one tree (which makes the groups of all else finer); two of them.
AGGREGATES: tuple[tuple[Aggregate, ...], ...] = (
    (COUNT,),
    (COUNT, sum_of("x"), average("hour")),
    (sum_of("hour"), median("x")),
    (average("x"), median("x"), median("hour")),
)


def same(
    opened: tuple[Scan, Config, np.ndarray], boxes: np.ndarray, cells: Cells, number: int = 1
) -> None:
    scan, config, at = opened
    space = config.table.space
    question = Question(kind="epsilon", amount=1, aggregates=AGGREGATES[number], cells=cells)
    needs = question.needs(space, boxes)
    columns = {d.name: at[:, place] for place, d in enumerate(space.dimensions)}
    got = scan.totals(boxes, cells, needs)
    want = tallied(space, boxes, cells, needs, columns, np.ones(len(at), np.bool_))
    assert (got.records == want.records).all()
    assert got.columns.keys() == want.columns.keys() and got.leaves.keys() == want.leaves.keys()
    assert all(np.array_equal(got.columns[name], of) for name, of in want.columns.items())
    assert all(np.array_equal(got.leaves[name], of) for name, of in want.leaves.items())


CELLS = (
    Cells(),
    Cells((Axis("hour", tuple(range(0, 25, 4))),)),
    Cells((Axis("x", (0, 3, 4, 11, 20, 21)),)),
    Cells((Axis("rho", (0, 1, 250_000, 250_001, 1_000_001)),)),
    Cells((Axis("vendor", (0, 1, 4)), Axis("hour", (2, 8, 14)))),
    Cells((Axis("day", tuple(range(11))), Axis("x", (1, 20)), Axis("epsilon", (1, 2, 5)))),
)


def boxes_of(space: Space) -> dict[str, np.ndarray]:
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
        "whole": space.everything,
        "one": one,
        "two": np.concatenate([one, other]),
        "hours": hours,
        "many": union(random),
        "rest": without(space.everything, random),
        "nobody": box_of(space, rho=(0, 250_000)),
        "none": space.everything[:0],
    }


@pytest.mark.parametrize("name", ["whole", "one", "two", "hours",
                         "many", "rest", "nobody", "none"])  # fmt: skip
def test_totals_are_those_of_the_records(
    opened: tuple[Scan, Config, np.ndarray], name: str
) -> None:
    space = opened[1].table.space
    for cells in CELLS:
        for number in range(len(AGGREGATES)):
            same(opened, boxes_of(space)[name], cells, number)


def test_many_boxes_whose_cells_are_too_many(
    opened: tuple[Scan, Config, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer dimensions make the cells, and the others are compared."""
    space = opened[1].table.space
    for rows in (1, 200, 2_000):
        monkeypatch.setattr(scans, "MAX_ROWS", rows)
        for name in ("hours", "many", "rest"):
            same(opened, boxes_of(space)[name], CELLS[4])


def test_a_join_that_forgets_a_dimension_is_noticed(
    opened: tuple[Scan, Config, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "_number", lambda chosen, edges: "0")
    with pytest.raises(AssertionError):
        same(opened, boxes_of(opened[1].table.space)["many"], Cells())


def test_edges_by_comparisons(
    opened: tuple[Scan, Config, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "MAX_LIST", 0)
    for cells in CELLS:
        same(opened, boxes_of(opened[1].table.space)["many"], cells)


def test_everything_is_one_scan(
    opened: tuple[Scan, Config, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, select = list[str](), Scan._select

    def counted(self: Scan, text: str, where: scans.Where) -> dict[str, np.ndarray]:
        queries.append(text)
        return select(self, text, where)

    monkeypatch.setattr(Scan, "_select", counted)
    for number in range(len(AGGREGATES)):
        same(opened, opened[1].table.space.everything, CELLS[4], number)
    assert len(queries) == len(AGGREGATES) and all(text.count(" FROM t ") == 1 for text in queries)


def test_what_is_refused(
    opened: tuple[Scan, Config, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan, config, _ = opened
    every = config.table.space.everything
    wrong = {"beyond": every + 1, "twice": np.concatenate([every] * 2), "few": every[:, :3]}
    damaged, gone, changed = (small(tmp_path / name) for name in ("damaged", "gone", "changed"))
    parts = [next(c.folder.glob("part-*.parquet")) for c in (damaged, gone, changed)]
    data = bytearray(parts[0].read_bytes())
    data[len(data) // 2] ^= 1
    parts[0].write_bytes(bytes(data))
    parts[1].unlink()
    other = config_at(tmp_path, more="regions = 50")
    later = Scan(changed.folder, changed.table)
    assert count(later, changed) == 50
    os.utime(parts[2], ns=(1, 1))
    scan.totals(every, Cells(), Needs(("day",), ()))
    calls: dict[str, Callable[[], object]] = {
        **{f"boxes {n}": partial(scan.totals, b, Cells(), NOTHING) for n, b in wrong.items()},
        "a flipped bit": lambda: Scan(damaged.folder, damaged.table),
        "a part that is gone": lambda: Scan(gone.folder, gone.table),
        "a part that changed": lambda: count(later, changed),
        "another table": lambda: Scan(config.folder, other.table),
        "no table": lambda: Scan(other.folder, other.table),
        "a sum that 64 bits might not hold": lambda: scan.totals(every, Cells(), Needs(("x",), ())),
    }
    monkeypatch.setattr(scans, "MAX_SUMMED", 20)
    text = of_refusals(calls).replace(str(tmp_path), "FOLDER")
    check(Path(__file__).with_name("refusals_scan.txt"), text)
    later.close()


def test_duckdb_is_locked(
    opened: tuple[Scan, Config, np.ndarray], tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "other.csv").write_text("a\n1\n")
    for text in (
        f"SELECT * FROM read_csv('{tmp_path / 'other.csv'}')",
        f"COPY (SELECT 1) TO '{tmp_path / 'out.csv'}'",
        f"ATTACH '{tmp_path / 'a.db'}' AS a",
        "SET threads = 1",
        "INSTALL httpfs",
    ):
        caught = refused(opened[0]._select, text, scans.Where("true"))
        assert caught.__cause__ is None and str(tmp_path) not in str(caught)


def small(folder: Path) -> Config:
    folder.mkdir(exist_ok=True, parents=True)
    write(folder / "rides-1.parquet", rides(50))
    config = config_at(folder)
    init(config)
    return config


def count(scan: Scan, config: Config) -> int:
    space = config.table.space
    return int(scan.totals(space.everything, Cells(), NOTHING).records[0])


def test_a_reader_keeps_its_version(tmp_path: Path) -> None:
    """Also when its parts are no longer any version's."""
    config = small(tmp_path)
    gone = write(tmp_path / "gone.parquet", {"ride": ["r3", "r4"]})
    with Scan(config.folder, config.table) as scan:
        assert not delete(config, [gone]).tidied
        assert (scan.manifest.version, count(scan, config)) == (1, 50)
        with Scan(config.folder, config.table) as other:
            assert (other.manifest.version, count(other, config)) == (2, 48)
    assert tidied(config) and len(list(config.folder.glob("part-*"))) == 1


def test_a_part_that_is_listed_twice_counts_twice(tmp_path: Path) -> None:
    """Records without ids may be alike."""
    write(tmp_path / "rides-1.parquet", rides(5))
    config_at(tmp_path)
    config = without_ids(tmp_path)
    init(config)
    add(config, [tmp_path / "rides-1.parquet"])
    for held in (False, True):
        with Scan(config.folder, config.table, held=held) as scan:
            assert count(scan, config) == 10


def test_sums_of_many_coordinates_are_whole(opened: tuple[Scan, Config, np.ndarray]) -> None:
    scan, config, at = opened
    totals = scan.totals(config.table.space.everything, Cells(), Needs(("rho",), ()))
    assert totals.columns["rho"].total.tolist() == [at[:, 5].sum()] and at[:, 5].sum() > 1 << 30


def test_a_table_without_usable_records(tmp_path: Path) -> None:
    records = rides(5) | {"hour": [99] * 5}
    write(tmp_path / "rides-1.parquet", records)
    config = config_at(tmp_path)
    assert init(config).usable == 0
    for held in (False, True):
        with Scan(config.folder, config.table, held=held) as scan:
            assert count(scan, config) == 0


SIZES = (7, 5, 6)
POINTS = np.array(list(itertools.product(*map(range, SIZES))))
HELD = np.array([[0, size] for size in SIZES])


def rows(boxes: np.ndarray, held: np.ndarray = HELD) -> list[list[int]]:
    """The points that DuckDB finds in boxes, each as often as it finds it."""
    with duckdb.connect() as db:
        db.register("t", pa.table({f"x{i}": POINTS[:, i].astype(np.uint8) for i in range(3)}))
        clause = where(boxes, held)
        if clause.boxes is not None:
            db.register(BOXES, clause.boxes)
        text = f"SELECT x0, x1, x2 FROM t{clause.join} WHERE {clause.text} ORDER BY ALL"
        return [list(row) for row in db.sql(text).fetchall()]


def held_in(boxes: np.ndarray) -> list[list[int]]:
    inside = [((box[:, 0] <= POINTS) & (box[:, 1] > POINTS)).all(axis=1) for box in boxes]
    return list(POINTS[np.logical_or.reduce(inside)].tolist())


def some_boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    edges = [[np.sort(rng.choice(size + 1, 2, replace=False)) for size in SIZES]
             for _ in range(count)]  # fmt: skip
    return union(np.array(edges))


@pytest.mark.parametrize("most", [1, 4, 30, 1 << 20])
def test_disjoint_boxes_hold_their_points_once(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "MAX_ROWS", most)
    rng, joins = np.random.default_rng(4), 0
    for count in (1, 2, 3, 4, 6, 9):
        boxes = some_boxes(rng, count)
        assert rows(boxes) == held_in(boxes)
        joins += where(boxes, HELD).boxes is not None
    assert joins >= 3


def test_a_comparison_that_all_records_meet_is_left_out() -> None:
    box = np.array([[[2, 7], [0, 3], [1, 5]]])
    assert where(box, HELD).text == "x0 >= 2 AND x1 < 3 AND x2 >= 1 AND x2 < 5"
    assert where(box, np.array([[3, 6], [1, 3], [0, 6]])).text == "x2 >= 1 AND x2 < 5"
    assert where(box, np.array([[3, 6], [1, 3], [1, 5]])).text == "true"
    assert where(box, np.array([[0, 2], [0, 5], [0, 6]])).text == "false"


def test_boxes_that_can_be_clubbed_are_no_join() -> None:
    parts = np.array([[[i, i + 1], [0, 5], [2, 4]] for i in range(7)])
    assert where(parts, HELD) == ("x2 >= 2 AND x2 < 4", "", None)


@pytest.mark.parametrize(
    ("edges", "most", "form"),
    [
        ([0, 2, 4, 6], 1 << 14, "//"),
        ([1, 2, 3], 1 << 14, "-"),
        ([0, 5], 1 << 14, "0"),
        ([0, 1, 4, 6], 1 << 14, "["),
        ([0, 2, 6], 1 << 14, "["),
        ([0, 1, 4, 6], 2, "CASE"),
        ([1, 2, 4, 5, 6], 2, "CASE"),
    ],
)
def test_ranges_between_edges(
    edges: list[int], most: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "MAX_LIST", most)
    text = cell("x", np.array(edges))
    assert form in text
    values = np.arange(edges[0], edges[-1], dtype=np.uint8)
    with duckdb.connect() as db:
        db.register("t", pa.table({"x": values}))
        places = [row[0] for row in db.sql(f"SELECT {text} FROM t").fetchall()]
    assert places == (np.searchsorted(edges, values, "right") - 1).tolist()


def test_very_wide_dimensions() -> None:
    """Coordinates of 40 bits, with cells of several dimensions: numbers stay within 64 bits."""
    bounds = np.array([[0, 1 << 40]] * 3)
    boxes = np.array([[[i << 30, (i << 30) + 1]] * 3 for i in range(5)])
    clause = where(boxes, bounds)
    assert clause.boxes is not None and clause.boxes.num_rows == 5
    with duckdb.connect() as db:
        at = np.array([0, 1, 1 << 30, 4 << 30, (4 << 30) + 1])
        db.register("t", pa.table({f"x{i}": at for i in range(3)}))
        db.register(BOXES, clause.boxes)
        text = f"SELECT x0 FROM t{clause.join} WHERE {clause.text} ORDER BY ALL"
        assert [row[0] for row in db.sql(text).fetchall()] == [0, 1 << 30, 4 << 30]


@pytest.mark.parametrize("held", [False, True])
def test_the_name_of_a_folder_says_nothing_of_its_records(tmp_path: Path, held: bool) -> None:
    folder, named = tmp_path / "plain", tmp_path / "x0=7" / "all[1]*"
    totals = []
    for place in (folder, named):
        config = small(place)
        with Scan(config.folder, config.table, held=held) as scan:
            box = box_of(config.table.space, hour=(0, 7))
            totals.append(int(scan.totals(box, Cells(), NOTHING).records[0]))
    assert totals[0] == totals[1] > 0
