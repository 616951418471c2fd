"""The papers' experiments: their data, settings and runs, the command, and what is refused."""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import duckdb
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomlkit
from click.testing import CliRunner, Result

from dpstream.accounting.budget.calibration import committed_text
from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.accounting.gaussian import cdp_delta
from dpstream.dp_transforms.run import begin_run
from dpstream.pipelines.cli.parts import print_json
from dpstream.pipelines.connectors.registry import input_of
from dpstream.pipelines.demo import first_of_each
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.jobs.secret import secret_source
from dpstream.pipelines.project.text import parse_toml
from dpstream.pipelines.stream.run import run_job
from dpstream.state.ledger.open import AccountPlace
from tests.bench.paper import runs
from tests.bench.paper.__main__ import BASELINES, ListCommand, paper
from tests.bench.paper.baselines import NAMES
from tests.bench.paper.jobs import NAMED, Frame, Setting, parse_mode, pattern_of, write_job
from tests.bench.paper.one_run import in_child, peak_gib
from tests.bench.paper.paper import published_budget
from tests.bench.paper.runs import Contest, check, provenance
from tests.bench.paper.studies import Study, corpus, synthetic
from tests.bench.paper.synth import DAY_MICROS, Synth, generate
from tests.bench.paper.truth import (
    Columns,
    Scoreboard,
    Truth,
    errors,
    first_of_pair,
    load,
)
from tests.oracle.simulation import algorithm2_plan, table1_plan


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
        ("sticky", {}),
        ("tree", {"weights": "uniform", "strategy": "tree"}),
        (
            "sticky,strategy=dense,pre_threshold=3",
            {"strategy": "dense", "pre_threshold": 3},
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


@pytest.mark.parametrize("text", ["stiky", "", "sticky,tree", "epsilon=9", "a b=1", "secret=x"])
def test_modes_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_mode(text)


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(paper, [*map(str, args)])


SMALL = ("--users", "2000", "--keys", "200", "--epsilon", "100", "--shards", "1")


def test_table1_command(tmp_path: Path) -> None:
    out = tmp_path / "out" / "t.json"
    modes = ("sticky", "tree,pre_threshold=5")
    result = call(
        "table1", *SMALL, "--modes", *modes, "--triggers", "4", "--folder", tmp_path, "--out", out
    )
    assert result.exit_code == 0, result.output
    saved = json.loads(out.read_text())
    rows = {row["method"]: row for row in saved["runs"]}
    assert list(rows)[:2] == list(modes) and len(rows) == 7
    assert all(row["triggers"] == 4 and row["contributions"] == 32 for row in rows.values())
    assert saved["versions"]["numpy"] == np.__version__ and saved["seed"] == 0
    assert "--modes sticky tree,pre_threshold=5 " in saved["command"]
    assert rows["sticky"]["keys"] > 50 and rows["sticky"]["l1"] < rows["sticky"]["records"] / 2
    assert {p.name for p in out.parent.iterdir()} == {"t.json"}
    jobs = sorted((tmp_path / "runs").glob("*/dpstream.toml"))
    assert ["pre_threshold = 5" in job.read_text() for job in jobs] == [True, False]
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
    assert ("paper", *NAMES) == BASELINES


def test_a_table_for_people(tmp_path: Path) -> None:
    args = ("--triggers", "2", "--modes", "sticky", "--baselines", "none", "--folder", tmp_path)
    result = call("table1", *SMALL, *args)
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "table1.json").read_text())
    assert [row["method"] for row in saved["runs"]] == ["sticky"]
    assert f"{saved['runs'][0]['l1']:,.0f}" in result.stdout
    assert "--baselines none" in saved["command"]


Source = Callable[[Study, Callable[[str], None]], tuple[Path, Callable[[], None]]]


def study(folder: Path, **more: Any) -> Study:
    usual: dict[str, Any] = {"folder": folder, "users": 30, "modes": ("sticky",)}
    return Study(**(usual | more))


def test_each_setting_is_run_once(tmp_path: Path) -> None:
    small_study = study(tmp_path, modes=("tree", "sticky", "tree"), triggers=(10, 100, 10),
                  contributions=(3, 4, 3), baselines=("baseline1", "baseline1"))  # fmt: skip
    contest = small_study.contest(tmp_path / "x.parquet", "int")
    order = [(s.triggers, s.mode.name, s.contributions) for s in contest.settings]
    assert order == [(t, m, c) for t in (10, 100) for m in ("tree", "sticky") for c in (3, 4)]
    assert (list(contest.baselines), contest.contributions) == (["baseline1"], 3)


def test_nothing_to_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        study(tmp_path, modes=(), baselines=()).contest(tmp_path, "int")
    assert error.value.field == "--modes"


@pytest.mark.parametrize("source", [synthetic, corpus])
def test_data_is_made_once(source: Source, tmp_path: Path) -> None:
    messages: list[str] = []
    path, make = source(study(tmp_path, keys=50), messages.append)
    assert not path.exists()
    make()
    before = path.stat().st_mtime_ns
    make()
    assert path.stat().st_mtime_ns == before and len(messages) == 1
    assert source(study(tmp_path, keys=50, seed=1), messages.append)[0] != path


