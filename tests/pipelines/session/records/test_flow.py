"""The pipeline of a batch: sums in batches, no record, and no secret in it."""

import contextlib
import hashlib
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import apache_beam as beam
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.space import Budget, Integer
from dpstream.accounting.sessions.aggregates import Cells
from dpstream.accounting.sessions.table import SessionTable
from dpstream.dp_transforms.batches import ArrowBatchCoder
from dpstream.dp_transforms.session import encoded
from dpstream.dp_transforms.session.totals import empty, gathered
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.session.records import flow, parts
from dpstream.pipelines.session.records.flow import (
    ANSWER,
    Digest,
    Gather,
    Measure,
    Release,
    Tally,
    Task,
    build,
    shards_for,
    spread,
)
from dpstream.pipelines.session.records.manifest import (
    MANIFEST,
    Manifest,
    Part,
    check_account,
    commit,
    read_manifest,
    refuse_table,
)
from dpstream.pipelines.session.records.parts import (
    budgets_of,
    checked_paths,
    ids_in,
    read_part,
    reading,
    schema_of,
    table_of,
    tidy,
    write_part,
    writing,
)
from dpstream.pipelines.session.records.scan import Scan
from dpstream.state import locks
from dpstream.state.ledger.events import packed
from dpstream.state.ledger.orders import Order, SessionRefusedError, Views
from tests import accounts
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.session.batching import CELLS, KEY, RUN, Made, here, made, secret_file
from tests.pipelines.test_coders import UNPICKLED
from tests.pipelines.test_coders import parts_of as coders_of
from tests.runners.engines import need_flink
from tests.state.ledger.region_conformance import Payer


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    return made(tmp_path, monkeypatch)


def task_of(table: Made, folder: Path, shards: int = 3) -> Task:
    (folder / "draft").mkdir(exist_ok=True)
    question = table.question()
    return Task(
        table.table, str(table.folder), question.canonical, packed(table.boxes), RUN,
        str(folder / "draft"), shards, secret_file(folder),
    )  # fmt: skip


def parts_of(table: Made) -> list[str]:
    parts = read_manifest(table.folder, table.table).usable()
    return [msgspec.json.encode(part).decode() for part in parts]


def built(task: Task, table: Made) -> Any:
    pipeline = beam.Pipeline()
    build(pipeline, task, read_manifest(table.folder, table.table).usable())
    return pipeline.to_runner_api(return_context=True)


def strange(task: Task, table: Made) -> list[str]:
    """Collections that are neither batches nor of a coder that is known."""
    proto, context = built(task, table)
    out = []
    for transform in proto.components.transforms.values():
        for name in transform.outputs.values():
            if not transform.subtransforms and "/ReshufflePerKey/" not in transform.unique_name:
                coder = context.coders.get_by_id(proto.components.pcollections[name].coder_id)
                if not all(isinstance(part, UNPICKLED) for part in coders_of(coder)):
                    out.append(transform.unique_name)
    return out


