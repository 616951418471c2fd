"""Releases: whole or not at all, and only what was released; answers as tables."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import required
from dpstream.accounting.workloads.attributes import explicit, of_values
from dpstream.accounting.workloads.workload import over, workload_of
from dpstream.pipelines.jobs.keys import domain_digest
from dpstream.pipelines.workload.estimate import Estimate, norms
from dpstream.pipelines.workload.planning import domain_text
from dpstream.pipelines.workload.release import ESTIMATE as FILE
from dpstream.pipelines.workload.release import (
    RECEIPT,
    Moment,
    Receipt,
    answers,
    check_domain,
    labelled,
    read_release,
    write_release,
    write_table,
)
from tests.golden.pinned import check, of_refusals
from tests.pipelines.workload.survey import DOMAIN, workload

MOMENTS = [Moment(0, 10, 1, 5), Moment(0, 10, 2, 10)]
RNG = np.random.default_rng(2)
ESTIMATE = Estimate(
    RNG.normal(size=(2, 10)), np.array([1.0, 3.0]), (np.triu(np.ones((5, 5))), np.eye(2))
)
_ANSWERED = "so few answers are a table"
ONE = ESTIMATE._replace(cells=ESTIMATE.cells[:1], scale=ESTIMATE.scale[:1])


def receipt() -> Receipt:
    attributes = workload().attributes
    return Receipt(
        run_id="ab" * 16, plan_hash="cd" * 16, domain=domain_text(workload()),
        domain_digest=domain_digest(attributes), workload="w", strategy="haar", mixing="m",
        mechanism="gaussian",
        epsilon=1.0, delta=1e-9, mu=0.2, contributions=1, aggregate=("n", "count"),
        insecure=False, moments=MOMENTS, files={},
    )  # fmt: skip


def written(out: Path, **changed: object) -> Receipt:
    given = msgspec.structs.replace(receipt(), **changed)
    return write_release(out, given, ESTIMATE, answers(workload(), ESTIMATE, MOMENTS), "parquet")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    made = written(tmp_path / "out")
    release = read_release(tmp_path / "out")
    assert release.receipt == made and set(made.files) == {"answers.parquet", FILE}
    assert isinstance(release.estimate, Estimate)
    assert np.array_equal(release.estimate.cells, ESTIMATE.cells)
    assert all(map(np.array_equal, release.estimate.mix, ESTIMATE.mix))
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert written(tmp_path / "out") == made and written(tmp_path / "again") == made
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == first
    assert {path.name for path in tmp_path.iterdir()} == {"out", "again"}


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    turned = [DOMAIN[0], {"name": "sex", "values": ["m", "f"]}]
    check_domain(receipt(), workload(domain=DOMAIN[::-1]))  # the order says nothing
    check_domain(written(Path("out")), workload())
    strange: dict[str, dict[str, Any]] = {
        "too few cells": {"cells": ESTIMATE.cells[:, :-1]},
        "no numbers": {"cells": ESTIMATE.cells * np.nan}, "no mix": {"mix": ()},
        "texts": {"cells": ESTIMATE.cells.astype(str)}, "no scale": {"scale": ESTIMATE.scale[:0]},
    }  # fmt: skip
    for name, other in strange.items():
        table = answers(workload(), ESTIMATE, MOMENTS)
        write_release(Path(name), receipt(), ESTIMATE._replace(**other), table, "parquet")
    written(Path("later"), format=2)
    for name in (FILE, RECEIPT):
        path = Path(f"changed {name}", name)
        written(path.parent)
        path.write_bytes(path.read_bytes().replace(b"a", b"b"))
        written(Path(f"no {name}"))
        Path(f"no {name}", name).unlink()
    folders = [*strange, "later", *(f"{s} {n}" for s in ("changed", "no") for n in (FILE, RECEIPT))]
    calls: dict[str, Callable[[], object]] = {
        **{name: partial(read_release, Path(name)) for name in folders},
        "another run": lambda: written(Path("out"), run_id="ef" * 16),
        "a file": lambda: written(Path("file")),
        "below a file": lambda: written(Path("file") / "below"),
        "another domain": lambda: check_domain(receipt(), workload(domain=turned)),
        "no table": lambda: write_table(Path("t.txt"), pa.table({})),
    }
    check(Path(__file__).with_name("refusals_release.txt"), of_refusals(calls))


def test_tables(tmp_path: Path) -> None:
    table = required(answers(workload(), ONE, MOMENTS[:1]), _ANSWERED)
    for ending in ("csv", "parquet", "arrow"):
        write_table(tmp_path / f"t.{ending}", table)
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[0].startswith('"product","age","sex","value"')
    assert len(lines) == table.num_rows + 1
    with pa.memory_map(str(tmp_path / "t.arrow")) as file:
        assert pa.ipc.open_file(file).read_all() == table
    assert pq.read_table(tmp_path / "t.parquet") == table


def test_every_release_has_its_own_error() -> None:
    query_set = workload()
    table = required(answers(query_set, ESTIMATE, MOMENTS, over_time=True), _ANSWERED)
    assert table.num_rows == 2 * query_set.queries
    sd = table.column("sd").to_numpy()
    assert np.allclose(sd[query_set.queries :], 3 * sd[: query_set.queries])
    assert np.allclose(sd[: query_set.queries], norms(query_set, ESTIMATE.mix))
    value, low, high = (table.column(n).to_numpy() for n in ("value", "low", "high"))
    assert np.allclose(high - value, 1.959964 * sd) and np.allclose(value - low, high - value)
    assert table.column("trigger").to_pylist()[-1] == 2
    assert table.column("product").to_pylist()[-1] == 2
    assert value[-1] == pytest.approx(ESTIMATE.cells[1].sum())
    once = required(answers(query_set, ONE, MOMENTS[:1]), _ANSWERED)
    assert "trigger" not in once.column_names and once.num_rows == query_set.queries


def test_values_without_negative_cells() -> None:
    query_set = workload([{"factors": {"age": "identity", "sex": "identity"}}])
    plain = required(answers(query_set, ESTIMATE, MOMENTS), _ANSWERED)
    consistent_table = required(answers(query_set, ESTIMATE, MOMENTS, consistent=True), _ANSWERED)
    assert (
        min(plain.column("value").to_pylist())
        < 0
        <= min(consistent_table.column("value").to_pylist())
    )
    assert consistent_table.select(["sd", "low", "high"]) == plain.select(["sd", "low", "high"])


def test_not_more_than_a_table_has() -> None:
    many = over([8192], ["range"])
    assert answers(many, ONE, MOMENTS[:1]) is None


def test_in_the_order_of_the_answers() -> None:
    query_set = workload()
    columns = {name: column.to_pylist() for name, column in labelled(query_set).items()}
    assert list(columns) == ["product", "age", "sex"]
    assert {len(column) for column in columns.values()} == {query_set.queries}
    rows = list(zip(*columns.values(), strict=True))
    assert rows[:3] == [(0, "[0, 10)", "f"), (0, "[0, 10)", "m"), (0, "[0, 20)", "f")]
    assert (0, "[40, 65.5)", "m") in rows and rows[-1] == (2, "all", "all")
    assert rows[-2] == (1, "[0, 80)", "all")


def test_values_matrices_and_names_that_are_taken() -> None:
    attribute = of_values("value", ["x", "y", "z"])
    queries = [(1.0, {0: explicit(np.eye(3)[:2], 3)})]
    columns = labelled(workload_of([attribute], queries))
    assert columns["value_"].to_pylist() == ["row 0", "row 1"]
    texts = labelled(over([3], ["prefix"]))["0"].to_pylist()
    assert texts == ["0", "0 .. 1", "0 .. 2"]
