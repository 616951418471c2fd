"""The experiments: truth and errors against DuckDB, baselines against slow references, commands."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomlkit
from click.testing import CliRunner, Result
from matplotlib.image import imread

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.demo import first_of_each
from dpstream.pipelines.project.text import parse_toml
from tests.bench.paper import charts, runs
from tests.bench.paper.__main__ import BASELINES, paper
from tests.bench.paper.baselines import NAMES
from tests.bench.paper.modes import parse_mode
from tests.bench.paper.paper import TABLE1, TABLE1_RECORDS
from tests.bench.paper.synth import DAY_MICROS, Synth
from tests.bench.paper.truth import (
    Columns,
    Scoreboard,
    Truth,
    errors,
    first_of_pair,
    load,
)


def write_day(path: Path, rows: int = 3000, seed: int = 1) -> pa.Table:
    """Random records of one day, not in order of time, with ties."""
    rng = np.random.default_rng(seed)
    time = Synth().start + rng.integers(0, 200, rows) * (DAY_MICROS // 200)
    table = pa.table(
        {
            "user": rng.integers(0, 150, rows),
            "key": [f"k{k}" for k in rng.zipf(1.5, rows) % 40],
            "time": pa.array(time).view(pa.timestamp("us", "UTC")),
        }
    )
    pq.write_table(table, path, row_group_size=700)
    return table


def random_releases(data: Columns, triggers: int) -> pa.Table:
    rng = np.random.default_rng(5)
    chosen = np.sort(rng.choice(len(data.names) * triggers, 300, replace=False))
    rng.shuffle(chosen)
    return pa.table(
        {
            "key": data.names.take(pa.array(chosen % len(data.names))),
            "trigger": pa.array((chosen // len(data.names) + 1).astype(np.int32)),
            "count": rng.normal(50, 40, 300),
        }
    )


ERRORS_SQL = """
WITH cells AS (
    SELECT k.key, t.t FROM (SELECT DISTINCT key FROM day) k, range(1, {t} + 1) t(t)
), exact AS (
    SELECT c.key, c.t, count(d.key) AS n FROM cells c LEFT JOIN day d
    ON d.key = c.key AND epoch_us(d.time) < {start} + c.t * {every} GROUP BY ALL
), shown AS (
    SELECT c.key, c.t, arg_max(r.count, r.trigger) AS x FROM cells c LEFT JOIN releases r
    ON r.key = c.key AND r.trigger <= c.t GROUP BY ALL
), gap AS (SELECT key, t, x, abs(coalesce(x, 0) - n) AS d FROM exact JOIN shown USING (key, t))
SELECT count(x) FILTER (t = {t}) AS keys, sum(d) FILTER (t = {t}) AS l1,
    sqrt(sum(d * d) FILTER (t = {t})) AS l2, max(d) FILTER (t = {t}) AS linf,
    sum(d) / {t} AS l1_average, (SELECT count(*) FROM releases) AS updates FROM gap
