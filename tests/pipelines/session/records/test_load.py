"""Files become coordinates and parts: loaded, replaced, deleted, and refused."""

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import RunError, UsageError, required
from dpstream.accounting.regions.space import Budget, Category, Integer, Real, Timestamp
from dpstream.accounting.sessions.table import AnyDimension
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.pipelines.project.dialect import PLAIN
from dpstream.pipelines.session.config import Config
from dpstream.pipelines.session.records import load
from dpstream.pipelines.session.records.load import Loaded, add, delete, init, replace, tidied
from dpstream.pipelines.session.records.manifest import MANIFEST, read_manifest
from dpstream.pipelines.session.records.parts import reading
from dpstream.pipelines.session.records.reading import (
    Letters,
    Records,
    coordinates,
    files_of,
    ids_of,
    parts_of,
    records_of,
)
from dpstream.pipelines.session.records.scan import Scan
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.session.tables import DAY, START, at_of, config_at, rides, without_ids, write

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
        (TIME, pa.array(["2024-01-02T23:00:00-02:00", "2024-01-02", "x"]), [2, 1, 3]),
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


def test_compressed_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_text("ride,secret7\n1,2\n")
    (tmp_path / "b.parquet").write_bytes(b"\x1f\x8bsecret7")
    for name in ("a.csv.gz", "b.parquet"):
        with pytest.raises(UsageError) as caught:
            list(parts_of(str(tmp_path / name), ["ride"], PLAIN))
        assert "secret7" not in str(caught.value)


def stored(config: Config) -> list[tuple[Any, ...]]:
    """Usable records in the parts, sorted."""
    manifest = read_manifest(config.folder, config.table)
    names = [f"x{i}" for i in range(len(config.table.dimensions))]
    rows = [pq.read_table(path) for path in manifest.paths(config.folder)]
    records = [row for table in rows for row in table.filter(table["usable"]).to_pylist()]
    return sorted(tuple(row[name] for name in names) for row in records)


def wanted(*record_sets: dict[str, Any]) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for records in record_sets for row in at_of(records).tolist())


def rows_at(records: dict[str, Any], at: Any) -> dict[str, Any]:
    """Some of the records."""
    return {name: np.asarray(column)[at].tolist() for name, column in records.items()}


def letters(loaded: Loaded) -> list[tuple[str, int, str]]:
    """The dead letters: (name of the file, row, reason)."""
    assert loaded.dead_letter is not None
    rows = pq.read_table(loaded.dead_letter).to_pylist()
    return [(os.path.basename(row["file"]), row["row"], row["reason"]) for row in rows]


def made(folder: Path, count: int = 20) -> tuple[Config, dict[str, Any]]:
    records = rides(count)
    write(folder / "rides-1.parquet", records)
    config = config_at(folder)
    init(config)
    return config, records


def test_records_become_coordinates(tmp_path: Path) -> None:
    config, records = made(tmp_path)
    assert stored(config) == wanted(records)


def text_files(folder: Path, records: dict[str, Any]) -> dict[str, Path]:
    """The same records in every form."""
    rows = [dict(zip(records, row, strict=True)) for row in
            zip(*(np.asarray(c).tolist() for c in records.values()), strict=True)]  # fmt: skip
    stamped = [
        row | {"time": str(np.datetime64(row["time"], "us")) + "Z"} for row in rows
    ]  # fmt: skip
    csv = ",".join(records) + "\n" + "".join(",".join(map(str, r.values())) + "\n" for r in stamped)
    lines = "".join(json.dumps(row) + "\n" for row in stamped)
    typed = records | {
        "hour": np.asarray(records["hour"]).astype(np.int8),
        "time": pa.array(np.asarray(records["time"]) * 1000).cast(pa.timestamp("ns", "UTC")),
        "vendor": pa.array(records["vendor"]).dictionary_encode(),
        "x": pa.array([str(x) for x in np.asarray(records["x"]).tolist()]),
        "budget": pa.array(np.asarray(records["budget"]).tolist()).cast(pa.decimal128(9, 2)),
    }
    out = {name: folder / f"rides-{name}" for name in ("1.csv", "1.jsonl", "1.csv.gz")}
    out["1.csv"].write_text(csv)
    out["1.jsonl"].write_text(lines)
    out["1.csv.gz"].write_bytes(gzip.compress(csv.encode()))
    return out | {"1.parquet": write(folder / "rides-1.parquet", typed)}


