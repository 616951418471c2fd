"""A workload, in whatever order it is written and its job names things, is charged once."""

import itertools
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.optimize import nnls

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.budget.allocation import StreamNoise, encoder_of
from dpstream.accounting.errors import required
from dpstream.accounting.limits import MIXED_BITS
from dpstream.accounting.strategies.cells.auto import auto
from dpstream.accounting.strategies.cells.bases import Even, difference_matrix, reduced
from dpstream.accounting.strategies.cells.mixing import mixed
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.workloads.attributes import explicit, of_values
from dpstream.accounting.workloads.workload import Workload, from_dict, over, workload_of
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.mixing import MixedNoise
from dpstream.dp_transforms.noise.paths import NoiseStream
from dpstream.pipelines.jobs.keys import domain_digest
from dpstream.pipelines.workload import estimate
from dpstream.pipelines.workload.estimate import (
    Estimate,
    TableEstimate,
    covariance,
    nonnegative,
    norms,
    values,
)
from dpstream.pipelines.workload.planning import domain_text
from dpstream.pipelines.workload.release import ESTIMATE as FILE
from dpstream.pipelines.workload.release import (
    RECEIPT,
    Moment,
    Receipt,
    answers,
    check_domain,
    labelled,
    of_arrays,
    read_release,
    to_arrays,
    write_release,
    write_table,
)
from tests.golden.pinned import check, of_refusals
from tests.pipelines.cli.called import call, refused
from tests.pipelines.workload.survey import DOMAIN, charges, survey, workload, write
from tests.streams import KEYS

MORE: list[Any] = [*DOMAIN, {"name": "region", "values": [3, 1, 2]}]
QUERIES: list[dict[str, Any]] = [
    {"factors": {"age": "range", "sex": "identity", "region": "prefix"}},
    {"weight": 2, "factors": {"sex": "identity", "age": "prefix"}},
    {"factors": {"region": "identity"}},
    {"factors": {}},
]


def _written(seed: int) -> dict[str, Any]:
    """The workload with its attributes, queries and factors in another order; some twice."""
    draw = random.Random(seed)
    queries = [
        {
            **query,
            "factors": dict(draw.sample(list(query["factors"].items()), len(query["factors"]))),
        }
        for query in draw.sample(QUERIES, len(QUERIES))
    ]
    at = next(i for i, query in enumerate(queries) if query.get("weight") == 2)
    if seed % 2:  # the same weight in two parts
        queries[at] = {**queries[at], "weight": 1}
        queries.append(dict(queries[at]))
    return {"queries": queries, "domain": draw.sample(MORE, 3)}


def _by_labels(table: pa.Table) -> dict[tuple[Any, ...], tuple[float, ...]]:
    names = ("age", "sex", "region")
    return {
        tuple(row[name] for name in names): (row["value"], row["sd"], row["low"], row["high"])
        for row in table.to_pylist()
    }


def test_aligned_queries_are_the_same_queries() -> None:
    cells = np.random.default_rng(1).integers(0, 9, (5, 2, 3))
    names = [attribute["name"] for attribute in MORE]
    for seed in range(12):
        query_set = workload(**_written(seed))
        order = [names.index(attribute.name) for attribute in query_set.attributes]
        flat = np.concatenate([block.ravel() for block in query_set.apply(cells.transpose(order))])
        turned = [names.index(a.name) for a in query_set.aligned.attributes]
        aligned = query_set.aligned.apply(cells.transpose(turned))
        assert (flat == np.concatenate([b.ravel() for b in aligned])[query_set.aligned_rows]).all()
        assert query_set.canonical.structure == workload(QUERIES, MORE).canonical.structure


@pytest.mark.parametrize("how", [("--mechanism", "gaussian", "--tables"), ("--over-time",), ()],
                         ids=["tables", "over time", "cells"])  # fmt: skip
