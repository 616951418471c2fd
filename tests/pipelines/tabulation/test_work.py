"""Files become tables: every cell equals that of an oracle, and one record changes few counts."""

import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import apache_beam as beam
import msgspec
import numpy as np
import pytest

from dpstream.accounting.tabulation.parameters import Parameters
from dpstream.dp_transforms.batches import ArrowBatchCoder
from dpstream.dp_transforms.noise.inputs import combined
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.tabulation.expand import Records
from dpstream.pipelines.tabulation import flow
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.flow import Count, Task, build
from dpstream.pipelines.tabulation.generate import Size
from dpstream.pipelines.tabulation.inputs import Prepared, load, prepared, prepared_of, records_path
from dpstream.pipelines.tabulation.private import pieces, read_records
from dpstream.pipelines.tabulation.public_files import TOTALS
from dpstream.pipelines.tabulation.work import (
    Tally,
    counted,
    counts_digest,
    finished,
    pairs_of,
    parts_of,
)
from tests.pipelines.tabulation.office import KEY, Office, office, order
from tests.pipelines.tabulation.oracle import CELLS, Oracle, age_rows, published
from tests.pipelines.test_coders import UNPICKLED
from tests.pipelines.test_coders import parts_of as coders_of

_STATES = ["01", "02", "72"]


def with_budget(made: Office, program: Any, budget: float, **changed: Any) -> Prepared:
    """An office whose budgets are other than a file may have."""
    loaded = load(made.parameters, made.data, Choice(program))
    parameters = loaded.parameters
    values = {name: getattr(parameters, name) for name in parameters.__struct_fields__}
    values["budgets"] = {
        table: dict.fromkeys(levels, budget) for table, levels in parameters.budgets.items()
    }
    return prepared_of(loaded._replace(parameters=Parameters(**values | changed)), "")


def tables(prepared: Prepared, made: Office, out: Path, run_id: str = "5a" * 16) -> Path:
    """Make the tables of an office in a folder."""
    path = records_path(made.data, prepared.plan.parameters.program)
    tally = counted(prepared, read_records(path, prepared.lookup, None))
    with KeyRing(bytearray.fromhex(KEY)) as keys:
        parts = parts_of(prepared)
        pairs = {part.number: pairs_of(prepared, tally, part) for part in parts}
        inputs = combined(counts_digest(prepared, p, pairs[p.number], keys) for p in parts)
        for part in parts:
            for file in finished(prepared, part, pairs[part.number], keys, run_id, inputs):
                (out / file.name).parent.mkdir(parents=True, exist_ok=True)
                (out / file.name).write_bytes(file.content)
    return out


#: A code that belongs to no iteration: whoever has it is in no group alone.
NOBODY = "9998"


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Office:
    """An office with groups of every detail, and records with a code of no iteration."""
    made = office(tmp_path_factory.mktemp("larger"), Size(persons=4_000, seed=3))
    made.spoil("race-and-ethnicity-codes.txt", lambda lines: [*lines, f"{NOBODY}|Nobody"])
    for name in ("person-records.txt", "household-records.txt"):
        columns = made.path(name).read_text().splitlines()[0].split("|")
        places = [columns.index(column) for column in ("QRACE1", "QRACE2", "QSPAN")]

        def change(lines: list[str], places: list[int] = places) -> None:
            for number, place in enumerate(places):
                for row in range(1 + number, len(lines), 40):
                    fields = lines[row].split("|")
                    fields[place] = NOBODY
                    lines[row] = "|".join(fields)

        made.spoil(name, change)
    assert made.faults() == []
    return made