@pytest.mark.parametrize("name", ["1.csv", "1.jsonl", "1.csv.gz", "1.parquet"])
def test_every_kind_of_file_gives_the_same(tmp_path: Path, name: str) -> None:
    records = rides(60, seed=5)
    text_files(tmp_path, records)
    config = config_at(tmp_path, records=f"rides-{name}")
    loaded = init(config)
    assert stored(config) == wanted(records)
    assert (loaded.records, loaded.taken, loaded.refused) == (60, 60, {})


def test_what_is_null_or_outside(tmp_path: Path) -> None:
    good = rides(6)
    records = {name: np.asarray(column).tolist() for name, column in good.items()}
    records["hour"][0] = 24  # refused
    records["hour"][1] = None
    records["x"][2] = float("nan")  # their own point
    records["x"][3] = float("inf")
    records["budget"][4] = None  # no budget, never used
    records["budget"][5] = -1.0
    write(tmp_path / "rides-1.parquet", records)
    config = config_at(tmp_path)
    loaded = init(config)
    at = at_of(rows_at(good, [2, 3]))
    at[:, 1] = 20
    assert stored(config) == sorted(map(tuple, at.tolist()))
    assert loaded.refused == {"epsilon": 2, "hour": 2}
    assert (loaded.records, loaded.usable) == (6, 2)
    assert [letter[1:] for letter in letters(loaded)] == [
        (0, "hour"), (1, "hour"), (4, "epsilon"), (5, "epsilon"),
    ]  # fmt: skip
    # Nothing of an unusable record is kept but that it is there.
    manifest = read_manifest(config.folder, config.table)
    [bad] = [part for part in manifest.parts if not part.usable]
    rows = pq.read_table(config.folder / bad.name)
    assert not any(rows["usable"].to_pylist())
    assert all(not any(rows[f"x{i}"].to_pylist()) for i in range(6))


def test_malformed_lines_stop_nobody(tmp_path: Path) -> None:
    records = rides(3)
    path = text_files(tmp_path, records)["1.csv"]
    lines = path.read_text().splitlines()
    lines[2:2] = ['r9,"5', "a,b", "", "r8," + "x" * 2_000_000]
    path.write_text("\n".join(lines) + "\n")
    config = config_at(tmp_path, records="rides-1.csv")
    loaded = init(config)
    assert stored(config) == wanted(records)
    assert letters(loaded) == [
        ("rides-1.csv", 1, "malformed"), ("rides-1.csv", 2, "field_count"),
        ("rides-1.csv", 3, "line_too_long"),
    ]  # fmt: skip


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "rides-0.parquet").write_bytes(b"no parquet")
    records = rides(3)
    write(tmp_path / "rides-1.parquet", records)
    config = config_at(tmp_path)
    loaded = init(config)
    assert loaded.refused == {"unreadable_file": 1} and stored(config) == wanted(records)


def test_ids_that_are_missing_or_there_twice(tmp_path: Path) -> None:
    records = rides(5)
    records["ride"] = ["a", None, "b", "a", "c"]
    write(tmp_path / "rides-1.parquet", records)
    write(tmp_path / "rides-2.parquet", rides(2) | {"ride": ["c", "d"]})
    config = config_at(tmp_path)
    loaded = init(config)
    assert letters(loaded) == [
        ("rides-1.parquet", 1, "missing_id"), ("rides-1.parquet", 3, "duplicate_id"),
        ("rides-2.parquet", 0, "duplicate_id"),
    ]  # fmt: skip
    assert stored(config) == wanted(rows_at(records, [0, 2, 4]), rows_at(rides(2), [1]))
    loaded = add(config, [write(tmp_path / "m.parquet", rides(3, seed=8) | {"ride": list("bee")})])
    assert loaded.refused == {"duplicate_id": 2} and loaded.taken == 1 and loaded.version == 2


def test_numbers_and_texts_are_one_id(tmp_path: Path) -> None:
    records = rides(3) | {"ride": [1, 2, 3]}
    write(tmp_path / "rides-1.parquet", records)
    config = config_at(tmp_path)
    init(config)
    assert delete(config, [write(tmp_path / "gone.parquet", {"ride": ["2"]})]).taken == 1
    assert stored(config) == wanted(rows_at(records, [0, 2]))
    (tmp_path / "gone.csv").write_text("ride\n3\n")
    assert delete(config, [tmp_path / "gone.csv"]).taken == 1


