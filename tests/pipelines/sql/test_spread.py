"""Stage 1 on a runner gives the bytes of the local answer, whatever the shards."""

import secrets
import stat
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.formats import receipt
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.sql import ask as asking
from dpstream.pipelines.sql import flow, stage, work
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import question_of
from dpstream.pipelines.sql.receipt import SqlAnswer
from dpstream.pipelines.tables.engine import Engine, MemoryLimitError, not_run, too_large
from dpstream.pipelines.tables.registration import register
from tests import accounts
from tests.golden.pinned import refusal
from tests.pipelines.sql.asking import ALL, charges, data_set, dp, visits
from tests.runners.engines import need_flink

DIRECT = Runner("DirectRunner")
_CHAIN = """
[table.people]
path = "people.csv"
unit_column = "uid"
columns = { uid = "INT64", code = "STRING" }
[table.orders]
path = "orders.csv"
columns = { id = "INT64", person = "STRING", day = "DATE" }
unit_via = { table = "people", on = [["person", "code"]] }
[table.items]
path = "items.csv"
columns = { o = "INT64", page = "STRING", price = "NUMERIC", n = "INT64" }
unit_via = { table = "orders", on = [["o", "id"]] }
"""
_OPTIONS = "epsilon = 60, delta = 1e-9, max_groups_contributed = 4"
#: All kinds of columns, bounds that the query chooses, and few rows of a unit that count.
EVERY = dp(
    ALL + ", STDDEV(n, contribution_bounds_per_row => (-3, 8)) AS d, SUM(n) AS x, "
    "MAX(seconds) AS hi", options=_OPTIONS,
) + " ORDER BY page"  # fmt: skip
JOINED = dp(
    "p.title, COUNT(*, contribution_bounds_per_group => (0, 9)) AS n, SUM(i.price * i.n, "
    "contribution_bounds_per_group => (0, 99)) AS s, COUNT(DISTINCT o.uid) AS u",
    "FROM items AS i JOIN orders AS o ON i.o = o.id JOIN pages AS p ON i.page = p.page "
    "WHERE o.day >= DATE '2024-01-02' GROUP BY p.title",
    _OPTIONS,
)
LISTED = dp(
    "p.page, AVG(v.seconds, contribution_bounds_per_row => (0, 100)) AS a",
    "FROM visits AS v RIGHT JOIN (SELECT DISTINCT page FROM pages) AS p ON v.page = p.page "
    "GROUP BY p.page",
    f"{_OPTIONS}, group_selection_strategy = PUBLIC_GROUPS",
)
TOTAL = dp("COUNT(*) AS n", "FROM visits", "epsilon = 60, delta = 1e-9")
DISTINCT = dp(
    "page, COUNT(DISTINCT seconds, contribution_bounds_per_group => (0, 3)) AS s, "
    "COUNT(DISTINCT n) AS n",
    options=_OPTIONS,
)
TEXTS = {"every": EVERY, "joined": JOINED, "listed": LISTED, "total": TOTAL, "distinct": DISTINCT}


def company(folder: Path, epsilon: float = 1e6) -> Path:
    """Tables of two files or more, and units that come by two keys."""
    folder.mkdir(exist_ok=True)
    path = data_set(folder, epsilon=epsilon)
    table = visits()
    (folder / "visits.parquet").unlink()
    pq.write_table(table.slice(0, 2_500), folder / "visits-a.parquet", row_group_size=300)
    pq.write_table(table.slice(2_500), folder / "visits-b.parquet")
    accounts.write(path, path.read_text().replace("visits.parquet", "visits-*.parquet") + _CHAIN)
    people = "".join(f"{i if i % 9 else ''},c{i}\n" for i in range(300))
    orders = "".join(f"{i},c{i * 7 % 310},2024-01-0{1 + i % 4}\n" for i in range(900))
    items = "".join(f"{i * 5 % 950},p{i % 9},{i % 50}.25,{i % 4}\n" for i in range(3_000))
    (folder / "people.csv").write_text(f"uid,code\n{people}")
    (folder / "orders.csv").write_text(f"id,person,day\n{orders}9,,2024-01-03\n".replace(
        "9,,2024-01-03\n", ",c1,2024-01-03\n"))  # fmt: skip
    (folder / "items.csv").write_text(f"o,page,price,n\n{items},p1,3,2\n")
    register(load_catalog(path))
    return path


