"""Records into a table: what is taken, refused, replaced and deleted, and what a crash leaves."""

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.pipelines.session.config import Config
from dpstream.pipelines.session.records import load
from dpstream.pipelines.session.records.load import Loaded, add, delete, init, replace, tidied
from dpstream.pipelines.session.records.manifest import MANIFEST, read_manifest
from dpstream.pipelines.session.records.parts import reading
from dpstream.pipelines.session.records.scan import Scan
from tests.pipelines.session.tables import at_of, config_at, rides, without_ids, write


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
    with pytest.raises(UsageError, match="no record has a name"):
        delete(config, [tmp_path / "rides-1.parquet"])
    with pytest.raises(PolicyError, match="not what the table was made with"):
        add(with_ids, [tmp_path / "rides-1.parquet"])


def test_refusals_of_whole_files(tmp_path: Path) -> None:
    config, _ = made(tmp_path)
    with pytest.raises(PolicyError, match="holds a table already"):
        init(config)
    with pytest.raises(UsageError, match="matches no file"):
        add(config, [tmp_path / "absent.parquet"])
    (tmp_path / "rides.txt").write_text("secret7")
    with pytest.raises(UsageError, match="of no known kind"):
        add(config, [tmp_path / "rides.txt"])
    for name in ("a.csv", "b.parquet"):
        path = tmp_path / name
        if name == "a.csv":
            path.write_text("secret7,x\n1,2\n")
        else:
            write(path, {"secret7": [1]})
        with pytest.raises(UsageError, match="is not, or not just once") as caught:
            add(config, [path])
        assert "secret7" not in str(caught.value)
    assert read_manifest(config.folder, config.table).version == 1


def test_a_damaged_part_is_not_written_anew(tmp_path: Path) -> None:
    config, _ = made(tmp_path)
    [part] = config.folder.glob("part-*")
    data = bytearray(part.read_bytes())
    data[100] ^= 4
    part.write_bytes(bytes(data))
    with pytest.raises(RunError, match="not as it was written"):
        delete(config, [write(tmp_path / "gone.parquet", {"ride": ["r1"]})])


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


def test_more_records_than_sums_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = made(tmp_path)
    monkeypatch.setattr(load, "MAX_RECORDS", 20)
    with pytest.raises(RunError, match="are more than 20"):
        add(config, [write(tmp_path / "more.parquet", rides(1, first=50))])
    assert read_manifest(config.folder, config.table).version == 1
    assert MANIFEST in os.listdir(config.folder)