def test_records_are_replaced(tmp_path: Path) -> None:
    config, records = made(tmp_path)
    new = rides(4, seed=9) | {"ride": ["r3", "r5", "r99", "r7"]}
    new["hour"] = [5, 77, 5, 6]  # the second is not usable: the old one goes too
    loaded = replace(config, [write(tmp_path / "new.parquet", new)])
    assert loaded.refused == {"hour": 1, "unknown_id": 1}
    assert (loaded.version, loaded.records, loaded.usable, loaded.taken) == (2, 20, 19, 3)
    remaining = [i for i in range(20) if i not in (3, 5, 7)]
    assert stored(config) == wanted(rows_at(records, remaining), rows_at(new, [0, 3]))
    # What is not usable is there by its id still.
    back = rows_at(records, [5])
    assert replace(config, [write(tmp_path / "back.parquet", back)]).usable == 20
    assert stored(config) == wanted(rows_at(records, [*remaining, 5]), rows_at(new, [0, 3]))


def test_records_are_deleted(tmp_path: Path) -> None:
    config, records = made(tmp_path)
    [before] = read_manifest(config.folder, config.table).parts
    gone = {"ride": ["r0", "r19", "r0", None, "r77"]}
    loaded = delete(config, [write(tmp_path / "gone.parquet", gone)])
    assert (loaded.taken, loaded.records, loaded.tidied) == (2, 18, True)
    assert [letter[1:] for letter in letters(loaded)] == [
        (2, "duplicate_id"), (3, "missing_id"), (4, "unknown_id"),
    ]  # fmt: skip
    assert stored(config) == wanted(rows_at(records, range(1, 19)))
    assert not (config.folder / before.name).exists()
    everybody = {"ride": [f"r{i}" for i in range(1, 19)]}
    assert delete(config, [write(tmp_path / "all.parquet", everybody)]).records == 0
    assert not list(config.folder.glob("part-*")) and stored(config) == []


def test_parts_are_divided_and_only_those_that_change_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "PART_ROWS", 10)
    for k in range(4):
        write(tmp_path / f"rides-{k}.parquet", rides(10, seed=k, first=10 * k))
    config = config_at(tmp_path)
    init(config)
    before = read_manifest(config.folder, config.table).parts
    assert [part.rows for part in before] == [10, 10, 10, 10]
    delete(config, [write(tmp_path / "gone.parquet", {"ride": ["r25"]})])
    after = read_manifest(config.folder, config.table).parts
    assert [one == other for one, other in zip(before, after, strict=True)] == [1, 1, 0, 1]


def test_everything_is_private_and_names_nobody(tmp_path: Path) -> None:
    records = rides(5) | {"ride": [f"person-{i}" for i in range(5)]}
    records["hour"] = [99] * 5
    write(tmp_path / "rides-1.parquet", records)
    config = config_at(tmp_path)
    before = os.umask(0)
    try:
        init(config)
        with Scan(config.folder, config.table):
            pass
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in config.folder.rglob("*")}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items())
    assert config.folder.stat().st_mode & 0o777 == 0o700
    assert not any(b"person" in path.read_bytes() for path in modes if path.is_file())


def test_a_table_without_ids_only_grows(tmp_path: Path) -> None:
    records = rides(4)
    write(tmp_path / "rides-1.parquet", records | {"ride": ["a"] * 4})
    with_ids, config = config_at(tmp_path), without_ids(tmp_path)
    init(config)
    assert add(config, [tmp_path / "rides-1.parquet"]).records == 8
    assert stored(config) == wanted(records, records)
    calls: dict[str, Callable[[], object]] = {
        "delete by name": lambda: delete(config, [tmp_path / "rides-1.parquet"]),
        "add with names": lambda: add(with_ids, [tmp_path / "rides-1.parquet"]),
    }
    check(Path(__file__).with_name("refusals_ids.txt"), of_refusals(calls))


