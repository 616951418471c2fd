"""Releases: whole or not at all, and only what was released; answers as tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError, required
from dpstream.pipelines.jobs.keys import domain_digest
from dpstream.pipelines.workload import release as module
from dpstream.pipelines.workload.estimate import Estimate, norms
from dpstream.pipelines.workload.files import domain_text
from dpstream.pipelines.workload.release import ESTIMATE as FILE
from dpstream.pipelines.workload.release import (
    RECEIPT,
    Moment,
    Receipt,
    answers,
    check_domain,
    read_release,
    write_release,
    write_table,
)
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
    given = receipt()
    if changed:
        import msgspec

        given = msgspec.structs.replace(given, **changed)
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
    check_domain(made, workload())


def test_another_answer_stands_there(tmp_path: Path) -> None:
    written(tmp_path / "out")
    with pytest.raises(UsageError):
        written(tmp_path / "out", run_id="ef" * 16)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError):
        written(tmp_path / "file")
    with pytest.raises(RunError):
        written(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    "other",
    [{"cells": ESTIMATE.cells[:, :-1]}, {"cells": ESTIMATE.cells * np.nan}, {"mix": ()},
     {"cells": ESTIMATE.cells.astype(str)}, {"scale": ESTIMATE.scale[:0]}],
)  # fmt: skip
def test_estimates_that_do_not_fit_their_receipt(other: dict[str, Any], tmp_path: Path) -> None:
    table = answers(workload(), ESTIMATE, MOMENTS)
    write_release(tmp_path / "out", receipt(), ESTIMATE._replace(**other), table, "parquet")
    with pytest.raises(PolicyError, match="another form"):
        read_release(tmp_path / "out")


def test_receipts_of_later_programs(tmp_path: Path) -> None:
    written(tmp_path / "out", format=2)
    with pytest.raises(PolicyError, match="program that wrote it"):
        read_release(tmp_path / "out")


def test_another_domain(tmp_path: Path) -> None:
    turned = [DOMAIN[0], {"name": "sex", "values": ["m", "f"]}]
    with pytest.raises(UsageError, match="release's"):
        check_domain(receipt(), workload(domain=turned))
    check_domain(receipt(), workload(domain=DOMAIN[::-1]))  # the order says nothing


@pytest.mark.parametrize("name", [FILE, RECEIPT])
def test_a_release_that_was_changed(name: str, tmp_path: Path) -> None:
    written(tmp_path / "out")
    path = tmp_path / "out" / name
    path.write_bytes(path.read_bytes().replace(b"a", b"b"))
    with pytest.raises(PolicyError):
        read_release(tmp_path / "out")
    path.unlink()
    with pytest.raises(UsageError):
        read_release(tmp_path / "out")


@pytest.mark.parametrize("ending", ["csv", "parquet", "arrow", "txt"])
def test_tables(ending: str, tmp_path: Path) -> None:
    table = answers(workload(), ONE, MOMENTS[:1])
    assert table is not None
    path = tmp_path / f"t.{ending}"
    if ending == "txt":
        with pytest.raises(DpstreamError):
            write_table(path, table)
        return
    write_table(path, table)
    if ending == "csv":
        assert path.read_text().splitlines()[0].startswith('"product","age","sex","value"')
        assert len(path.read_text().splitlines()) == table.num_rows + 1
    elif ending == "arrow":
        with pa.memory_map(str(path)) as file:
            assert pa.ipc.open_file(file).read_all() == table


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


def test_not_more_than_a_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANSWERS", workload().queries)
    assert answers(workload(), ESTIMATE, MOMENTS) is None