def test_the_order_in_which_a_workload_is_written_costs_nothing(
    how: tuple[str, ...], tmp_path: Path
) -> None:
    survey(tmp_path, 400)
    records = pq.read_table(tmp_path / "records.parquet")
    region = pa.array([n % 3 + 1 for n in range(records.num_rows)])
    pq.write_table(records.append_column("region", region), tmp_path / "records.parquet")
    answers = list[dict[tuple[Any, ...], tuple[float, ...]]]()
    for seed in range(5):
        file = write(tmp_path / "w.json", **_written(seed))
        out = tmp_path / f"out{seed}"
        done = call("workload", "answer", file, "--project", tmp_path, "--out", out, "--cache",
                    tmp_path / "cache", "--quiet", "--json", *how)  # fmt: skip
        assert done.exit_code == 0, done.output
        report = json.loads(done.stdout)
        assert (report.get("charged") or not report.get("resumed", True)) == (seed == 0)
        table = pq.read_table(out / "answers.parquet")
        written = workload(**_written(seed))
        assert table.num_rows % written.queries == 0
        columns = [name for name in table.column_names if name in ("age", "sex", "region")]
        assert columns == [attribute.name for attribute in written.attributes]
        answers.append(_by_labels(table))
        again = call("workload", "answer", file, "--from", tmp_path / "out0", "--out",
                     tmp_path / "f.parquet")  # fmt: skip
        assert again.exit_code == 0, again.output
        assert _by_labels(pq.read_table(tmp_path / "f.parquet")).keys() == answers[0].keys()
    assert len(charges(tmp_path)) == 1 and all(one == answers[0] for one in answers)


def test_names_that_the_job_gives_cost_nothing(tmp_path: Path) -> None:
    """The aggregate's and the job's own, the order of its key, and attributes it leaves out."""
    survey(tmp_path, 300)
    project, first = tmp_path / "dpstream.toml", None
    text = project.read_text()
    given = ("workload", "answer", tmp_path / "asked.json", "--project", tmp_path, "--cache",
             tmp_path / "cache", "--quiet", "--tables")  # fmt: skip
    key = 'key = ["sex", { column = "age", type = "int" }]'
    assert key in text
    for number, (old, new) in enumerate(
        [("", ""), ("aggregate.n ", "aggregate.people "), ("[job.people]", "[job.persons]"),
         (key, 'key = [{ column = "age", type = "int" }, "sex"]'), (key, 'key = ["sex"]')]
    ):  # fmt: skip
        project.write_text(text.replace(old, new) if old else text)
        out = tmp_path / f"out{number}"
        done = call(*given, "--out", out)
        assert done.exit_code == 0, done.output
        table = pq.read_table(out / "answers.parquet")
        first = table if first is None else first
        assert table.equals(first)
        receipt = json.loads((out / "release.json").read_text())
        assert receipt["aggregate"] == ["people" if "people" in new[:18] else "n", "count"]
    assert len(charges(tmp_path)) == 1


def _different() -> list[Workload]:
    moved = [{"name": "age", "edges": [0, 10, 20, 40, 65, 80]}, *MORE[1:]]
    return [
        workload(QUERIES, MORE), workload(QUERIES[:3], MORE), workload(QUERIES, moved),
        workload([{**QUERIES[0], "weight": 3}, *QUERIES[1:]], MORE),
        workload([{"factors": {"age": "prefix", "sex": "identity", "region": "range"}},
                  *QUERIES[1:]], MORE),
        workload(QUERIES, [MORE[0], {"name": "sex", "values": ["m", "f"]}, MORE[2]]),
    ]  # fmt: skip


def test_what_differs_in_queries_or_domain_stays_another_workload() -> None:
    digests = {query_set.canonical.digest for query_set in _different()}
    assert len(digests) == len(_different())


def test_a_workload_of_more_attributes_than_a_key_has_columns(tmp_path: Path) -> None:
    """What the refusal says to write is enough: the key leaves attributes out."""
    survey(tmp_path, 200)
    records, names = pq.read_table(tmp_path / "records.parquet"), [f"a{n}" for n in range(12)]
    draw = np.random.default_rng(2)
    for name in names:
        records = records.append_column(name, pa.array(draw.integers(0, 3, records.num_rows)))
    pq.write_table(records, tmp_path / "records.parquet")
    domain = [{"name": name, "size": 3} for name in names]
    union = write(tmp_path / "u.json", [{"ways": 2}], domain)
    one = [{"factors": {"a0": "identity", "a8": "prefix"}}]
    pure = write(tmp_path / "p.json", one, [{"name": name, "size": 2} for name in names[:9]])
    project = tmp_path / "dpstream.toml"
    text, key = project.read_text(), 'key = ["sex", { column = "age", type = "int" }]'
    assert key in text
    for columns in (12, 8, 1):
        fields = (f'{{ column = "{name}", type = "int" }}' for name in names[:columns])
        project.write_text(text.replace(key, f"key = [{', '.join(fields)}]"))
        questions: list[tuple[Path, tuple[str, ...]]] = [
            (union, ()), (pure, ("--mechanism", "geometric")), (pure, ("--tables",))
        ]  # fmt: skip
        for number, (file, how) in enumerate(questions):
            words: tuple[str | Path, ...] = (
                "workload",
                "answer",
                file,
                "--project",
                tmp_path,
                "--cache",
                tmp_path / "cache",
                "--quiet",
                *how,
                "--out",
                tmp_path / f"{columns}-{number}",
            )
            if columns == 12:
                assert "may leave out attributes" in refused(*words)
                continue
            done = call(*words)
            assert done.exit_code == 0, done.output
    assert len(charges(tmp_path)) == 3  # nor is what the key leaves out another question