def refused(*args: str | Path) -> str:
    """What a refusal says."""
    result = call(*args)
    assert result.exit_code == 2 and "Traceback" not in result.output
    return result.output


def test_each_command_has_examples() -> None:
    for name in ("table1", "figure10", "table2", "workloads", "reddit"):
        assert f"python -m tests.bench.paper {name}" in call(name, "--help").output


@click.command(cls=ListCommand)
@click.option("--many", multiple=True, type=int)
@click.option("--one")
@click.option("--flag", is_flag=True)
def lists(many: tuple[int, ...], one: str | None, flag: bool) -> None:
    """Says what it was given."""
    print_json([many, one, flag])


@pytest.mark.parametrize(
    ("args", "given"),
    [([], [[], None, False]), (["--many", "1", "2", "--flag"], [[1, 2], None, True]),
     (["--many", "1", "--one", "x", "--many", "3"], [[1, 3], "x", False])],
)  # fmt: skip
def test_options_take_several_values(args: list[str], given: list[object]) -> None:
    assert json.loads(CliRunner().invoke(lists, args).output) == given


@pytest.mark.parametrize("args", [["--many"], ["--many", "--flag"], ["stray"], ["--many", "x"]])
def test_what_a_list_refuses(args: list[str]) -> None:
    assert CliRunner().invoke(lists, args).exit_code == 2


@pytest.mark.parametrize("name", ["table1", "table2", "figure10"])
def test_a_mode_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    message = refused(name, "--modes", "best", "--users", "10", "--folder", tmp_path / "runs")
    assert "--modes" in message and "sticky" in message


def test_lists_take_several_values(tmp_path: Path) -> None:
    message = refused("table1", "--triggers", "100", "7000001", "--users", "10",
                   "--modes", "sticky", "--baselines", "none", "--folder", tmp_path)  # fmt: skip
    assert "--triggers" in message and "divide a day" in message