def test_sums_travel_as_batches(
    table: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(table, tmp_path)
    assert ArrowBatchCoder in UNPICKLED and strange(task, table) == []
    monkeypatch.setattr(flow, "Routed", Any)
    assert strange(task, table)  # a lost type is found


def test_neither_key_nor_record_is_in_the_pipeline(table: Made, tmp_path: Path) -> None:
    task = task_of(table, tmp_path)
    proto = built(task, table)[0].SerializeToString() + pickle.dumps(task)
    assert KEY.encode() not in proto and bytes.fromhex(KEY) not in proto
    assert len(proto) < 1 << 20


def test_the_stages_one_by_one(table: Made, tmp_path: Path, refused: Refused) -> None:
    task = task_of(table, tmp_path)
    space, question, boxes = table.table.space, task.question, table.boxes
    needs = question.needs(space, boxes)
    sums: dict[int, list[pa.RecordBatch]] = {}
    for shard in range(task.shards):
        sums[shard] = [empty(needs)]  # what every shard begins with
        assert sums[shard][0].num_rows == 0
    for part in parts_of(table):
        for shard, batch in Tally(task).process(part):
            sums[shard].append(batch)
    totals = table.totals(boxes, question.cells, needs)
    parts = [gathered(sums[n], a, b, needs) for n, (a, b) in enumerate([(0, 5), (5, 10), (10, 16)])]
    assert sum(int(t.records.sum()) for t in parts) == totals.records.sum() > 500
    measure = Measure(task)
    measure.setup()
    gathered_sums = [next(Gather(task).process((shard, sums[shard]))) for shard in (2, 0, 1)]
    digest = Digest(task)
    digest.setup()
    digests = [list(digest.process(routed)) for routed in gathered_sums]
    digest.teardown()
    measured = []
    for shard, batch in gathered_sums:
        each = [of[shard][1] for of in digests]
        measured.append(next(measure.process((shard, [each[0], batch, *each[1:]])))[1])
    # noise without a digest
    refused(lambda: next(measure.process((shard, [batch, *each[1:]]))))
    measure.teardown()
    refused(lambda: list(Release(task).process((0, measured[:2]))))
    assert not (tmp_path / "draft" / ANSWER).exists()
    assert list(Release(task).process((0, measured))) == [ANSWER]
    with task.keys.ring() as ring:
        mine = here(table, space, task.question, boxes, ring, RUN)
    assert mine.column_names[:3] == ["hour", "hour_end", "vendor"]
    assert (tmp_path / "draft" / ANSWER).read_bytes() == encoded(mine)


def test_a_part_that_is_gone_is_named_by_no_path(
    table: Made, tmp_path: Path, refused: Refused
) -> None:
    part = read_manifest(table.folder, table.table).usable()[0]
    (table.folder / part.name).unlink()
    refused(
        lambda: list(Tally(task_of(table, tmp_path)).process(msgspec.json.encode(part).decode()))
    )


DIRECT = Runner("DirectRunner")


def both(runner: Runner, table: Made, folder: Path, kind: str = "epsilon") -> tuple[bytes, bytes]:
    """The answer here, and on a runner."""
    keys, question = secret_file(folder), table.question(kind).canonical
    with keys.ring() as ring:
        bound = keys.of_run(RUN, ring.fingerprint)
        mine = here(table, table.table.space, question, table.boxes, ring, RUN)
    theirs = spread(
        runner, folder, table.folder, table.table, question, table.boxes, bound, RUN
    )  # fmt: skip
    [count] = [figure.name for figure in question.aggregates if figure.what == "count"]
    assert mine.num_rows == 16 and set(mine[count].to_pylist()) != {0.0}
    return encoded(mine), encoded(theirs)


@pytest.mark.parametrize(("kind", "shards"), [("epsilon", 1), ("epsilon", 5), ("rho", 16)])
def test_the_direct_runner_gives_the_same_bytes(
    kind: str, shards: int, table: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "shards_for", lambda *_: shards)
    mine, theirs = both(DIRECT, table, tmp_path, kind)
    assert mine == theirs
    assert not list(tmp_path.glob(".dpstream-*"))  # what workers handed over is gone


@pytest.mark.slow
def test_prism_gives_the_same_bytes(table: Made, tmp_path: Path) -> None:
    mine, theirs = both(Runner("PrismRunner"), table, tmp_path)
    assert mine == theirs


@pytest.mark.slow
def test_flink_gives_the_same_bytes(table: Made, tmp_path: Path) -> None:
    need_flink()
    mine, theirs = both(Runner("FlinkRunner", parallelism=2), table, tmp_path)
    assert mine == theirs


def test_a_scan_in_duckdb_gives_the_same_bytes(table: Made, tmp_path: Path) -> None:
    space, question, boxes = table.table.space, table.question(), table.boxes
    with Scan(table.folder, table.table) as scan, secret_file(tmp_path).ring() as ring:
        theirs = here(scan, space, question, boxes, ring, RUN)
        assert encoded(theirs) == encoded(here(table, space, question, boxes, ring, RUN))


def test_a_table_without_usable_records_has_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise alone, and the same everywhere."""
    nobody = made(tmp_path, monkeypatch, hours=99)
    assert read_manifest(nobody.folder, nobody.table).usable() == []
    mine, theirs = both(DIRECT, nobody, tmp_path)
    assert mine == theirs


def test_a_part_that_was_changed_fails_the_batch(
    table: Made, tmp_path: Path, refused: Refused
) -> None:
    part = read_manifest(table.folder, table.table).usable()[1]
    path = table.folder / part.name
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    refused(both, DIRECT, table, tmp_path)
    path.unlink()
    assert not list(tmp_path.glob(".dpstream-*"))


def test_a_batch_is_one_charge_of_each_point_or_none(table: Made, tmp_path: Path) -> None:
    """Cells are many, the amount is paid once; a cell that lacks budget refuses all of them."""
    space, full_space = table.table.space, table.table.space.everything
    account = Payer(accounts.of_records(tmp_path / "ledger.db", "rides"), table.table)

    def paid(name: str, cells: Cells, amount: int, boxes: Int64) -> Int64:
        def resolve(views: Views) -> Int64:
            return cells.inside(space, boxes)

        return account.pay(name, Order("epsilon", amount, "me", resolve)).region.read

    rich = space.box(epsilon=(1.5, None))
    read = paid("one", CELLS, 400_000, rich)
    spent = account.spent("epsilon")
    assert spent.most_in(read) == 400_000 and (CELLS.inside(space, rich) == read).all()
    assert set(spent.amounts.tolist()) == {0, 400_000}
    paid("corner", Cells(), 1_000_000, space.box(epsilon=(1.5, None), vendor=("c", None)))
    with pytest.raises(SessionRefusedError) as refused:
        paid("two", CELLS, 400_000, rich)
    assert len(refused.value.decision.lacking) > 0 and refused.value.decision.largest == 100_000
    assert account.spent("epsilon").most_in(full_space) == 1_400_000  # nothing of it was charged
    assert len(account.history()) == 2


def test_shards_are_for_the_workers_and_for_the_draws(
    table: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = table.table.space, table.question(), table.boxes
    assert shards_for(*arguments, 1) == 1 and shards_for(*arguments, 3) == 3
    assert shards_for(*arguments, 99) == 16  # no more than cells
    monkeypatch.setattr(flow, "_DRAWS", 500)
    assert 1 < shards_for(*arguments, 1) <= 16


# Parts of a table, and the manifest of each version.


ID = "1d" * 8


def parts_table(high: int = 9) -> SessionTable:
    dimensions = (Integer(name="a", low=0, high=high, missing="point"), Budget(name="e", most=1.0))
    return SessionTable(name="small", dimensions=dimensions)


TABLE = parts_table()


def manifest(*parts: Part, version: int = 1) -> Manifest:
    return Manifest(1, ID, TABLE.digest, version, "string", "00" * 32, parts)


def test_a_manifest_is_whole_or_refused(tmp_path: Path, refused: Refused) -> None:
    part_manifest = manifest(Part("ab", 3, True))
    commit(tmp_path, part_manifest)
    assert read_manifest(tmp_path, TABLE) == part_manifest
    data = (tmp_path / MANIFEST).read_bytes()
    flipped = [
        data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        for at, bit in itertools.product(range(len(data)), (1, 0x80))  # the second is no UTF-8
    ]
    for damaged in [*flipped, *(data[:size] for size in range(0, len(data), 9))]:
        (tmp_path / MANIFEST).write_bytes(damaged)
        refused(read_manifest, tmp_path, TABLE)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: tmp_path / name for name in ("empty", "other", "form", "part", "no part")}
    for folder in folders.values():
        folder.mkdir()
    commit(folders["other"], manifest())
    commit(folders["form"], Manifest(2, ID, TABLE.digest, 1, None, None, ()))
    changed, gone = (write_part(folders[name], rows(), True) for name in ("part", "no part"))
    (folders["part"] / changed.name).write_bytes(b"none")
    (folders["no part"] / gone.name).unlink()
    (tmp_path / "file").touch()
    calls: dict[str, Callable[[], object]] = {
        "no table": partial(read_manifest, folders["empty"], TABLE),
        "another table": partial(read_manifest, folders["other"], parts_table(8)),
        "another form": partial(read_manifest, folders["form"], TABLE),
        "a part that was changed": partial(read_part, folders["part"], changed),
        "a part that is gone": partial(checked_paths, folders["no part"], [gone]),
        "a file in the folder's place": lambda: writing(tmp_path / "file").__enter__(),
        "no folder": lambda: reading(tmp_path / "absent").__enter__(),
    }
    text = of_refusals(calls)
    monkeypatch.setattr(locks, "held", lambda path: contextlib.nullcontext(False))
    text += "\n" + of_refusals({"no locks": lambda: writing(tmp_path).__enter__()})
    check(Path(__file__).with_name("refusals_parts.txt"), text.replace(str(tmp_path), "FOLDER"))


def test_one_that_is_made_finds_no_table(tmp_path: Path, refused: Refused) -> None:
    refuse_table(tmp_path, "")
    commit(tmp_path, manifest())
    refused(refuse_table, tmp_path, "")


def test_a_table_has_one_account(tmp_path: Path, refused: Refused) -> None:
    own = accounts.of_records(tmp_path / "own.db")
    refused(lambda: check_account(manifest(), own.history()))
    own.name_table(ID)
    check_account(manifest(version=7), own.history())
    own.close()


SCHEMA = schema_of(TABLE.space, named=True)


def rows(count: int = 3) -> pa.Table:
    at = np.stack([np.arange(count), np.arange(count) * 100_000], axis=1)
    ids = np.arange(2 * count, dtype=np.uint64).reshape(-1, 2)
    return table_of(SCHEMA, at, True, ids)


def test_columns_are_as_narrow_as_their_dimension() -> None:
    for high, kind in ((255, pa.uint8()), (256, pa.uint16()), (65_535, pa.uint16()),
                       (65_536, pa.uint32()), ((1 << 32) - 1, pa.uint32()),
                       (1 << 32, pa.int64())):  # fmt: skip
        assert schema_of(parts_table(high).space, named=False).field("x0").type == kind
    assert schema_of(TABLE.space, named=False).names == ["x0", "x1", "usable"]


def test_a_part_is_what_was_written(tmp_path: Path) -> None:
    part = write_part(tmp_path, rows(), True)
    part_rows = read_part(tmp_path, part)
    assert part_rows.schema.equals(SCHEMA) and part_rows.equals(rows())
    assert ids_in(part_rows).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert ids_in(part_rows.slice(1)).tolist() == [[2, 3], [4, 5]]
    both = pa.concat_tables([part_rows.slice(2), part_rows.slice(0, 1)])
    assert ids_in(both).tolist() == [[4, 5], [0, 1]]
    assert checked_paths(tmp_path, [part, part]) == [str(tmp_path / part.name)] * 2


def test_records_of_a_row_group_are_in_the_order_of_their_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "GROUP_ROWS", 4)
    at = np.array([[0, 3], [1, 1], [2, 3], [3, 0], [4, 9], [5, 2]])
    ids = np.arange(12, dtype=np.uint64).reshape(-1, 2)
    given = table_of(SCHEMA, at, True, ids)
    assert budgets_of(TABLE.space) == ("x1",)
    part_rows = read_part(tmp_path, write_part(tmp_path, given, True, budgets_of(TABLE.space)))
    # Equal ones stay in their order, and nobody leaves the row group.
    assert part_rows.column("x0").to_pylist() == [3, 1, 0, 2, 5, 4]
    assert part_rows.column("x1").to_pylist() == [0, 1, 3, 3, 2, 9]
    assert ids_in(part_rows)[:, 0].tolist() == [6, 2, 0, 4, 10, 8]
    assert part_rows.schema.equals(SCHEMA)


def test_the_first_of_two_budgets_counts_before_the_second() -> None:
    rows = pa.table({"x0": [2, 1, 1, 2], "x1": [5, 7, 6, 4]})
    assert parts.ordered(rows, ("x0", "x1")).column("x1").to_pylist() == [6, 7, 4, 5]
    same = pa.table({"x0": [3, 3], "x1": [5, 4]})
    assert parts.ordered(same, ("x0",)) is same
    assert parts.ordered(rows.slice(0, 0), ("x0",)).num_rows == 0


def test_every_byte_of_a_part_counts(tmp_path: Path, refused: Refused) -> None:
    part = write_part(tmp_path, rows(), True)
    path = tmp_path / part.name
    data = path.read_bytes()
    flipped = [data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :] for at in range(0, len(data), 7)]
    for damaged in [*flipped, data[:-1]]:
        path.write_bytes(damaged)
        refused(checked_paths, tmp_path, [part])
    path.write_bytes(data)
    assert checked_paths(tmp_path, [part])


def test_a_part_is_read_once_by_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = write_part(tmp_path, rows(5), True)
    checked_paths(tmp_path, [part])
    monkeypatch.setattr(hashlib, "file_digest", None)
    checked_paths(tmp_path, [part])


def test_what_no_version_names_is_swept_when_nobody_reads(tmp_path: Path) -> None:
    with writing(tmp_path):
        old, new = write_part(tmp_path, rows(), True), write_part(tmp_path, rows(4), True)
        (tmp_path / ".x.0123456789abcdef.dpstream-draft").write_bytes(b"torn")
    new_manifest = manifest(new)
    with reading(tmp_path), reading(tmp_path):
        assert not tidy(tmp_path, new_manifest)
        assert (tmp_path / old.name).exists()
    assert tidy(tmp_path, new_manifest)
    assert not (tmp_path / old.name).exists() and (tmp_path / new.name).exists()
    with writing(tmp_path):
        assert not list(tmp_path.glob(".x.*"))


def test_nobody_has_read_yet(tmp_path: Path) -> None:
    old = write_part(tmp_path, rows(), True)
    assert tidy(tmp_path, manifest()) and not (tmp_path / old.name).exists()


def test_row_groups_know_their_bounds(tmp_path: Path) -> None:
    """Scans leave out comparisons that every record meets."""
    part = write_part(tmp_path, rows(), True)
    meta = pq.read_metadata(tmp_path / part.name)
    statistics = [meta.row_group(0).column(place).statistics for place in (0, 1)]
    assert [(s.min, s.max) for s in statistics] == [(0, 2), (0, 200_000)]