@pytest.fixture(autouse=True)
def one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed run id, and a clock that stands still: answers can be compared byte by byte."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2024, 1, 5, tzinfo=tz)

    monkeypatch.setattr(secrets, "token_hex", lambda size: "5a" * size)
    monkeypatch.setattr(receipt, "datetime", Clock)
    monkeypatch.setattr(stage, "PIECE_ROWS", 500)  # a Parquet file has several pieces


def answered(path: Path, text: str, **more: Any) -> SqlAnswer:
    """Asked as if nobody had asked before."""
    accounts.emptied(path.parent / "ledger.db")
    answer = ask(load_catalog(path), text, **more)
    assert answer.charged and len(charges(path.parent)) == 1
    return answer


@pytest.mark.parametrize(("name", "shards"), [("every", 4), ("joined", 4), ("listed", 1),
                                              ("total", 16), ("distinct", 3)])  # fmt: skip
def test_a_runner_gives_the_same_bytes(name: str, shards: int, tmp_path: Path) -> None:
    path = company(tmp_path)
    local = answered(path, TEXTS[name], shards=1)
    assert local.table.num_rows >= (1 if name == "total" else 3)
    spread_out = answered(path, TEXTS[name], shards=shards, runner=DIRECT)
    assert spread_out.receipt == local.receipt
    assert not list(tmp_path.glob(".dpstream-work-*"))
    if name == "every":
        assert local.header.bounds.keys() == {"x", "hi"} and local.table.num_rows >= 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("shards", [1, 4, 16])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("runner", ["DirectRunner", "PrismRunner", "FlinkRunner"])
def test_every_runner_gives_the_same_bytes(
    runner: str, name: str, shards: int, tmp_path: Path
) -> None:
    if runner == "FlinkRunner":
        need_flink()
    path = company(tmp_path)
    local = answered(path, TEXTS[name])
    answer = answered(path, TEXTS[name], shards=shards, runner=Runner(runner, parallelism=2))
    assert answer.receipt == local.receipt


