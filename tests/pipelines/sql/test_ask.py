"""A statement from the text to the committed answer, on real files."""

import contextlib
import math
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import duckdb
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.sql import ask as asking
from dpstream.pipelines.sql import stage
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.tables.engine import too_large
from dpstream.pipelines.tables.registration import register
from dpstream.state.ledger.contract import AnswerLog
from tests.golden.pinned import refusal
from tests.golden.refusals import Refused
from tests.pipelines.sql.asking import (
    ALL,
    COUNTED,
    FRESH,
    answer_to,
    charges,
    data_set,
    dp,
    visits,
    without_noise,
)
from tests.pipelines.tables.test_registration import people, shop_files

#: So that the catalog needs no file for its columns.
_UNTYPED = 'path = "visits.parquet"\nunit_column = "uid"\n'
_TYPED = f'{_UNTYPED}columns = {{ uid = "INT64", page = "STRING", seconds = "FLOAT64" }}\n'
_PUBLIC = "FROM visits AS v RIGHT JOIN (SELECT DISTINCT page FROM pages) AS p ON v.page = p.page "


def _truth(folder: Path, text: str) -> list[tuple[Any, ...]]:
    con = duckdb.connect()
    con.execute(f"CREATE VIEW visits AS SELECT * FROM '{folder}/visits.parquet'")
    try:
        return con.execute(text).fetchall()
    finally:
        con.close()


def test_an_answer_is_near_its_data_and_charged_once(tmp_path: Path) -> None:
    data_set(tmp_path)
    first = answer_to(tmp_path, dp(ALL) + " ORDER BY page")
    again = answer_to(tmp_path, "/* again */ " + dp(ALL).lower() + "\n order by page")
    assert first.charged and not again.charged
    assert again.receipt == first.receipt and again.header == first.header
    [charge] = charges(tmp_path)
    assert (charge.kind, charge.epsilon, charge.delta) == ("sql", 2.0, 1e-9)
    assert charge.mu == first.header.mu and charge.identity.endswith('"uid","type":"int"}')
    exact = dict(_truth(tmp_path, "SELECT page, COUNT(*) FROM visits GROUP BY page"))
    rows = first.table.to_pylist()
    assert len(rows) >= 8 and [row["page"] for row in rows] == sorted(r["page"] for r in rows)
    for row, sd in zip(rows, first.intervals["n"]["sd"].to_pylist(), strict=True):
        assert abs(row["n"] - exact[row["page"]]) < 6 * sd
        assert row["s_noise_low"] < row["s"] < row["s_noise_high"]
        assert row["m"] is None or 0 <= row["m"] <= 100
    assert "n_noise_low" not in first.table.column_names  # only where WITH REPORT asks for it
    assert set(first.intervals) == {"n", "s", "a", "m", "u"}


