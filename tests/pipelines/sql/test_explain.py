"""What statements would cost and whether they would be answered, and PEP 249 for answers."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dpstream
from dpstream.accounting.query.calibration import expected
from dpstream.accounting.query.grids import regridded
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.door import dbapi
from dpstream.pipelines.operate.account_view import view
from dpstream.pipelines.render.account import accepted_lines
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.explain import as_builtins, explain, explained, split
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import question_of
from tests import accounts
from tests.golden.pinned import check, of_refusals, refusal
from tests.golden.refusals import Refused
from tests.pipelines.sql.asking import COUNTED, OPTIONS, charges, data_set, dp, visits

_TEXT = dp(f"page, {COUNTED} AS n, COUNT(DISTINCT uid) AS u, AVG(seconds) AS a")


def test_statements_end_at_semicolons_that_are_no_text() -> None:
    text = "SELECT ';' AS a; -- one; two\nSELECT 2 /* ; */;\n;  "
    assert [part.strip() for part in split(text)] == [
        "SELECT ';' AS a", "-- one; two\nSELECT 2 /* ; */",
    ]  # fmt: skip
    assert split("  ") == [] and split("SELECT 1") == ["SELECT 1"]
    assert split("a;\n b; c") == ["a", "  \n b", "\n    c"]  # at their lines and columns
    assert refusal(split, "SELECT 'open") == "StatementError statement, line 1, column 8"


def test_explain_is_a_word() -> None:
    assert explained(" Explain\nSELECT 1") == f"{' ' * 8}\nSELECT 1"
    assert explained("\n explain SELECT 1") == f"\n{' ' * 9}SELECT 1"
    assert explained("SELECT 1") is None and explained("EXPLAINED x") is None


def test_no_data_is_read_and_nothing_charged(tmp_path: Path) -> None:
    catalog = load_catalog(data_set(tmp_path, kind="csv"))
    (tmp_path / "visits.csv").write_text("uid,page,seconds,n\n")  # its header is enough
    explanation = explain(catalog, [_TEXT, dp(f"{COUNTED} AS n", "FROM visits")])
    first, second = explanation.statements
    assert '"group_0"' in first.plan and first.selection is not None and second.selection is None
    assert [c["automatic"] for c in first.columns] == [False, False, True]
    one, all_of_them = (first.selection[f"even_chance_{w}"] for w in ("one_group", "all_groups"))
    assert first.selection["tau"] - 1 <= one <= all_of_them
    single = explain(catalog, _TEXT)
    assert (
        single.together["epsilon"] < explanation.together["epsilon"] < 4
        and explanation.acceptance.exit_code == 0
    )
    assert charges(tmp_path) == []
    assert as_builtins(explanation)["statements"][0]["cost"]["epsilon"] == 2.0


def test_files_without_the_declared_columns_are_refused_as_they_would_be(
    tmp_path: Path, refused: Refused
) -> None:
    catalog = load_catalog(data_set(tmp_path, kind="csv"))
    accepted, answered = explain(catalog, _TEXT), dp(f"page, {COUNTED} AS n")
    ask(catalog, answered)
    for change in (
        lambda path: path.write_text("uid,site,seconds,n\n1,a,1.0,1\n"),
        lambda path: path.unlink(),
    ):
        change(tmp_path / "visits.csv")
        caught = refused(ask, catalog, _TEXT)
        explanation = explain(catalog, _TEXT)
        assert explanation.acceptance.exit_code == caught.exit_code > 0
        assert explanation.statements[0].columns == accepted.statements[0].columns
        assert explain(catalog, answered).acceptance.refusal is None  # its answer reads no file
    assert len(charges(tmp_path)) == 1


def test_without_its_secret_a_statement_is_refused_as_it_would_be(
    tmp_path: Path, refused: Refused
) -> None:
    """And its figures are shown, because they do not depend on the secret."""
    catalog = load_catalog(data_set(tmp_path))
    before = explain(catalog, _TEXT)
    (tmp_path / "noise.secret").unlink()
    explanation = explain(catalog, _TEXT)
    refusal = explanation.acceptance.refusal
    assert refusal is not None and refusal.field == "secret"
    assert explanation.statements == before.statements
    refused(ask, catalog, _TEXT)


def test_what_is_promised_is_what_is_drawn(tmp_path: Path) -> None:
    catalog = load_catalog(data_set(tmp_path))
    text = dp(f"page, {COUNTED} AS n, COUNT(DISTINCT uid) AS u")
    columns = {c["name"]: c["parts"][0] for c in explain(catalog, text).statements[0].columns}
    answer = ask(catalog, text)
    for name, part in columns.items():
        low, high = (answer.intervals[name][end][0].as_py() for end in ("low", "high"))
        assert answer.intervals[name]["sd"][0].as_py() == part["sd"]
        assert (high - low) / 2 == part["within"]


def test_noise_without_bounds_says_what_it_is_to_be_multiplied_by(tmp_path: Path) -> None:
    """Against the noise for the bounds that a query may choose."""
    catalog = load_catalog(data_set(tmp_path))
    items = (
        "COUNT(*) AS n, SUM(seconds) AS s, AVG(seconds) AS a, VAR(seconds) AS v, "
        "STDDEV(n) AS d, MEDIAN(seconds) AS m, COUNT(DISTINCT uid) AS u"
    )
    text = dp(items, "FROM visits")
    statement, question = explain(catalog, text).statements[0], question_of(text, catalog)
    for low, high in ((-3.0, 8.0), (20.0, 25.0)):
        factors = {
            None: 1.0, "high": high, "max(|low|, |high|)": max(-low, high),
            "high - low": high - low, "(high - low)^2": (high - low) ** 2,
        }  # fmt: skip
        bounds = {c.name: (low, high) for c in question.plan.columns if c.automatic}
        bounds[question.names["n"]] = (0.0, high)
        plan = regridded(question.plan, bounds, question.gridded.bits)
        noises = {row["name"]: row for row in expected(plan, question.gridded.budget(plan))}
        assert [column["name"] for column in statement.columns] == list("nsavdmu")
        for column in statement.columns:
            real = noises[question.names[column["name"]]]
            assert column["automatic"] == (column["name"] != "u")
            assert column["assumed"] == ([0.0, 1.0] if column["automatic"] else None)
            for one, other in zip(column["parts"], real["parts"], strict=True):
                wanted = one["sd"] * factors[one["times"]]
                assert math.isclose(wanted, other["sd"], rel_tol=0.01), (column["name"], one)


@pytest.mark.parametrize(("part", "is_null"), [(0.5, True), (2, False)])
def test_the_units_that_chosen_bounds_need_are_told(
    tmp_path: Path, part: float, is_null: bool
) -> None:
    """With half of them the column is NULL in the answer, with twice as many it has a figure."""
    text = dp("AVG(seconds) AS a", "FROM visits")
    [column] = explain(load_catalog(data_set(tmp_path)), text).statements[0].columns
    units = round(column["null_below"] * part)
    assert units > 20
    catalog = load_catalog(data_set(tmp_path, visits(rows=20 * units, units=units)))
    assert ask(catalog, text).header.nulls == (("a",) if is_null else ())


def test_noise_of_a_chosen_count_of_groups_is_the_answers(tmp_path: Path) -> None:
    """A count of one row of a unit would join the test of groups; one of several rows does not."""
    catalog = load_catalog(data_set(tmp_path, visits(rows=20_000, units=2_000)))
    text = dp("page, COUNT(*) AS n", options=OPTIONS.replace("epsilon = 2", "epsilon = 8"))
    [explained] = explain(catalog, text).statements
    answer = ask(catalog, text)
    [(_, high)] = answer.header.bounds.values()
    assert high > 1 and explained.columns[0]["parts"][0]["times"] == "high"
    drawn = answer.intervals["n"]["sd"][0].as_py()
    assert math.isclose(explained.columns[0]["parts"][0]["sd"] * high, drawn, rel_tol=0.01)


def test_an_answered_statement_is_free_whatever_the_limit_is_now(tmp_path: Path) -> None:
    path, text = data_set(tmp_path), dp(f"page, {COUNTED} AS n")
    ask(load_catalog(path), text)
    accounts.set_limit(tmp_path / "ledger.db", (0.1, 1e-5))
    lowered = load_catalog(path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    acceptance = explain(lowered, text).acceptance
    assert acceptance.answered and acceptance.exit_code == 0 and acceptance.cost is None
    assert "no further charge" in accepted_lines(acceptance.as_dict(), "Can ask")[0]
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert not ask(lowered, text).charged
    assert explain(lowered, text, Asking(fresh=True)).acceptance.exit_code == 3


def test_the_account(tmp_path: Path) -> None:
    catalog = load_catalog(data_set(tmp_path, epsilon=2.0))
    before = view(catalog.ledger)
    assert before["spent"]["epsilon"] == 0 and before["charges"] == 0
    ask(catalog, dp(f"page, {COUNTED} AS n"))
    after = view(catalog.ledger)
    [charge] = charges(tmp_path)
    assert charge.mu is not None and after["charges"] == 1
    assert after["left"]["mu"] < before["left"]["mu"]
    assert math.isclose(after["left"]["mu"] ** 2 + charge.mu**2, before["left"]["mu"] ** 2,
                        rel_tol=1e-3)  # fmt: skip
    many = explain(catalog, [dp(f"page, COUNT(* CLAMPED BETWEEN 0 AND {i + 2})") for i in range(9)])
    assert many.acceptance.exit_code == 3


def test_both_families_of_noise_are_explained(tmp_path: Path) -> None:
    """In turn: the second statement is decided on what the first leaves."""
    catalog = load_catalog(data_set(tmp_path, epsilon=8.0))
    one = "COUNT(DISTINCT uid) AS u"
    texts = [dp(one, "FROM visits", f"epsilon = 1, delta = 1e-9{more}")
             for more in ("", ", optimise = answer", ", mechanism = gaussian")]  # fmt: skip
    explanation = explain(catalog, texts)
    rows = [{row["mechanism"]: row for row in s.families} for s in explanation.statements]
    assert [row["questions"] for row in rows[0].values()] == [76, 8]
    assert [row["questions"] for row in rows[1].values()] == [75, 5]
    assert list(rows[2]) == ["gaussian"] and rows[2]["gaussian"]["taken"]
    assert [row["gaussian"]["taken"] for row in rows[:2]] == [True, False]
    sds = [row["columns"][0]["parts"][0]["sd"] for row in rows[0].values()]
    assert sds == [pytest.approx(5.503, rel=1e-3), pytest.approx(1.357, rel=1e-3)]
    assert explanation.statements[1].cost["mu"] is None
    for text, statement in zip(texts, explanation.statements, strict=True):
        answer = ask(catalog, text)
        assert answer.header.mu == statement.cost["mu"]
    pure = explain(catalog, dp(one, "FROM visits", "epsilon = 0.5")).statements[0]
    assert [row["mechanism"] for row in pure.families] == ["geometric"]


ORDERED = dp(f"page, {COUNTED} AS n") + " ORDER BY page"


def test_rows_by_every_way(tmp_path: Path) -> None:
    path = data_set(tmp_path)
    with dpstream.connect(path) as connection:
        cursor = connection.cursor()
        assert (cursor.description, cursor.rowcount) == (None, -1)
        assert cursor.execute(ORDERED) is cursor
        table = cursor.fetch_arrow_table()
        assert [part[0] for part in cursor.description or ()] == ["page", "n"]
        assert cursor.rowcount == table.num_rows >= 3
        rows = [tuple(row.values()) for row in table.to_pylist()]
        assert cursor.fetchone() == rows[0]
        assert cursor.fetchmany(2) == rows[1:3] and cursor.fetchall() == rows[3:]
        assert cursor.fetchone() is None
        assert list(connection.execute(ORDERED)) == rows
        assert cursor.answer is not None and cursor.answer.header.epsilon == 2.0
        receipts = []
        ways: list[dict[str, Any]] = [{}, {"as_of": "May"}, {"as_of": "May"}, {"fresh": True}]
        for how in ways:
            answer = cursor.execute(ORDERED, **how).answer
            assert answer is not None
            receipts.append((answer.charged, answer.digest))
    assert [charged for charged, _ in receipts] == [False, True, False, True]
    assert receipts[2][1] == receipts[1][1] and len({digest for _, digest in receipts}) == 3
    assert len(charges(tmp_path)) == 3
    assert (dbapi.apilevel, dbapi.paramstyle) == ("2.0", "qmark")
    assert refusal(cursor.fetchall) == "UsageError connection"


def test_explain_and_refusals(tmp_path: Path) -> None:
    connection = dpstream.connect(data_set(tmp_path))
    cursor = connection.execute("explain " + ORDERED)
    plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "Can ask" in plan and "SELECT" in plan and cursor.answer is None
    calls: dict[str, Callable[[], object]] = {
        "parameters": lambda: cursor.execute(ORDERED, (1,)),
        "many": lambda: cursor.executemany(ORDERED, [(1,)]),
        "nothing yet": lambda: connection.cursor().fetchone(),
        "no SELECT": lambda: cursor.execute("DROP TABLE visits"),
    }
    for bad in ("SELECT 1", "EXPLAIN EXPLAIN SELECT 1", "EXPLAIN ", ""):
        calls[f"'{bad}'"] = partial(cursor.execute, bad)
    text = of_refusals(calls)
    assert charges(tmp_path) == []
    connection.close()
    text += "\n" + of_refusals({"a closed connection": connection.cursor})
    check(Path(__file__).with_name("cursors.txt"), text)
