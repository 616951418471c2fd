"""Columns of every type as coordinates, and rows as records or dead letters."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.regions.space import Budget, Category, Integer, Real, Timestamp
from dpstream.accounting.sessions.table import AnyDimension
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.pipelines.session.records.reading import (
    Letters,
    Records,
    coordinates,
    files_of,
    ids_of,
    parts_of,
    records_of,
)
from tests.pipelines.session.tables import DAY, START, config_at, rides, write

INTEGER = Integer(name="a", low=-1, high=3, missing="point")
REAL = Real(name="x", low=0.0, high=0.4, step=0.1, missing="point")
TIME = Timestamp(name="t", low=START, high=START + 3 * DAY, step=DAY, missing="point")
CODES = Category(name="v", codes=("b", "a", "1", "true", "\u00e9"), missing="point")
BUDGET = Budget(name="e", most=2.0, step=500_000)


@pytest.mark.parametrize(
    ("dimension", "column", "want"),
    [
        (INTEGER, pa.array([-1, 2, 3, None, -2], pa.int8()), [0, 3, 4, 4, 4]),
        (INTEGER, pa.array([2, 1 << 63], pa.uint64()), [3, 4]),
        (INTEGER, pa.array([-1.0, 2.5, float("nan"), float("inf"), -0.0]), [0, 4, 4, 4, 1]),
        (INTEGER, pa.array(["2", "+1", "2.0", "x", None, "9" * 30, " 1"]), [3, 2, 4, 4, 4, 4, 4]),
        (INTEGER, pa.array([True]), [4]),
        (REAL, pa.array([0.0, 0.1, 0.3, 0.39999, 0.4, -1e-9, float("nan")]), [0, 1, 3, 3, 4, 4, 4]),
        (REAL, pa.array(["0.3", "3e-1", ".2", "inf", "nan", "", None]), [3, 3, 2, 4, 4, 4, 4]),
        (REAL, pa.array([0, None], pa.int32()), [0, 4]),
        (REAL, pa.array(["0.30", "0.10"]).cast(pa.decimal128(9, 2)), [3, 1]),
        (REAL, pa.array([0.1], pa.float32()), [1]),
        (TIME, pa.array([START, START + DAY, START - 1, None, START + 3 * DAY]), [0, 1, 3, 3, 3]),
        (TIME, pa.array([START // 1000 + 5]).cast(pa.timestamp("ms", "UTC")), [0]),
        (TIME, pa.array([START * 1000 + 2 * DAY * 1000 - 1]).cast(pa.timestamp("ns")), [1]),
        (TIME, pa.array([START // DAY + 2], pa.int32()).cast(pa.date32()), [2]),
        (TIME, pa.array(["2024-01-02T23:00:00-02:00", "2024-01-02", "x"]), [2, 3, 3]),
        (CODES, pa.array(["a", "b", "c", None, "e\u0301"]), [1, 0, 5, 5, 4]),
        (CODES, pa.array(["a", None, "b"]).dictionary_encode().dictionary_decode(), [1, 5, 0]),
        (CODES, pa.array([1, 2, None]), [2, 5, 5]),
        (CODES, pa.array([True, False]), [3, 5]),
        (CODES, pa.array([], pa.string()), []),
        (CODES, pa.array([None, None], pa.string()), [5, 5]),
        (CODES, pa.array([0.5]), [5]),
        (BUDGET, pa.array([0.0, 0.49, 0.5, 2.0, 99.0]), [0, 0, 1, 4, 4]),
        (BUDGET, pa.array(["1.5", "0.9999999"]), [3, 1]),
        (BUDGET, pa.array(["1.50"]).cast(pa.decimal128(9, 2)), [3]),
    ],
)  # fmt: skip
def test_values_become_coordinates(
    dimension: AnyDimension, column: pa.Array, want: list[int]
) -> None:
    points = coordinates(dimension, column, None, len(column))
    assert points.at.tolist() == want and points.usable.all()


@pytest.mark.parametrize(
    ("dimension", "column"),
    [
        (Integer(name="a", low=0, high=3), pa.array([None, 3, -1])),
        (Category(name="v", codes=("a",)), pa.array([None, "b", "", "A", "a" * 5_000])),
        (BUDGET, pa.array([None, -0.1, float("nan"), float("inf")])),
        (BUDGET, pa.array(["", "much", None])),
    ],
)
def test_what_is_refused_has_no_coordinate(dimension: AnyDimension, column: pa.Array) -> None:
    points = coordinates(dimension, column, None, len(column))
    assert not points.usable.any() and not points.at.any()


def test_a_value_of_every_record() -> None:
    points = coordinates(BUDGET, None, 1.2, 3)
    assert points.at.tolist() == [2, 2, 2] and points.usable.all()


def test_a_row_is_read_alone(tmp_path: Path) -> None:
    """Whatever stands beside it in the batch."""
    columns: dict[str, Any] = {k: np.asarray(v).tolist() for k, v in rides(30).items()}
    for row, (name, value) in enumerate(
        [("hour", None), ("x", None), ("vendor", None), ("budget", None), ("ride", None)]
    ):
        columns[name][row] = value
    path = write(tmp_path / "rides-1.parquet", columns)
    config, prf = config_at(tmp_path), Prf(b"1" * 32)
    together = dict[int, list[Any]]()
    for part in records_of(config, [str(path)], prf):
        if isinstance(part, Records):
            assert part.ids is not None
            rows = zip(part.rows, part.at.tolist(), part.usable, part.ids.tolist(), strict=True)
            together |= {int(row): rest for row, *rest in rows}
    assert sorted(together) == [row for row in range(30) if row != 4]
    for row in range(30):
        one = write(tmp_path / "one.parquet", {k: [v[row]] for k, v in columns.items()})
        records = [p for p in records_of(config, [str(one)], prf) if isinstance(p, Records)]
        alone = [
            [*r.at.tolist(), *r.usable, *required(r.ids, "a table of ids").tolist()]
            for r in records
            if len(r.rows)
        ]
        assert alone == ([] if row == 4 else [together[row]])


def test_positions_of_letters(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("ride,hour\nr1,1\n\nr2,1,1\n")
    with pytest.raises(UsageError, match="column 'budget'"):
        list(records_of(config_at(tmp_path), [str(tmp_path / "a.csv")], None))
    config = config_at(tmp_path)
    id_parts = list(ids_of(config, [str(tmp_path / "a.csv")], Prf(b"1" * 32)))
    assert sorted((int(r), bool(g)) for _, rows, _, given in id_parts
                  for r, g in zip(rows, given, strict=True)) == [(0, True), (1, False)]  # fmt: skip
    write(tmp_path / "b.parquet", rides(3) | {"hour": [1, 55, 2]})
    path = str(tmp_path / "b.parquet")
    letters = [p for p in records_of(config, [path, path], None) if isinstance(p, Letters)]
    assert [(p.file, p.rows.tolist(), p.reasons) for p in letters] == [
        (0, [1], ["hour"]), (1, [1], ["hour"]),
    ]  # fmt: skip


def test_the_first_dimension_that_refuses_is_told(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", rides(1) | {"hour": [55], "budget": [-1.0]})
    parts = records_of(config_at(tmp_path), [str(tmp_path / "b.parquet")], None)
    assert [p.reasons for p in parts if isinstance(p, Letters)] == [["hour"]]


def test_files_of_a_pattern(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv"):
        (tmp_path / name).write_text("")
    assert [Path(p).name for p in files_of(str(tmp_path / "*.csv"), "file")] == ["a.csv", "b.csv"]
    (tmp_path / "c.csv").mkdir()
    for pattern in ("*.csv", "*.parquet"):
        with pytest.raises(UsageError, match="matches no file"):
            files_of(str(tmp_path / pattern), "file")


def test_compressed_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_text("ride,secret7\n1,2\n")
    (tmp_path / "b.parquet").write_bytes(b"\x1f\x8bsecret7")
    for name in ("a.csv.gz", "b.parquet"):
        with pytest.raises(UsageError) as caught:
            list(parts_of(str(tmp_path / name), ["ride"]))
        assert "secret7" not in str(caught.value)