def test_without_noise_it_is_duckdb_s_own_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_set(tmp_path)
    without_noise(monkeypatch)
    rest = f"{_PUBLIC} GROUP BY p.page ORDER BY p.page"
    items = ALL.replace("page,", "p.page,", 1)
    options = (
        "epsilon = 2, delta = 1e-9, max_groups_contributed = 12, max_rows_contributed = 100, "
        "group_selection_strategy = PUBLIC_GROUPS"
    )
    rows = answer_to(tmp_path, dp(items, rest, options)).table.to_pylist()
    truth = _truth(
        tmp_path,
        "SELECT page, SUM(c), SUM(s), SUM(t) / SUM(k), COUNT(*), SUM(k) FROM (SELECT page, uid, "
        "LEAST(COUNT(*), 30) AS c, LEAST(COALESCE(SUM(seconds), 0), 900) AS s, SUM(seconds) AS t, "
        "COUNT(seconds) AS k FROM visits GROUP BY page, uid) GROUP BY page ORDER BY page",
    )
    own, sds = {row[0]: row[1:] for row in truth}, list[float]()
    assert [row["page"] for row in rows] == sorted(f"p{i}" for i in range(12))
    for row in rows:
        n, s, a, u, k = own.get(row["page"], (0, 0, None, 0, 0))
        assert (row["n"], row["u"]) == (n, u)
        assert math.isclose(row["s"], s, abs_tol=1e-9)
        if a is None:
            assert row["a"] is None and row["m"] is None
        else:
            # Drawn towards the middle of the bounds by c^2 / (k^2 + c^2), c the sd of the count.
            drawn = (row["a"] - float(a)) / (50 - float(a))
            sds.append(k * math.sqrt(drawn / (1 - drawn)))
    assert len(sds) > 5 and sds[0] > 1 and math.isclose(min(sds), max(sds), rel_tol=1e-6)


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize("shards", [1, 3])
def test_columns_may_have_any_name_in_backticks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shards: int
) -> None:
    """Of spaces, signs and upper case; only the name of the program's own column is taken."""
    without_noise(monkeypatch)
    names = {"uid": "User ID", "page": "Row Number #", "seconds": "cost (€/min)", "n": "1st #"}
    answers = list[Any]()
    for folder, named in ((tmp_path / "plain", {}), (tmp_path / "named", names)):
        folder.mkdir()
        project = data_set(folder, visits().rename_columns(named), kind)
        text, statement = project.read_text(), dp(ALL, "FROM visits WHERE n > 0 GROUP BY page")
        for old, new in named.items():
            text = text.replace(f'unit_column = "{old}"', f'unit_column = "{new}"')
            text = re.sub(rf"(?<=[{{,]) {old} (?== \"[A-Z])", f' "{new}" ', text, count=1)
            statement = re.sub(rf"\b{old}\b(?! =)", f"`{new.lower()}`", statement)
        project.write_text(text)
        released = answer_to(folder, statement.replace("AS `1st #`", "AS n"), shards=shards).table
        columns = released.drop_columns("m").to_pydict().values()  # the median samples rows
        answers.append(sorted(zip(*columns, strict=True)))
    assert answers[0] == answers[1] and len(answers[0]) > 5


def test_laplace_is_charged_plain_and_needs_no_groups(tmp_path: Path) -> None:
    data_set(tmp_path)
    text = dp(f"{COUNTED} AS n", "FROM visits", "epsilon = 1, mechanism = GEOMETRIC")
    answer = answer_to(tmp_path, text)
    [charge] = charges(tmp_path)
    assert (charge.mu, charge.delta, charge.threshold_delta) == (None, 0.0, 0.0)
    assert answer.table.num_rows == 1 and abs(answer.table["n"][0].as_py() - 4_000) < 1_000


@pytest.mark.parametrize("runner", [None, Runner("DirectRunner")], ids=["here", "workers"])
def test_a_repeated_statement_looks_at_no_file(
    tmp_path: Path, runner: Runner | None, refused: Refused
) -> None:
    """Not even at whether a table's file, or a note about its keys, is there."""
    path = shop_files(tmp_path)
    path.write_text(path.read_text().replace(_UNTYPED, _TYPED))
    register(load_catalog(path))
    texts = [
        dp(f"item, {COUNTED} AS n", "FROM orders GROUP BY item"), dp(f"page, {COUNTED} AS n")
    ]  # fmt: skip
    first = [answer_to(tmp_path, text, runner=runner) for text in texts]
    for name in ("people.csv", "orders.csv", "pages.csv", "visits.parquet", "ledger.db.keys"):
        (tmp_path / name).unlink()
    again = [answer_to(tmp_path, text, runner=runner) for text in texts]
    assert [one._replace(charged=True) for one in again] == first
    for text in texts:
        refused(answer_to, tmp_path, text, FRESH, runner=runner)
    assert len(charges(tmp_path)) == 2