@pytest.fixture(scope="module")
def persons(larger: Office, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exact tables of its persons."""
    prepared = with_budget(larger, "p", math.inf, zero_suppression=0.99)
    return tables(prepared, larger, tmp_path_factory.mktemp("persons"))


def details_of(total: int, steps: tuple[float, ...]) -> int:
    return sum(total >= step for step in steps)


def test_without_noise_every_cell_of_persons_is_the_oracle_s(larger: Office, persons: Path) -> None:
    parameters = load(larger.parameters, larger.data, Choice("p")).parameters
    steps = {(level.region_type, str(level.iteration_level)): thresholds
             for level, thresholds in parameters.thresholds["t1t2"].items()}  # fmt: skip
    oracle = Oracle(larger, "p", _STATES)
    totals = oracle.totals()
    t1 = published(persons / "t1")
    assert t1 == oracle.exact_t1() and len(t1) < len(totals)
    ages = {bins: oracle.ages(bins) for bins in (4, 9, 23)}
    wanted, seen = dict[tuple[str, ...], int](), set[int]()
    for key, (total, level, only) in totals.items():
        detail = 0 if only else details_of(total, steps[key[1], level])
        seen.add(detail)
        if detail:
            bins = (4, 9, 23)[detail - 1]
            wanted |= {(*key, *row): ages[bins].get((*key, *row), 0) for row in age_rows(bins)}
    assert published(persons / "t2") == wanted
    assert seen == {0, 1, 2, 3}


def test_without_noise_every_cell_of_households_is_the_oracle_s(
    larger: Office, persons: Path, tmp_path: Path
) -> None:
    """Groups of DETAILED_ONLY iterations and of regions without a block are tabulated too."""
    own, totals = Office(larger.parameters, tmp_path / "data"), tmp_path / "data" / TOTALS
    shutil.copytree(larger.data, own.data)
    totals.mkdir()
    for path in sorted((persons / "t1").glob("*.csv")):  # every third group is not published
        head, *rows = path.read_text().splitlines(keepends=True)
        (totals / path.name).write_text(head + "".join(r for i, r in enumerate(rows) if i % 3))
    code = own.path("race-characteristic-iterations.txt").read_text().splitlines()[-1][:4]
    empty = [f"01999|COUNTY|{code}|70", f"0199998|PLACE|{code}|-3", f"72999|PR-COUNTY|{code}|900"]
    skipped = [f"55|STATE|{code}|9", f"55|PLACE|{code}|9", f"8888|AIANNH|{code}|9"]
    (totals / "more.csv").write_text("\n".join([head.strip(), *empty, *skipped]) + "\n")
    out = tables(with_budget(own, "h", math.inf), own, tmp_path / "homes")
    oracle = Oracle(own, "h", _STATES)
    config = json.loads(own.path("config.json").read_text())
    only = {key[2] for key, row in oracle.totals().items() if row[2]}
    for table, details in CELLS.items():
        wanted = oracle.households(table, totals, config[f"thresholds_h_{table}"])
        number = table.removeprefix("t")
        detail_tables = [
            published(out / table / f"T0{number}00{d + 1}") for d in range(len(details))
        ]
        assert detail_tables == wanted
        assert all(detail_tables) and any(key[2] in only for key in detail_tables[-1])
        groups = {key[:3] for rows in detail_tables for key in rows}
        assert {tuple(row.split("|")[:3]) for row in empty} <= groups


def audited(prepared: Prepared, path: Path, sample: int) -> int:
    """What each record alone adds; the most groups of a level that one of them is in.

    Each record is given regions of its own in place of those that it is in, so one pass tells what
    every one adds.

    Raises:
        AssertionError: one adds more than one to a group, or is in two cells of it.
    """
    tables_, most, seen = prepared.plan.parameters.tables, 0, 0
    for batch in read_records(path, prepared.lookup, None):
        count = min(len(batch), sample - seen)
        own = np.arange(count)
        apart = prepared.domain._replace(
            regions_of={
                kind: np.where(of[batch.block[:count]] >= 0, own, -1).astype(np.int32)
                for kind, of in prepared.domain.regions_of.items()
            }
        )
        leaf = {name: column[:count] for name, column in batch.leaf.items()}
        tally = Tally(apart, tables_)
        tally.add(Records(own.astype(np.int32), batch.codes[:count], leaf))
        for place, level in enumerate(prepared.domain.levels):
            for number, table in enumerate(tables_):
                pairs = tally.of(number, place)
                groups = pairs.keys // table.leaves
                assert (pairs.counts == 1).all() and len(np.unique(groups)) == len(groups)
                many = np.bincount(groups // len(level.iterations), minlength=1)
                assert many.max() <= level.stability.groups
                most = max(most, int(many.max()))
        seen += count
    assert seen == sample
    return most


def test_a_record_changes_at_most_s_groups_of_a_level_and_one_cell_each(larger: Office) -> None:
    """Counts are sums over records, so what a record alone adds is what its removal takes away."""
    prepared = with_budget(larger, "p", 1.0)
    path = records_path(larger.data, "p")
    assert 2 < audited(prepared, path, 4_000) <= 9
    tally = counted(prepared, read_records(path, prepared.lookup, None))
    singles = Tally(prepared.domain, prepared.plan.parameters.tables)
    for batch in read_records(path, prepared.lookup, None):
        for rows in np.array_split(np.arange(len(batch)), 40):
            leaf = {name: column[rows] for name, column in batch.leaf.items()}
            singles.add(type(batch)(batch.block[rows], batch.codes[rows], leaf))
    for place in range(len(prepared.domain.levels)):
        a, b = tally.of(0, place), singles.of(0, place)
        assert (a.keys == b.keys).all() and (a.counts == b.counts).all()


@pytest.mark.parametrize("program", ["p", "h"])
def test_ten_thousand_records_change_at_most_s_groups(program: str, tmp_path: Path) -> None:
    made = office(tmp_path / "office", Size(persons=10_000 if program == "p" else 25_000, seed=9))
    if program == "h":
        exact = with_budget(made, "p", math.inf)
        shutil.copytree(tables(exact, made, tmp_path / "p") / "t1",
                        made.data / "pop-group-totals.txt")  # fmt: skip
    prepared = with_budget(made, program, 1.0)
    assert 4 < audited(prepared, records_path(made.data, program), 10_000) <= 9


def test_what_is_published_of_whom_does_not_depend_on_the_records(
    larger: Office, spoilt: Office, tmp_path: Path
) -> None:
    """The same files, rows of t1 and columns, whoever is counted."""
    for name in ("GRF-C.txt", "race-and-ethnicity-codes.txt"):
        shutil.copy(larger.path(name), spoilt.path(name))
    rows = []
    for number, count in enumerate((0, 1, 4_000)):
        head, *lines = larger.path("person-records.txt").read_text().splitlines(keepends=True)
        spoilt.path("person-records.txt").write_text(head + "".join(lines[:count]))
        out = tables(
            with_budget(spoilt, "p", 0.5, zero_suppression=0.0), spoilt, tmp_path / str(number)
        )
        rows.append({
            path.relative_to(out).as_posix(): [line.rpartition("|")[0] for line in
                                               path.read_text().splitlines()]
            for path in sorted((out / "t1").glob("*.csv"))
        })  # fmt: skip
    assert rows[0] == rows[1] == rows[2] and len(rows[0]) > 10


_SECRET = "7d" * 32


def task_of(made: Office, folder: Path) -> Task:
    (folder / "noise.secret").write_text(_SECRET + "\n")
    (folder / "noise.secret").chmod(0o600)
    inputs = order(made, folder / "out").inputs
    keys = SecretSource(f"file:{folder}/noise.secret")
    return Task(inputs, "5a" * 16, str(folder / "draft"), str(folder / "letters"), keys)


def built(task: Task) -> Any:
    pipeline = beam.Pipeline()
    parts = len(parts_of(prepared(task.inputs)))
    build(pipeline, task, pieces(task.inputs.records, 2_000), parts)
    return pipeline.to_runner_api(return_context=True)


def strange(task: Task) -> list[str]:
    """Collections that are neither batches nor of a coder that is known."""
    proto, context = built(task)
    out = []
    for transform in proto.components.transforms.values():
        for name in transform.outputs.values():
            if not transform.subtransforms and "/ReshufflePerKey/" not in transform.unique_name:
                coder = context.coders.get_by_id(proto.components.pcollections[name].coder_id)
                if not all(isinstance(part, UNPICKLED) for part in coders_of(coder)):
                    out.append(transform.unique_name)
    return out


def test_counts_travel_as_batches(
    made: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(made, tmp_path)
    assert ArrowBatchCoder in UNPICKLED and strange(task) == []
    monkeypatch.setattr(flow, "Routed", Any)
    assert strange(task)  # a lost type is found


def test_neither_key_nor_record_is_in_the_pipeline(made: Office, tmp_path: Path) -> None:
    task = task_of(made, tmp_path)
    proto = built(task)[0].SerializeToString() + pickle.dumps(task)
    assert _SECRET.encode() not in proto and bytes.fromhex(_SECRET) not in proto
    rows = made.path("person-records.txt").read_bytes().splitlines()[1:]
    assert not any(row in proto for row in rows)
    assert len(proto) < 1 << 20  # nor the groups: workers find them in the public files


def test_what_pieces_hand_over_is_a_count_of_groups_for_every_part(
    made: Office, tmp_path: Path
) -> None:
    task = task_of(made, tmp_path)
    prepared_run = prepared(task.inputs)
    parts = parts_of(prepared_run)
    sums = dict.fromkeys((part.number for part in parts), 0)
    for piece in pieces(task.inputs.records, 2_000):
        for number, batch in Count(task).process(msgspec.json.encode(piece).decode()):
            leaves = prepared_run.plan.parameters.tables[parts[number].table].leaves
            groups = batch.column("key").to_numpy() // leaves
            shard = parts[number].shard
            assert shard.first <= groups.min() and groups.max() < shard.last
            sums[number] += int(batch.column("count").to_numpy().sum())
    assert sum(sums.values()) > 1_000


def test_a_missing_file_fails_with_its_name_alone(made: Office, tmp_path: Path) -> None:
    task = task_of(made, tmp_path)
    gone = pieces(task.inputs.records)[0]._replace(path=str(tmp_path / "gone.txt"))
    with pytest.raises(Exception) as failed:
        list(Count(task).process(msgspec.json.encode(gone).decode()))
    assert "gone.txt" in str(failed.value) and str(tmp_path) not in str(failed.value)