def test_workloads(tmp_path: Path) -> None:
    done = call("workloads", "--only", "example4", "figure4", "--large", "64",
                "--out", tmp_path / "w.json", "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    saved, stdout_report = json.loads((tmp_path / "w.json").read_text()), json.loads(done.stdout)
    assert saved["example4"] == stdout_report["example4"] and "figure5" not in stdout_report
    assert "--only example4 figure4" in saved["command"] and "--large 64" in saved["command"]
    printed = call("workloads", "--only", "example4").stdout
    assert "eigen 1.017" in printed
    assert "--cells" in refused("workloads", "--cells", "100")
    assert "--out" in refused("workloads", "--out", tmp_path / "w.txt")


def test_the_figures_of_the_paper() -> None:
    budget = published_budget(algorithm2_plan(100, 32, 6.0, 1e-9))
    selection, values = budget.selection, budget.values[0]
    assert selection is not None and budget.tau is not None
    rho_values = 32**2 * 7 / (2 * values.sigma**2)
    rho_selection = 32 * 7 / (2 * selection.sigma**2)
    for rho in (rho_values, rho_selection):
        assert cdp_delta(rho, 3.0) <= 1e-9 / 3 * (1 + 1e-9)
        assert cdp_delta(rho * 1.001, 3.0) > 1e-9 / 3
    assert budget.mu**2 / 2 == pytest.approx(rho_values + rho_selection)
    # The stream that is tested has the name that a plan's page knows it by.
    assert selection.name == "selection"
    assert budget.delta * (1 - budget.theta) == pytest.approx(2e-9 / 3)
    assert 32 * (math.exp(3) + 1) * budget.b == pytest.approx(1e-9 / 3)
    even = published_budget(algorithm2_plan(64, 32, 6.0, 1e-9)).values[0]
    assert even.sensitivity**2 == pytest.approx(32**2 * 6)
    # The union over triggers is what it lacks: its failures exceed delta by far more.
    assert 100 * 32 * budget.b > 1e-9 and not budget.has_guarantee


@pytest.mark.parametrize("privacy", [{"tests": 3}, {"select_every": 1, "strategy": "blt"}])
def test_another_mechanism_is_refused(privacy: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        published_budget(table1_plan(100, **privacy))


def test_a_run_is_marked_and_never_charged(tmp_path: Path) -> None:
    data = tmp_path / "records.parquet"
    generate(Synth(users=3_000, keys=300, seed=5), data)
    mode = parse_mode("strategy=tree,weights=uniform,select_every=1,skip=false")
    setting = Setting(mode, 4, 8)
    job = load_job(write_job(Frame(data, "int", tmp_path / "runs", 6.0, 1e-5), setting))
    charged = msgspec.structs.replace(
        job, ledger=AccountPlace(str(tmp_path / "l.db"), "d", "0" * 16)
    )
    run, _ = begin_run(
        job.plan,
        secret_source(job),
        job.state.store or "",
        job.state.shards,
        source=input_of(job).identity(),
        calibration=committed_text(job.plan, published_budget(job.plan)),
    )
    assert not run.budget().has_guarantee
    with pytest.raises(PolicyError, match="without a guarantee"):
        run_job(charged)
    warnings: list[str] = []
    run_job(job, warn=lambda words: warnings.append(str(words)))
    releases = read_releases(job.path.parent / "releases")
    assert releases.num_rows
    assert set(releases["run_id"].to_pylist()) == {f"UNSOUND-{run.run_id}"}
    assert any("does NOT hold" in words for words in warnings)


def test_a_written_job_says_what_was_set(tmp_path: Path) -> None:
    frame = Frame(tmp_path / "data [1].parquet", "int", tmp_path / "runs", 2.0, 1e-9, 8)
    setting = Setting(parse_mode("tree"), 10, 3)
    one, other = (write_job(frame, setting) for _ in range(2))
    assert one.parent != other.parent
    keys = [(path.parent / "noise.secret").read_bytes() for path in (one, other)]
    assert keys[0] != keys[1]
    plan, job = load_job(one).plan, load_job(one)
    assert (plan.privacy.strategy, plan.privacy.contributions, plan.privacy.epsilon) == (
        "tree",
        3,
        2.0,
    )
    assert plan.timeline.triggers == 10 and job.state.shards == 8
    assert [a.kind for a in plan.aggregates] == ["count"]
    fused = load_job(write_job(frame, Setting(parse_mode("fused"), 10, 3)))
    assert [a.kind for a in fused.plan.aggregates] == ["units"]


def test_names_of_data_are_no_patterns(tmp_path: Path) -> None:
    folder = tmp_path / "a[b]"
    folder.mkdir()
    (folder / "x.parquet").write_bytes(b"")
    assert [p.name for p in Path("/").glob(pattern_of(folder)[1:])] == ["x.parquet"]
    assert [p.name for p in Path("/").glob(pattern_of(folder / "x.parquet")[1:])] == ["x.parquet"]


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_name_is_its_settings(name: str) -> None:
    mode = parse_mode(name)
    assert mode.fields == NAMED[name]
    assert (mode.kind == "units") is (name == "fused")


def test_more_keys_and_keys_alone() -> None:
    mode = parse_mode("sticky,strategy=dense,weights={power=1, offset=2.5},combine=true")
    assert mode.fields == {
        "strategy": "dense", "combine": True,
        "weights": {"power": 1, "offset": 2.5},
    }  # fmt: skip
    assert parse_mode("per_key_bound=1").fields == {"per_key_bound": 1}
    assert "strategy" not in NAMED["sticky"]
    assert parse_mode("combined,skip=false").fields == NAMED["combined"] | {"skip": False}


@pytest.mark.parametrize("text", ["best", "", "sticky,tree", "sticky,A=1", "epsilon=3", "secret=x"])
def test_what_is_no_mode(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_mode(text)
    assert error.value.field == "--modes"


def test_a_name_of_a_folder() -> None:
    assert parse_mode("sticky,weights={power=1}").slug == "sticky-weights-power-1"


def child(folder: Path, lines: list[str], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"print({line!r})\n" for line in lines)
    (folder / "child_program.py").write_text(f"{text}raise SystemExit({code})\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_the_last_line_is_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(tmp_path, ["noise", '{"keys": 7}'], 0, monkeypatch)
    assert in_child("child_program") == {"keys": 7}


@pytest.mark.parametrize("kind", [UsageError, PolicyError, RunError])
def test_a_refusal_is_the_childs(
    kind: type[DpstreamError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error_line = json.dumps(kind("sink.path", "rule", "fix").as_dict())
    child(tmp_path, [error_line], kind.exit_code, monkeypatch)
    with pytest.raises(kind) as error:
        in_child("child_program")
    assert (error.value.field, error.value.rule) == ("sink.path", "rule")


def test_an_end_without_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(tmp_path, ["SECRET"], 1, monkeypatch)
    with pytest.raises(RunError) as error:
        in_child("child_program")
    assert error.value.field == "run" and "SECRET" not in str(error.value)


def test_memory_never_shrinks() -> None:
    before = peak_gib()
    filled = bytearray(b"x" * (64 << 20))
    assert peak_gib() >= before > 0 and filled


def contest(folder: Path, mode: str, triggers: int) -> Contest:
    frame = Frame(folder / "none.parquet", "int", folder / "runs", 6.0, 1e-9)
    return Contest(frame, [Setting(parse_mode(mode), triggers, 4)], contributions=4)


def test_every_job_is_written_and_checked(tmp_path: Path) -> None:
    [job] = check(contest(tmp_path, "sticky", 10))
    assert job.exists() and not (job.parent / "state.db").exists()
    promise = contest(tmp_path, "sticky", 10).promise
    assert (promise.epsilon, promise.delta) == (6.0, 1e-9)


@pytest.mark.parametrize(("mode", "triggers"), [("sticky", 7), ("sticky", 0), ("nothing=1", 10)])
def test_what_cannot_be_run(mode: str, triggers: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        check(contest(tmp_path, mode, triggers))


def test_a_result_says_where_it_was_made() -> None:
    origin = provenance()
    assert "date" in origin and "numpy" in str(origin)