def test_a_question_is_known_by_where_its_tables_lie_seen_from_the_project(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    data_set(here)
    first = answer_to(here, dp(f"page, {COUNTED} AS n"))
    here.rename(there)
    (there / "dpstream.toml").rename(there / "other.toml")
    again = ask(load_catalog(there / "other.toml"), dp(f"page, {COUNTED} AS n"))
    assert (again.charged, again.receipt) == (False, first.receipt)
    shutil.copyfile(there / "visits.parquet", there / "copy.parquet")
    text = (there / "other.toml").read_text().replace("visits.parquet", "copy.parquet")
    (there / "other.toml").write_text(text)
    other = ask(load_catalog(there / "other.toml"), dp(f"page, {COUNTED} AS n"))
    assert other.charged  # a table elsewhere is another, whatever its rows are


def test_a_cut_off_statement_continues_on_other_rows_with_other_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where somebody has seen the first answer, and restored the account since."""
    data_set(tmp_path)
    text = dp(f"{COUNTED} AS n", "FROM visits", "epsilon = 1e-3, mechanism = GEOMETRIC")
    charged, answers = list[str](), list[tuple[str, float]]()
    commit = AnswerLog.commit

    def lost(register: AnswerLog, run_id: str, receipt: bytes) -> None:
        charged.append(run_id)
        raise KeyboardInterrupt

    monkeypatch.setattr(AnswerLog, "commit", lost)
    with pytest.raises(KeyboardInterrupt):
        answer_to(tmp_path, text)
    monkeypatch.setattr(AnswerLog, "commit", commit)
    account = (tmp_path / "ledger.db").read_bytes()
    [head] = tmp_path.rglob("*.head")
    seen = head.read_bytes()
    for rows in (4_000, 4_000, 3_999):  # twice the same
        (tmp_path / "ledger.db").write_bytes(account)
        head.write_bytes(seen)  # restored with the account, which nobody can notice
        data_set(tmp_path, visits().slice(0, rows))
        answer = answer_to(tmp_path, text)
        assert not answer.charged
        answers.append((answer.header.run_id, answer.table["n"][0].as_py() - rows))
    assert {run_id for run_id, _ in answers} == set(charged) and len(charges(tmp_path)) == 1
    assert answers[0] == answers[1]  # the same rows: the same noise
    assert answers[2][1] not in (answers[0][1], answers[0][1] + 1)


def test_a_key_that_changes_after_it_was_checked_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    shop_files(tmp_path)
    catalog = load_catalog(tmp_path)
    register(catalog)
    text, begin = dp(f"item, {COUNTED} AS n", "FROM orders GROUP BY item"), AnswerLog.begin

    def late(*of: Any) -> Any:
        begun = begin(*of)
        people(tmp_path, "77123,c77\n")
        return begun

    monkeypatch.setattr(AnswerLog, "begin", late)
    caught = refused(ask, catalog, text)
    assert caught.field == "input" and len(charges(tmp_path)) == 1
    monkeypatch.setattr(AnswerLog, "begin", begin)
    assert refusal(ask, catalog, text) == "PolicyError table people"
    people(tmp_path)
    assert not ask(catalog, text).charged and len(charges(tmp_path)) == 1


def test_nothing_is_charged_for_what_cannot_run_or_is_refused(
    tmp_path: Path, refused: Refused
) -> None:
    data_set(tmp_path, epsilon=0.2)
    assert refusal(answer_to, tmp_path, dp(f"page, {COUNTED} AS n")) == "PolicyError account.limit"
    assert (
        refusal(answer_to, tmp_path, "SELECT page FROM visits")
        == "StatementError statement, line 1, column 1"
    )
    small = dp("page, SUM(page + 1, contribution_bounds_per_group => (0, 1)) AS s")
    failed = refused(lambda: answer_to(tmp_path, small.replace("epsilon = 2", "epsilon = 0.01")))
    assert failed.__cause__ is None and "page" not in str(failed)
    assert charges(tmp_path) == []


@pytest.mark.parametrize("epsilon", [1e-12, 1e-8, 1e-6, 1e-3])
def test_a_tiny_budget_ends_alike_with_and_without_rows(tmp_path: Path, epsilon: float) -> None:
    """Noise that cannot be drawn is refused before the charge, also where no group has a row."""
    options = f"epsilon = {epsilon}, delta = 1e-8, max_groups_contributed = 3, mechanism = gaussian"
    item, ended = "page, COUNT(*, contribution_bounds_per_group => (0, 5)) AS n", []
    data_set(tmp_path)
    for unit in (1, -1):
        rest = f"FROM visits WHERE uid = {unit} GROUP BY page"
        try:
            answer_to(tmp_path, dp(item, rest, options))
            ended.append("answered")
        except UsageError as refused:
            ended.append(refused.field)
    assert ended[0] == ended[1]
    assert len(charges(tmp_path)) == ended.count("answered")
    assert (ended[0] == "answered") == (epsilon > 1e-7)


def test_ugly_data_never_raises(tmp_path: Path) -> None:
    """Rows that are no rows, numbers that are none: NULL, or not there."""
    data_set(tmp_path, kind="csv")
    ugly = ["x,p0,1,1", "5,p0,nan,2", "6,p0,inf,99999999999999999999", "7,,1e400,", ",p0,3,3",
            "8,p1,-1e308,-9223372036854775808", "9,p0", "1,p0,2,3,4", '"1,p0'] * 2  # fmt: skip
    with open(tmp_path / "visits.csv", "a") as file:
        file.write("\n".join(ugly) + "\n")
    items = (
        f"page, {COUNTED} AS n, SUM(n / (n - 1), contribution_bounds_per_group => (0, 9)) AS d, "
        "SUM(n * n * n * 4611686018427387904, contribution_bounds_per_group => (0, 9)) AS o, "
        "AVG(seconds * 1e300, contribution_bounds_per_group => (0, 9)) AS a"
    )
    assert answer_to(tmp_path, dp(items)).table.num_rows >= 5


def test_an_outer_query_that_fails_does_not_undo_the_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_set(tmp_path)
    text = f"SELECT page, n + 1 AS m FROM ({dp(f'page, {COUNTED} AS n')}) AS t ORDER BY n"
    real, draws = stage.outer, list[str]()
    drawn = asking.drawn

    def fails(question: Any, engine: Any, rows: Any) -> Any:
        if not rows[0].num_rows:  # the check before the charge
            return real(question, engine, rows)
        raise too_large()

    def counted(*of: Any) -> bytes:
        draws.append("")
        return drawn(*of)

    monkeypatch.setattr(asking, "drawn", counted)
    monkeypatch.setattr(asking, "outer", fails)
    for _ in range(2):
        assert refusal(answer_to, tmp_path, text) == "RunError statement"
    assert len(charges(tmp_path)) == len(draws) == 1
    monkeypatch.setattr(asking, "outer", real)
    first = answer_to(tmp_path, text)
    assert not first.charged and len(draws) == 1
    counts = first.table["m"].to_pylist()
    assert len(counts) >= 8 and counts == sorted(counts)
    assert first.table.column_names == ["page", "m"]
    assert answer_to(tmp_path, text).receipt == first.receipt


INNER = dp(f"page, {COUNTED} AS n")
JOINED = f"SELECT p.title, v.n FROM ({INNER}) AS v JOIN pages AS p ON v.page = p.page"


def test_a_public_table_that_the_outer_query_alone_reads_is_no_part_of_the_question(
    tmp_path: Path,
) -> None:
    """The outer query works on the released rows and on what the table holds now."""
    project = data_set(tmp_path)
    pages, first = tmp_path / "pages.csv", answer_to(tmp_path, JOINED)
    assert first.table.num_rows >= 8
    before = pages.read_text()
    pages.write_text("page,title\np0,Other\n")
    other = answer_to(tmp_path, JOINED)
    assert other.table["title"].to_pylist() == ["Other"] and other.receipt == first.receipt
    pages.unlink()
    assert refusal(answer_to, tmp_path, JOINED) == "RunError table pages"
    assert answer_to(tmp_path, INNER).receipt == first.receipt
    pages.write_text(before)
    assert answer_to(tmp_path, JOINED) == first._replace(charged=False)
    more = '[table.more]\npath = "pages.csv"\npublic = true\ncolumns = { page = "STRING" }\n'
    project.write_text(project.read_text() + more)
    assert not answer_to(tmp_path, JOINED.replace("JOIN pages", "JOIN more")
                         .replace("p.title", "p.page")).charged  # fmt: skip
    assert len(charges(tmp_path)) == 1


@pytest.mark.parametrize("change", ["gone", "replaced"])
def test_an_outer_query_whose_table_changes_is_asked_again_of_the_released_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, refused: Refused
) -> None:
    """Without a look at private rows, and at no charge."""
    path, pages = data_set(tmp_path, kind="csv"), tmp_path / "pages.csv"
    step = "drawn" if change == "gone" else "outer"
    real, before = getattr(asking, step), pages.read_text()

    def late(*of: Any, **more: Any) -> Any:
        out = real(*of, **more)
        if not more:
            pages.unlink() if change == "gone" else pages.write_text(before + "p0,another\n")
        return out

    monkeypatch.setattr(asking, step, late)
    caught = refused(answer_to, tmp_path, JOINED)
    assert caught.field == ("table pages" if change == "gone" else "input")
    monkeypatch.setattr(asking, step, real)
    (tmp_path / "visits.csv").unlink()
    pages.write_text(before.replace("Title", "New"))
    answer = ask(load_catalog(path), JOINED)
    titles = answer.table["title"].to_pylist()
    assert len(titles) >= 8 and all(title.startswith("New") for title in titles)
    assert ask(load_catalog(path), JOINED) == answer
    assert not answer.charged and len(charges(tmp_path)) == 1


#: Public tables that are read before the noise: as groups, and joined with private rows.
BEFORE_NOISE = {
    "groups": dp(
        f"p.page, {COUNTED} AS n", f"{_PUBLIC} GROUP BY p.page",
        "epsilon = 2, delta = 1e-9, max_groups_contributed = 12, "
        "group_selection_strategy = PUBLIC_GROUPS",
    ),
    "joined": dp(
        f"p.title, {COUNTED} AS n",
        "FROM visits AS v JOIN pages AS p ON v.page = p.page GROUP BY p.title",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["csv", "sqlite"])
@pytest.mark.parametrize("text", BEFORE_NOISE.values(), ids=list(BEFORE_NOISE))
def test_a_public_table_that_is_read_before_the_noise_is_part_of_the_question(
    tmp_path: Path, kind: str, text: str, refused: Refused
) -> None:
    """By its content: wherever it lies, and whatever its file looks like."""
    path, place = data_set(tmp_path), tmp_path / "pages.csv"
    config, rows = path.read_text(), place.read_text()
    at = 'path = "pages.csv"'
    assert at in config

    def put(content: str, name: str) -> None:
        name = f"{name}.{kind}"
        (tmp_path / name).unlink(missing_ok=True)
        if kind == "csv":
            path.write_text(config.replace(at, f'path = "{name}"'))
            (tmp_path / name).write_text(content)
            return
        path.write_text(config.replace(at, f'uri = "sqlite:///{tmp_path / name}"\nremote = "p"'))
        lines = [line.split(",") for line in content.splitlines()[1:]]
        with contextlib.closing(sqlite3.connect(tmp_path / name)) as database:
            database.execute("CREATE TABLE p (page TEXT, title TEXT)")
            database.executemany("INSERT INTO p VALUES (?, ?)", lines)
            database.commit()

    seen = []
    for content, name in ((rows, "a"), (rows + "p99,Title 1\n", "a"), (rows, "b")):
        put(content, name)
        seen.append(answer_to(tmp_path, text))
    assert [one.charged for one in seen] == [True, True, False]
    assert seen[2].receipt == seen[0].receipt and len(charges(tmp_path)) == 2
    put(rows.replace("p0", "p00"), "b")
    monkey = pytest.MonkeyPatch()
    begin = AnswerLog.begin

    def late(*of: Any) -> Any:  # the table changes between its digest and its scan
        put(rows.replace("p1", "p11"), "b")
        return begin(*of)

    monkey.setattr(AnswerLog, "begin", late)
    with monkey.context():
        caught = refused(answer_to, tmp_path, text)
    monkey.undo()
    assert caught.field == "input" and len(charges(tmp_path)) == 3
    put(rows.replace("p0", "p00"), "b")
    assert not answer_to(tmp_path, text).charged


def test_a_run_without_a_runner_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    data_set(tmp_path)
    left = tmp_path / ".dpstream-work-abc"
    left.mkdir()
    (left / "lock").touch()
    answer_to(tmp_path, dp(f"page, {COUNTED} AS n"))
    assert not left.exists()