"""


def test_errors_are_those_of_sql(tmp_path: Path) -> None:
    day = write_day(tmp_path / "day.parquet")
    data = load(tmp_path / "day.parquet")
    releases = random_releases(data, 8)
    with duckdb.connect() as sql:
        sql.register("day", day)
        sql.register("releases", releases)
        query = ERRORS_SQL.format(t=8, start=Synth().start, every=DAY_MICROS // 8)
        expected = sql.sql(query).to_arrow_table().to_pylist()[0]
    got = errors(Truth(data, 8), releases)
    assert got == pytest.approx(expected, rel=1e-12)


def test_a_new_answer_replaces_the_old_one() -> None:
    data = Columns(
        pa.array(["a", "b"]),
        np.array([0, 1, 1], np.int32),
        np.array([0, 1, DAY_MICROS - 1]),
        np.zeros(0, np.int32),
    )
    accumulated, replaced = (Scoreboard(Truth(data, 2)) for _ in range(2))
    for board, replace in ((accumulated, False), (replaced, True)):
        board.publish(np.array([0, 1]), np.array([1.0, 5.0]), replace)
        with pytest.raises(ValueError, match="not every"):
            board.errors()
        board.publish(np.array([1]), np.array([2.0]), replace)
    assert accumulated.errors()["l1"] == 0 and accumulated.errors()["keys"] == 2
    assert replaced.errors()["l1"] == 1 and replaced.errors()["keys"] == 1
    assert accumulated.errors()["l1_average"] == 2.0


def test_a_released_key_without_records_is_an_error(tmp_path: Path) -> None:
    write_day(tmp_path / "day.parquet", rows=50)
    truth = Truth(load(tmp_path / "day.parquet", users=False), 2)
    with pytest.raises(ValueError, match="does not occur"):
        truth.codes_of(pa.chunked_array([["k1", "nowhere"]]))


def test_columns_are_the_file_in_order_of_time(tmp_path: Path) -> None:
    day = write_day(tmp_path / "day.parquet")
    data = load(tmp_path / "day.parquet")
    order = np.argsort(day["time"].cast(pa.int64()).to_numpy(), kind="stable")
    assert data.names.take(pa.array(data.key)).to_pylist() == day["key"].take(order).to_pylist()
    users = day["user"].take(order).to_numpy()
    assert len(np.unique(np.stack([users, data.user]), axis=1).T) == len(np.unique(users))
    assert np.all(np.diff(data.time) >= 0)
    step_index = data.step_index(100)
    assert step_index.min() == 1 and step_index.max() == 100


def test_first_rows_are_those_of_a_loop() -> None:
    rng = np.random.default_rng(2)
    user, key = rng.integers(0, 30, (2, 2000)).astype(np.int32)
    step_index = np.sort(rng.integers(1, 6, 2000)).astype(np.int32)
    seen: dict[Any, int] = defaultdict(int)
    most, pair, cell = list[bool](), list[bool](), list[bool]()
    for row in zip(user.tolist(), key.tolist(), step_index.tolist(), strict=True):
        for name, out in ((row[:1], most), (row[:2], pair), (row, cell)):
            seen[name] += 1
            out.append(seen[name] <= (7 if out is most else 1))
    np.testing.assert_array_equal(first_of_each(user, 7), most)
    np.testing.assert_array_equal(first_of_pair(user, key), pair)
    np.testing.assert_array_equal(first_of_pair(user, key, step_index), cell)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("sticky", {"mode": "sticky"}),
        ("rounds+flush", {"mode": "rounds", "strategy": "tree", "final_flush": True}),
        (
            "sticky,strategy=dense,theta=0.3",
            {"mode": "sticky", "strategy": "dense", "theta": 0.3},
        ),
        ("combine=true,per_key_bound=1", {"combine": True, "per_key_bound": 1}),
        (
            'weights={power = 1, from = [2, "x"]},strategy=blt',
            {"weights": {"power": 1, "from": [2, "x"]}, "strategy": "blt"},
        ),
    ],
)
def test_modes(text: str, fields: dict[str, Any]) -> None:
    mode = parse_mode(text)
    assert mode.fields == fields and mode.name == text
    assert mode.slug == Path(mode.slug).name
    assert parse_toml(tomlkit.dumps({"all": mode.fields}).encode())["all"] == fields


@pytest.mark.parametrize("text", ["stiky", "", "sticky,rounds", "epsilon=9", "a b=1", "secret=x"])
def test_modes_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_mode(text)


def test_pictures(tmp_path: Path) -> None:
    rows = [
        {"method": m, "triggers": t, "records": 10, "keys": k, "l1": 5.0 + k, "l2": 1.0, "linf": 1}
        for m, k in (("sticky", 3), ("baseline1+published", 0))
        for t in (100, 1000)
    ]
    table = charts.table_chart(rows, TABLE1, TABLE1_RECORDS, "title")
    page = "\n".join(text.get_text() for text in table.findobj() if hasattr(text, "get_text"))
    assert "435" in page and "28,338" not in page, "the paper's figures of what is shown"
    sweep = charts.sweep_chart([{**row, "contributions": row["triggers"]} for row in rows], "t")
    for name, figure in (("a", table), ("b", sweep)):
        assert charts.draw(figure, tmp_path / f"{name}.json") == [f"{name}.png", f"{name}.svg"]
        assert imread(tmp_path / f"{name}.png").std() > 0


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(paper, [*map(str, args)])


SMALL = ("--users", "2000", "--keys", "200", "--epsilon", "100", "--shards", "1")


def test_table1_command(tmp_path: Path) -> None:
    out = tmp_path / "out" / "t.json"
    modes = ("sticky", "rounds,selection_share=0.5")
    result = call(
        "table1", *SMALL, "--modes", *modes, "--triggers", "4", "--folder", tmp_path, "--out", out
    )
    assert result.exit_code == 0, result.output
    saved = json.loads(out.read_text())
    rows = {row["method"]: row for row in saved["runs"]}
    assert list(rows)[:2] == list(modes) and len(rows) == 6
    assert all(row["triggers"] == 4 and row["contributions"] == 32 for row in rows.values())
    assert saved["versions"]["numpy"] == np.__version__ and saved["seed"] == 0
    assert "--modes sticky rounds,selection_share=0.5 " in saved["command"]
    assert rows["sticky"]["keys"] > 50 and rows["sticky"]["l1"] < rows["sticky"]["records"] / 2
    assert {p.name for p in out.parent.iterdir()} == {"t.json", "t.png", "t.svg"}
    jobs = sorted((tmp_path / "runs").glob("*/dpstream.toml"))
    assert ["selection_share = 0.5" in job.read_text() for job in jobs] == [True, False]
    keys = {(job.parent / "noise.secret").read_text() for job in jobs}
    assert len(keys) == 2, "every run has a key of its own"


def test_figure10_command(tmp_path: Path) -> None:
    args = ("--contributions", "2", "20", "--triggers", "3", "--modes", "sticky", "--json")
    result = call("figure10", *SMALL, *args)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["runs"]
    assert [(row["contributions"], row["triggers"]) for row in rows] == [(2, 3), (20, 3)]
    assert rows[0]["l1"] > rows[1]["l1"], "two records of a user keep less than twenty"


MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("--modes", "stiky"), "--modes"),
    (("--modes", "sticky,strategy=tre"), "mechanism.strategy"),
    (("--modes", "sticky,per_key=1"), "mechanism.per_key"),
    (("--triggers", "7"), "--triggers"),
    (("--out", "result.txt"), "--out"),
    (("--users", "100000000"), "users"),
    (("--epsilon", "0"), "budget.epsilon"),
    (("--triggers",), "requires an argument"),
    (("--baselines", "baseline3"), "Invalid value"),
]


@pytest.mark.parametrize(("args", "field"), MISTAKES)
def test_mistakes_cost_nothing(
    args: tuple[str, ...], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "in_child", lambda *_: pytest.fail("a run was started"))
    result = call("table1", "--users", "10", "--folder", tmp_path, *args)
    assert result.exit_code == 2
    assert field in result.stderr
    assert not list(tmp_path.glob("*.parquet")), "refused before data is made"


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    from tests.bench.paper.one_run import in_child

    with pytest.raises(UsageError, match=r"none\.toml"):
        in_child("tests.bench.paper.one_run", str(tmp_path / "none.toml"))


def test_the_command_line_knows_all_baselines() -> None:
    assert BASELINES == NAMES


def test_a_table_for_people(tmp_path: Path) -> None:
    args = ("--triggers", "2", "--modes", "sticky", "--baselines", "none", "--folder", tmp_path)
    result = call("table1", *SMALL, *args)
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "table1.json").read_text())
    assert [row["method"] for row in saved["runs"]] == ["sticky"]
    assert f"{saved['runs'][0]['l1']:,.0f}" in result.stdout
    assert "--baselines none" in saved["command"]
