"""A statement whose figures are in the account gets them at no charge; any other one pays."""

import contextlib
from pathlib import Path

import pyarrow as pa
import pytest

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.sql.explain import explain
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import question_of
from tests.pipelines.sql.asking import COUNTED, FRESH, OPTIONS, answer_to, charges, data_set, dp
from tests.pipelines.sql.shop import shop
from tests.pipelines.statements.test_statement import ACCEPTED

SUMMED = "SUM(seconds, contribution_bounds_per_group => (0, 900))"
STORED = dp(f"page, {COUNTED} AS n, {SUMMED} AS s, MEDIAN(seconds) AS m, COUNT(DISTINCT uid) AS u")
LESS = OPTIONS.replace("epsilon = 2", "epsilon = 0.5")


def _listed(pages: list[str], options: str) -> str:
    names = ", ".join(f"'{page}'" for page in pages)
    side = f"RIGHT JOIN (SELECT DISTINCT page FROM UNNEST([{names}]) AS page) AS p"
    rest = f"FROM visits AS v {side} ON v.page = p.page GROUP BY p.page"
    options = f"{options}, group_selection_strategy = PUBLIC_GROUPS"
    return dp(f"p.page AS page, {COUNTED} AS n", rest, options)


@pytest.mark.parametrize(
    "text",
    [
        dp(f"page, {COUNTED} AS views", options=LESS),
        dp(f"COUNT(DISTINCT uid) AS people, page AS p, {SUMMED} AS t", options=LESS),
        dp(f"{SUMMED} / {COUNTED} AS mean, page", options=LESS),
        dp("page, MEDIAN(seconds) AS m", options=LESS),
        f"SELECT SUM(n) AS n FROM ({dp(f'page, {COUNTED} AS n', options=LESS)}) WHERE page <> 'p1'",
        dp(f"page, {COUNTED} AS n", options=f"{LESS}, mechanism = GAUSSIAN"),
    ],
)
def test_the_same_figures_at_no_wider_an_interval_are_free(tmp_path: Path, text: str) -> None:
    data_set(tmp_path)
    stored = answer_to(tmp_path, STORED)
    assert explain(load_catalog(tmp_path), text).acceptance.run_id == stored.header.run_id
    answer = answer_to(tmp_path, text)
    assert not answer.charged and answer.receipt == stored.receipt
    assert len(charges(tmp_path)) == 1
    figures = {"views": "n", "n": "n", "people": "u", "t": "s", "m": "m"}
    if "page" in answer.table.column_names:
        for name in figures.keys() & set(answer.table.column_names):
            assert answer.table[name] == stored.table[figures[name]]
            assert answer.intervals[name] == stored.intervals[figures[name]]


@pytest.mark.parametrize(
    ("text", "how"),
    [
        (dp(f"page, {COUNTED} AS n", options=OPTIONS.replace("epsilon = 2", "epsilon = 3")), None),
        (dp(f"page, {COUNTED} AS n", options=OPTIONS.replace("= 12", "= 11")), None),
        (dp("page, COUNT(*, contribution_bounds_per_group => (0, 29)) AS n", options=LESS), None),
        (dp(f"page, {COUNTED} AS n", "FROM visits WHERE n > 0 GROUP BY page", LESS), None),
        (dp(f"page, n, {COUNTED} AS c", "FROM visits GROUP BY page, n", LESS), None),
        (dp(f"{COUNTED} AS n", "FROM visits", "epsilon = 0.5, delta = 1e-9"), None),
        (dp("page, MAX(seconds) AS m", options=LESS), None),
        (dp("page, AVG(seconds) AS m", options=LESS), None),
        (dp(f"page, {COUNTED} AS n", options=f"{LESS}, min_privacy_units_per_group = 9"), None),
        (dp(f"page, {COUNTED} AS n", options=LESS), FRESH),
        (dp(f"page, {COUNTED} AS n", options=LESS), Asking(as_of="yesterday")),
    ],
)
def test_another_figure_pays(tmp_path: Path, text: str, how: Asking | None) -> None:
    data_set(tmp_path)
    answer_to(tmp_path, STORED)
    assert answer_to(tmp_path, text, how or Asking()).charged
    assert len(charges(tmp_path)) == 2


def test_a_wider_answer_does_not_cover_a_narrower_one_later(tmp_path: Path) -> None:
    data_set(tmp_path)
    wide = answer_to(tmp_path, dp(f"page, {COUNTED} AS n", options=LESS))
    narrow = answer_to(tmp_path, STORED)
    again = answer_to(tmp_path, dp(f"page, {COUNTED} AS n", options=LESS))
    assert narrow.charged and again.receipt == wide.receipt
    least = dp(f"page, {COUNTED} AS n", options=LESS.replace("0.5", "0.25"))
    assert answer_to(tmp_path, least).receipt == wide.receipt  # the first one that covers it


@pytest.mark.parametrize(("groups", "charged"), [(4, False), (3, True)])
def test_fewer_listed_groups_are_free_if_no_unit_was_cut(
    tmp_path: Path, groups: int, charged: bool
) -> None:
    data_set(tmp_path)
    options = OPTIONS.replace("= 12", f"= {groups}")
    stored = answer_to(tmp_path, _listed(["p0", "p1", "p2", "none"], options))
    fewer = answer_to(
        tmp_path, _listed(["p2", "p0"], options.replace("epsilon = 2", "epsilon = 0.5"))
    )
    assert fewer.charged is charged
    assert fewer.table["page"].to_pylist() == ["p0", "p2"]
    if not charged:
        at = [stored.table["page"].to_pylist().index(page) for page in ("p0", "p2")]
        assert fewer.table["n"] == stored.table["n"].take(pa.array(at))
    assert answer_to(tmp_path, _listed(["p0", "p9"], options)).charged


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (dp(f"page, AVG(seconds) AS a, {SUMMED} AS t", options=LESS), ["page", "a", "t"]),
        (dp(f"{COUNTED} AS n", "FROM visits", "epsilon = 1, delta = 1e-9"), ["n"]),
        (dp("COUNT(DISTINCT uid) AS n", "FROM visits", "epsilon = 1, delta = 1e-9"), []),
    ],
)
def test_a_plan_offers_statements_that_cost_nothing(
    tmp_path: Path, text: str, columns: list[str]
) -> None:
    data_set(tmp_path)
    rest = "FROM visits GROUP BY page, n"
    answer_to(tmp_path, dp(f"page, n, {COUNTED} AS c, {SUMMED} AS s", rest))
    answer_to(tmp_path, dp(f"page, {SUMMED} AS s, COUNT(seconds) AS c"))
    [plan] = explain(load_catalog(tmp_path), text).statements
    answers = [answer_to(tmp_path, offer.statement) for offer in plan.offers]
    assert [answer.table.column_names for answer in answers] == ([columns] if columns else [])
    assert not any(answer.charged for answer in answers)


def test_the_stored_text_asks_the_same_question() -> None:
    catalog, again = shop(), dict[str, str]()
    for text in ACCEPTED:
        with contextlib.suppress(DpstreamError):  # some need other tables
            question = question_of(text, catalog)
            again[question.statement.text] = question.digest
    outcomes = list[bool]()
    for text, digest in again.items():
        with contextlib.suppress(DpstreamError):  # a report's column may need the outer names
            outcomes.append(question_of(text, catalog).digest == digest)
    assert all(outcomes) and len(outcomes) >= len(again) - 1 > 40