# Releases: whole or not at all, and only what was released; answers as tables.


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


# Answers and standard errors of estimates, of cells and of tables, against matrices.


def matrix(query_set: Workload) -> Float64:
    """W, one product below the other."""
    return np.concatenate(
        [kron([f.dense() for f in query_set.factors_of(p)]) for p in query_set.products]
    )


def mixes(query_set: Workload) -> list[tuple[Float64, ...]]:
    rng = np.random.default_rng(query_set.cells)
    each = tuple(rng.normal(size=(n, n)) for n in query_set.sizes)
    return [each, (rng.normal(size=(query_set.cells, query_set.cells)),)]


@pytest.mark.parametrize(
    "query_set", [workload(), over([9], ["range"]), over([3, 2, 4], ["range"] * 3)]
)
def test_against_matrices(query_set: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, rng = matrix(query_set), np.random.default_rng(1)
    x = rng.integers(-9, 99, query_set.cells).astype(np.float64)
    assert np.array_equal(values(query_set, x), rows @ x)
    for mix in mixes(query_set):
        mix_matrix = mix[0] if len(mix) == 1 else kron(list(mix))
        expected = rows @ mix_matrix @ mix_matrix.T @ rows.T
        assert np.allclose(covariance(query_set, mix), expected)
        for at_once in (1 << 24, 100):
            monkeypatch.setattr(estimate, "_AT_ONCE", at_once)
            assert np.allclose(norms(query_set, mix) ** 2, np.diag(expected))


def test_many_cells_take_little_time() -> None:
    """A million cells, each with its own error: no matrix of cells by cells."""
    query_set = over([100, 100, 100], ["prefix", "prefix", "total"])
    mix = [np.triu(np.ones((100, 100))) for _ in range(3)]
    row_norms = norms(query_set, mix)
    assert row_norms.shape == (10_000,) and (row_norms > 0).all()


def test_measured_errors_are_those_of_the_formula() -> None:
    """500 draws of the engine's own mixed noise, all queries of a small table together."""
    query_set = over([16, 12], ["range", "identity"])
    mixing = mixed(auto(query_set).strategy, query_set.sizes)
    once = encoder_of("dense", 1)
    noise = StreamNoise("n", once, once.strategy.col2, 1.0, 1.0, 3.0)
    sd = norms(query_set, mixing.factors) * noise.sd[0]
    ring, total = KEYS.ring(), 0.0
    for run in range(500):
        stream = NoiseStream(
            ring, (b"%d" % run,), (0, 1), "value", noise, ContinuousGaussian(noise.sigma)
        )
        drawn = MixedNoise(stream, mixing).at(1) / 2.0**MIXED_BITS
        total += float(np.sum(values(query_set, drawn) ** 2))
    assert total / 500 == pytest.approx(float(np.sum(sd**2)), rel=0.02)


SIZES = (3, 4, 1, 2)
X = np.random.default_rng(8).integers(0, 20, SIZES)


def estimated_workload_of(queries: list[dict[str, Any]]) -> Workload:
    domain = [{"name": str(k), "size": n} for k, n in enumerate(SIZES)]
    return from_dict({"domain": domain, "queries": queries})


def table_estimate(ways: int = 2) -> TableEstimate:
    keys = [k for w in range(ways + 1) for k in itertools.combinations((0, 1, 3), w)]
    reduced_tables = []
    for key in keys:
        table = X.sum(axis=tuple(a for a in range(4) if a not in key))
        reduced_tables.append(reduced(table, [Even(SIZES[a]) for a in key]).astype(np.float64))
    return TableEstimate(
        tuple(map(Even, SIZES)), tuple(keys), np.arange(1.0, len(keys) + 1), tuple(reduced_tables)
    )


WORKLOAD = estimated_workload_of(
    [{"ways": 2}, {"factors": {"0": "prefix", "3": "identity"}}, {"factors": {}},
     {"factors": {"1": "range", "2": "identity"}}]
)  # fmt: skip


def test_without_noise_tables_are_exact() -> None:
    [answers] = table_estimate().answers(WORKLOAD)
    assert (
        np.allclose(answers.estimates, values(WORKLOAD, X.ravel().astype(np.float64)))
        and answers.displayed is answers.estimates
    )


def test_variances_against_matrices() -> None:
    """Of W (sum over R of spread Sub^+) with noise of covariance s_R^2 Sub Sub^T."""
    held = table_estimate()
    [answers] = held.answers(WORKLOAD)
    rows = matrix(WORKLOAD)
    total = np.zeros(len(rows))
    for key, sd in zip(held.keys, held.sds, strict=True):
        inverses = [
            np.linalg.pinv(difference_matrix(n)) if a in key else np.full((n, 1), 1 / n)
            for a, n in enumerate(SIZES)
        ]
        each = [np.asarray(inverse, np.float64) for inverse in inverses]
        grams = [difference_matrix(SIZES[a]) @ difference_matrix(SIZES[a]).T for a in key]
        root = [np.asarray(np.linalg.cholesky(gram), np.float64) for gram in grams]
        noise = rows @ kron(each) @ (kron(root) if root else np.ones((1, 1)))
        total += sd**2 * (noise**2).sum(1)
    assert np.allclose(answers.sd**2, total)


def test_tables_as_arrays() -> None:
    again = of_arrays(to_arrays(table_estimate()))
    assert isinstance(again, TableEstimate) and again.keys == table_estimate().keys
    for one, other in zip(again.measured, table_estimate().measured, strict=True):
        assert np.array_equal(one, other)
    [answers] = again.answers(WORKLOAD)
    [expected] = table_estimate().answers(WORKLOAD)
    assert np.array_equal(answers.sd, expected.sd)


def test_what_is_refused_of_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    many = over([200], ["range"])
    calls: dict[str, Callable[[], object]] = {
        "a covariance of many": lambda: covariance(many, [np.eye(200)]),
        "a table that was not measured": lambda: list(table_estimate(1).answers(WORKLOAD)),
        "cells of tables": lambda: list(table_estimate().answers(WORKLOAD, consistent=True)),
        "a covariance of tables": lambda: table_estimate().covariance(WORKLOAD),
        "a search without end": lambda: nonnegative(np.array([-1.0, 1.0]), [np.eye(2)]),
    }
    monkeypatch.setattr(estimate, "slope", lambda x, gradient: 1e300)
    check(Path(__file__).with_name("refusals_estimate.txt"), of_refusals(calls))


def test_least_squares_as_an_independent_solver_finds_it() -> None:
    """Lawson and Hanson's active sets on A x = A y, A = L^-1."""
    rng = np.random.default_rng(3)
    for sizes in ([32], [6, 5]):
        mix = mixed(optimum(over(sizes, ["range"] * len(sizes))).strategy, tuple(sizes)).factors
        mix_matrix = mix[0] if len(mix) == 1 else np.kron(*mix)
        cells = rng.poisson(0.7, len(mix_matrix)) + mix_matrix @ rng.normal(size=len(mix_matrix))
        assert (cells < 0).sum() > 3
        inverse = np.linalg.inv(mix_matrix)
        expected, _ = nnls(inverse, inverse @ cells)
        nearest = nonnegative(cells, mix)
        assert nearest.min() >= 0 and np.allclose(nearest, expected, atol=1e-4)
        clipped = np.maximum(cells, 0)
        assert np.linalg.norm(inverse @ (nearest - cells)) < np.linalg.norm(
            inverse @ (clipped - cells)
        )


def test_what_is_not_negative_stays() -> None:
    cells = np.array([0.0, 1.0, 2.5])
    assert nonnegative(cells, [np.eye(3) * 2]) is cells
    assert np.array_equal(nonnegative(-cells, [np.eye(3)]), np.zeros(3))


def test_totals_are_better_than_clipped_ones() -> None:
    """Of many empty cells clipping keeps the positive half of the noise."""
    rng = np.random.default_rng(5)
    mix = mixed(optimum(over([64], ["range"])).strategy, (64,)).factors
    clipped, nonnegative_errors = [], []
    for _ in range(40):
        cells = 30.0 * (np.arange(64) == 7) + mix[0] @ rng.normal(size=64)
        clipped.append(np.maximum(cells, 0).sum() - 30)
        nonnegative_errors.append(nonnegative(cells, mix).sum() - 30)
    assert np.mean(np.square(nonnegative_errors)) < 0.5 * np.mean(np.square(clipped))


def test_cells_as_arrays() -> None:
    given = Estimate(np.ones((2, 6)), np.ones(2), (np.eye(2), np.eye(3)), 2.5, (1,))
    again = of_arrays(to_arrays(given))
    assert isinstance(again, Estimate) and (again.half_width, again.summed) == (2.5, (1,))
    assert [len(factor) for factor in again.mix] == [2, 3]
    assert np.array_equal(again.cells, given[0])
    with pytest.raises(KeyError):
        of_arrays({"cells": np.ones(1)})
