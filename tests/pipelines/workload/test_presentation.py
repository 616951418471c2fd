"""A workload, in whatever order it is written and its job names things, is charged once."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.workloads.workload import Workload
from tests.pipelines.cli.called import call, refused
from tests.pipelines.workload.survey import DOMAIN, charges, survey, workload, write

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