@pytest.mark.slow
def test_rows_that_miss_their_unit_s_shard_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shuffle by whole rows instead of units: a unit would count once on every shard."""
    path = company(tmp_path)
    local = answered(path, EVERY, shards=1)

    class Own(flow.Own):
        def process(self, rows: Any) -> Any:
            for owned in super().process(rows):
                turns = np.arange(owned.num_rows) % self._task.shards
                place = owned.schema.get_field_index(flow._SHARD)
                yield owned.set_column(place, flow._SHARD, pa.array(turns))

    monkeypatch.setattr(flow, "Own", Own)
    assert answered(path, EVERY, shards=4, runner=DIRECT).receipt != local.receipt


def test_pieces_are_all_rows_once(tmp_path: Path) -> None:
    table = load_catalog(company(tmp_path)).tables["visits"]
    pieces = list(stage.pieces_of(table))
    assert [(Path(p.path).name, p.first, p.rows) for p in pieces] == [
        ("visits-a.parquet", 0, 600), ("visits-a.parquet", 600, 600),
        ("visits-a.parquet", 1_200, 600), ("visits-a.parquet", 1_800, 600),
        ("visits-a.parquet", 2_400, 100), ("visits-b.parquet", 0, 1_500),
    ]  # fmt: skip
    rows: list[Any] = []
    for piece in pieces:
        with Engine(load_catalog(tmp_path), ["visits"], piece=piece) as engine:
            rows += engine.run("SELECT * FROM visits").to_pylist()
    assert sorted(map(str, rows)) == sorted(str(row) for row in visits().to_pylist())


@pytest.mark.parametrize("groups", [(3, 0), (0, 3), (0,), (2, 0, 2), (600, 0, 600, 0)])
def test_groups_without_rows_are_no_pieces(
    groups: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "PIECE_ROWS", 500)
    table = load_catalog(company(tmp_path)).tables["visits"]
    path = tmp_path / "visits-a.parquet"
    with pq.ParquetWriter(path, visits().schema) as file:
        for rows in groups:
            file.write_table(visits().slice(0, rows))
    pieces = [piece for piece in stage.pieces_of(table) if piece.path == str(path)]
    assert sum(piece.rows for piece in pieces) == sum(groups)
    assert all(piece.rows for piece in pieces) or len(pieces) == 1


def test_columns_may_be_called_as_those_on_the_way(tmp_path: Path) -> None:
    """A file with numbers of its own for rows is read as a whole."""
    path, names = company(tmp_path), ["file_row_number", "_id", "_shard", "filename"]
    for file in tmp_path.glob("visits-*.parquet"):
        table = pq.read_table(file)
        for name in names:
            table = table.append_column(name, table.column("n"))
        pq.write_table(table, file, row_group_size=300)
    sums = ", ".join(f"SUM({n}, contribution_bounds_per_group => (0, 9)) AS s{n}" for n in names)
    text = dp(sums, "FROM visits", "epsilon = 60, delta = 1e-9")
    answer = answered(path, text, shards=3, runner=DIRECT)
    assert answer.receipt == answered(path, text).receipt
    assert len(list(stage.pieces_of(load_catalog(path).tables["visits"]))) == 2


def test_what_workers_hand_over_is_private_and_without_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = company(tmp_path), []
    read = work.read_sums

    def look(folder: Path, *more: Any) -> Any:
        files = sorted(folder.glob("shard-*"))
        modes = {stat.S_IMODE(file.stat().st_mode) for file in files}
        seen.append((stat.S_IMODE(folder.stat().st_mode), modes, [file.name for file in files]))
        for file in files:
            tables = work._read(file, 1)
            names = set(tables[0].column_names) | {n for t in tables[1:] for n in t.column_names}
            assert names == {"sum_0", "units", "weighted", "group_0"}
        return read(folder, *more)

    monkeypatch.setattr(stage, "read_sums", look)
    text = dp("page, COUNT(*, contribution_bounds_per_group => (0, 5)) AS n", options=_OPTIONS)
    answered(path, text, shards=3, runner=DIRECT)
    assert seen == [(0o700, {0o600}, [f"shard-000{i}.arrow" for i in range(3)])]
    assert not list(tmp_path.glob(".dpstream-work-*"))


def test_nothing_is_charged_for_a_runner_that_cannot(tmp_path: Path) -> None:
    path = company(tmp_path)
    catalog = load_catalog(path)
    for runner in (
        Runner("NoRunner"), Runner("DataflowRunner"), Runner("DirectRunner", ("--no_such_flag=1",))
    ):  # fmt: skip
        assert refusal(ask, catalog, TOTAL, runner=runner).startswith("UsageError --")
    table = pq.read_table(tmp_path / "visits-b.parquet")
    pq.write_table(table.rename_columns(["uid", "page", "seconds", "m"]),
                   tmp_path / "visits-b.parquet")  # fmt: skip
    assert refusal(ask, load_catalog(path), TOTAL, runner=DIRECT) == "UsageError table visits"
    text = path.read_text().replace('path = "people.csv"', 'uri = "sqlite:///people.db"')
    accounts.write(path, text)
    assert (
        refusal(stage.Spread, DIRECT, question_of(JOINED, load_catalog(path)), load_catalog(path))
        == "UsageError table people"
    )
    assert charges(tmp_path) == []


def test_a_file_that_comes_after_the_pieces_were_listed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, real = load_catalog(company(tmp_path)), stage.Spread

    def late(*of: Any) -> stage.Spread:
        made = real(*of)
        pq.write_table(visits(), tmp_path / "visits-late.parquet")
        return made

    monkeypatch.setattr(asking, "Spread", late)
    assert refusal(ask, catalog, TOTAL, runner=DIRECT) == "PolicyError input"


# Flink ends the connections of a job that failed; a thread of Beam's may still be reading then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "runner", [DIRECT, pytest.param(Runner("FlinkRunner"), marks=pytest.mark.slow)],
    ids=lambda runner: runner.name,
)  # fmt: skip
def test_a_worker_that_fails_is_a_coded_error_and_the_run_goes_on(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runner.name == "FlinkRunner":
        need_flink()
    path, real = company(tmp_path), work.write_sums

    def fails(*_: Any) -> None:
        raise ValueError("user 77 on p3")

    monkeypatch.setattr(flow, "write_sums", fails)
    with pytest.raises(RunError) as failed:
        ask(load_catalog(path), TOTAL, shards=1, runner=runner)
    assert "77" not in str(failed.value) and failed.value.__cause__ is None
    assert not list(tmp_path.glob(".dpstream-work-*")) and len(charges(tmp_path)) == 1
    monkeypatch.setattr(flow, "write_sums", real)
    answer = ask(load_catalog(path), TOTAL)  # here or there: it is one run
    assert not answer.charged and len(charges(tmp_path)) == 1
    assert answer.receipt == answered(path, TOTAL).receipt


@pytest.mark.parametrize(
    ("error", "match"),
    [(too_large(), "more memory"), (not_run(), "rewritten form"),
     (RunError("table visits", "has a file that is not Parquet", "correct it"), "not Parquet")],
    ids=["memory", "duckdb", "file"],
)  # fmt: skip
def test_a_remote_worker_s_error_keeps_its_words(
    error: RunError, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a worker elsewhere a runner gives the text of its error, among other texts."""
    real, shards = flow.build, list[int]()

    def elsewhere(pipeline: Any, task: Any, pieces: Any) -> Any:
        shards.append(task.shards)
        if len(shards) > 1:
            return real(pipeline, task, pieces)
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        raise_ = RuntimeError(f"job 7 failed: user 77 ...\n{name}: {error} [while running 'Work']")
        monkeypatch.setattr(pipeline, "run", lambda: _raise(raise_))
        return None

    monkeypatch.setattr(flow, "build", elsewhere)
    path = company(tmp_path)
    if isinstance(error, MemoryLimitError):  # fewer units at once
        answer = ask(load_catalog(path), TOTAL, shards=1, runner=DIRECT)
        assert shards == [1, 4, 4] and answer.table.num_rows == 1  # bounds, then sums
        return
    with pytest.raises(RunError, match=match) as failed:
        ask(load_catalog(path), TOTAL, shards=1, runner=DIRECT)
    assert "77" not in str(failed.value) and failed.value.fix == error.fix


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.slow
def test_sums_that_do_not_come_and_shards_that_are_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, tried = company(tmp_path), work.write_sums, list[str]()
    monkeypatch.setattr(flow, "write_sums", lambda *_: None)  # elsewhere than the launcher looks
    assert refusal(ask, load_catalog(path), TOTAL, shards=1, runner=DIRECT) == "RunError runner"

    def short(place: Path, *more: Any) -> None:
        tried.append(place.name)
        if len(tried) == 1:
            raise MemoryLimitError("statement", "needs more memory", "select less")
        real(place, *more)

    monkeypatch.setattr(flow, "write_sums", short)
    answer = ask(load_catalog(path), TOTAL, shards=1, runner=DIRECT)
    assert not answer.charged and len(charges(tmp_path)) == 1
    assert sorted(tried[1:]) == [f"shard-000{i}.arrow" for i in range(4)]
    assert answer.receipt == answered(path, TOTAL).receipt