def test_refusals_of_files_and_tables(tmp_path: Path) -> None:
    """Before a new version is made, and without a word of the files."""
    config, _ = made(tmp_path)
    files = {
        name: tmp_path / name for name in ("absent.parquet", "rides.txt", "a.csv", "b.parquet")
    }
    files["rides.txt"].write_text("secret7")
    files["a.csv"].write_text("secret7,x\n1,2\n")
    write(files["b.parquet"], {"secret7": [1]})
    (tmp_path / "c.csv").write_text("ride,hour\nr1,1\n")
    (tmp_path / "d.csv").mkdir()
    (tmp_path / "damaged").mkdir()
    damaged, _ = made(tmp_path / "damaged")
    [part] = damaged.folder.glob("part-*")
    data = bytearray(part.read_bytes())
    data[100] ^= 4
    part.write_bytes(bytes(data))
    calls: dict[str, Callable[[], object]] = {
        "a table that is there": lambda: init(config),
        **{name: partial(add, config, [path]) for name, path in files.items()},
        "a damaged part": lambda: delete(
            damaged, [write(tmp_path / "gone.parquet", {"ride": ["r1"]})]
        ),
        "a column": lambda: list(records_of(config, [str(tmp_path / "c.csv")], None)),
        "a folder": lambda: files_of(str(tmp_path / "d.csv"), "file"),
        "no file": lambda: files_of(str(tmp_path / "*.jsonl"), "file"),
    }
    text = of_refusals(calls).replace(str(tmp_path), "FOLDER")
    check(Path(__file__).with_name("refusals_load.txt"), text)
    assert "secret7" not in text
    assert read_manifest(config.folder, config.table).version == 1


def test_parts_go_when_nobody_reads_them(tmp_path: Path) -> None:
    config, _ = made(tmp_path)
    gone = write(tmp_path / "gone.parquet", {"ride": ["r1"]})
    with reading(config.folder):
        assert not delete(config, [gone]).tidied
        assert len(list(config.folder.glob("part-*"))) == 2
        assert not tidied(config)
    assert tidied(config)
    assert len(list(config.folder.glob("part-*"))) == 1


_KILLED = """
    import os, signal, sys
    from pathlib import Path
    from dpstream.pipelines.session.records import load
    from dpstream.pipelines.session.records import parts
    from dpstream.pipelines.session.config import load_config
    def stop(*args, **more):
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "torn":
        parts.put_once = lambda path, data, mode: (
            path.with_name("." + path.name + ".0123456789abcdef.dpstream-draft").write_bytes(
                data[:50]), stop())
    elif sys.argv[2] == "parts":
        load.commit = stop
    else:
        load.tidy = stop
    config = load_config(sys.argv[1])
    load.delete(config, [Path(sys.argv[1]) / "gone.parquet"])
"""


@pytest.mark.parametrize(
    "where",
    [pytest.param("torn", marks=pytest.mark.slow), "parts",
     pytest.param("committed", marks=pytest.mark.slow)],
)  # fmt: skip
def test_kill_9_leaves_one_version_or_the_other(tmp_path: Path, where: str) -> None:
    config, records = made(tmp_path)
    write(tmp_path / "gone.parquet", {"ride": ["r1"]})
    code = textwrap.dedent(_KILLED)
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path), where], check=False)
    assert run.returncode == -signal.SIGKILL
    remaining = [i for i in range(20) if i != 1]
    after = wanted(rows_at(records, remaining))
    assert stored(config) == (after if where == "committed" else wanted(records))
    with Scan(config.folder, config.table) as scan:
        assert scan.manifest.version == (2 if where == "committed" else 1)
    # The next writer goes on, and sweeps what was left.
    assert tidied(config)
    assert len(list(config.folder.glob("*part-*"))) + len(list(config.folder.glob(".*part*"))) == 1
    if where != "committed":
        delete(config, [tmp_path / "gone.parquet"])
    assert stored(config) == after


def test_writers_wait_for_each_other(tmp_path: Path) -> None:
    config, records = made(tmp_path)
    more = {n: rides(5, seed=n, first=100 * n) for n in range(1, 7)}
    files = [write(tmp_path / f"more-{n}.parquet", rows) for n, rows in more.items()]
    with ThreadPoolExecutor(6) as pool:  # each opens the lock for itself, as processes do
        versions = {loaded.version for loaded in pool.map(lambda f: add(config, [f]), files)}
    assert stored(config) == wanted(records, *more.values())
    assert versions == {2, 3, 4, 5, 6, 7}


def test_writers_that_do_not_wait_lose_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "writing", lambda folder: contextlib.nullcontext())
    with pytest.raises((AssertionError, OSError, RunError)):
        test_writers_wait_for_each_other(tmp_path)


def test_more_records_than_sums_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    config, _ = made(tmp_path)
    monkeypatch.setattr(load, "MAX_RECORDS", 20)
    refused(lambda: add(config, [write(tmp_path / "more.parquet", rides(1, first=50))]))
    assert read_manifest(config.folder, config.table).version == 1
    assert MANIFEST in os.listdir(config.folder)
