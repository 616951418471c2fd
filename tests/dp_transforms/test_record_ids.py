"""Records that an id names: wherever and however often they are delivered, they count once."""

from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from accounting.errors import UsageError
from accounting.plan import Field, Plan
from dp_transforms.flow import run_in_memory
from dp_transforms.records import Canonicaliser
from state import open as stores
from tests.streams import COUNT, KEYS, SUM, UNITS, begin, by_name, generate, make_plan, positioned


def plan_with_ids(**options: object) -> Plan:
    plan = make_plan(triggers=6, aggregates=(COUNT, SUM, UNITS), **options)  # type: ignore[arg-type]
    return msgspec.structs.replace(plan, record_id=Field("id", "bytes")).check()


def table(plan: Plan, seed: int = 5) -> pa.Table:
    """The records of a stream as one table with an id for each, unique within its unit only."""
    batches = generate(plan, seed, records=400, users=150, keys=30).batches(1000)
    rows = pa.Table.from_batches([b.replace_schema_metadata(None) for b in batches])
    seen: dict[str, int] = {}
    ids = []
    for user in rows["user"].to_pylist():
        seen[user] = seen.get(user, 0) + 1
        ids.append(seen[user].to_bytes(16, "big"))
    return rows.append_column("id", pa.array(ids, pa.binary()))


def delivered(rows: pa.Table, seed: int | None) -> list[pa.RecordBatch]:
    """The rows in batches; with a seed in any order, each 1 to 3 times, at other positions."""
    if seed is not None:
        rng = np.random.default_rng(seed)
        order = np.repeat(np.arange(rows.num_rows), rng.integers(1, 4, rows.num_rows))
        rows = rows.take(pa.array(rng.permutation(order)))
    size = 64 if seed is None else int(np.random.default_rng(seed).integers(1, 200))
    out = []
    for number, batch in enumerate(rows.combine_chunks().to_batches(max_chunksize=size)):
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        out.append(positioned(columns, number, 10_000 * (seed or 0)))
    return out


def released(plan: Plan, batches: list[pa.RecordBatch], path: Path) -> dict[tuple[int, int], bytes]:
    out = by_name(run_in_memory(begin(plan, path), batches)[0])
    stores.close_all()
    return out


@pytest.mark.parametrize("options", [{}, {"mode": "rounds"}], ids=["sticky", "rounds"])
def test_positions_do_not_matter(tmp_path: Path, options: dict[str, object]) -> None:
    if options:
        plan = make_plan(triggers=6, aggregates=(COUNT, SUM), **options)  # type: ignore[arg-type]
        plan = msgspec.structs.replace(plan, record_id=Field("id", "bytes")).check()
    else:
        plan = plan_with_ids()
    rows = table(plan)
    expected = released(plan, delivered(rows, None), tmp_path / "s.db")
    for seed in range(1, 5):
        assert released(plan, delivered(rows, seed), tmp_path / f"{seed}.db") == expected
    without = msgspec.structs.replace(plan, record_id=None)
    assert released(without, delivered(rows, 1), tmp_path / "w.db").values() != expected.values()


def test_a_restart_may_deliver_them_elsewhere(tmp_path: Path) -> None:
    plan = plan_with_ids()
    rows = table(plan)
    expected = released(plan, delivered(rows, None), tmp_path / "s.db")
    # Everything is decided and committed; other positions change nothing.
    assert released(plan, delivered(rows, 7), tmp_path / "s.db") == expected


def test_one_id_of_two_units_is_two_records() -> None:
    plan = plan_with_ids()
    rows = table(plan).slice(0, 2)
    batch = rows.set_column(5, "id", pa.array([b"x", b"x"])).combine_chunks().to_batches()[0]
    door = Canonicaliser(plan, KEYS.ring())
    records, dead = door(positioned(dict(zip(rows.schema.names, batch.columns, strict=True))))
    assert records.num_rows == 2 and dead.num_rows == 0
    assert records["offset"][0] == records["offset"][1]  # the unit tells them apart
    assert records["unit"][0] != records["unit"][1]


def test_ids_are_keyed_and_spread() -> None:
    plan = plan_with_ids()
    batch = delivered(table(plan), None)[0]
    mine, _ = Canonicaliser(plan, KEYS.ring())(batch)
    assert (np.array(mine["offset"]) >= 0).all() and (np.array(mine["partition"]) >= 0).all()
    assert len({*mine["partition"].to_pylist()}) > 1
    other, _ = Canonicaliser(plan, type(KEYS)(None, "33" * 32).ring())(batch)
    assert mine["offset"] != other["offset"]


def test_a_record_without_an_id_is_dead() -> None:
    plan = plan_with_ids()
    rows = table(plan).slice(0, 3)
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    columns["id"] = pa.array([b"a", None, b"c"])
    batch = pa.table(columns).combine_chunks().to_batches()[0]
    where = dict(zip(batch.schema.names, batch.columns, strict=True))
    records, dead = Canonicaliser(plan, KEYS.ring())(positioned(where, 4, 70))
    assert records.num_rows == 2
    assert dead.to_pylist() == [{"partition": 4, "offset": 71, "reason": "record_id"}]


def test_the_plan_knows() -> None:
    plan = plan_with_ids()
    assert plan.hash != msgspec.structs.replace(plan, record_id=None).hash
    with pytest.raises(UsageError, match="record_id"):
        msgspec.structs.replace(plan, record_id=Field("id", "bool")).check()
