"""The work of a shard: every unit is in one turn, and its text does not depend on literals."""

from dpstream.pipelines.sql.query_plan import question_of
from dpstream.pipelines.sql.work import Work
from tests.pipelines.sql.rows import database, of_units, ugly_rows
from tests.pipelines.sql.shop import shop

_TEXT = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9, "
    "max_groups_contributed = 4) page, COUNT(*) AS n, "
    "MEDIAN(seconds, contribution_bounds_per_row => (0, 9)) AS m FROM visits "
    "WHERE page <> ' GROUP BY \"unit\"' GROUP BY page"
)


def test_turns_of_units_are_all_rows_once() -> None:
    question = question_of(_TEXT, shop())
    work = Work.of(question.per_column, shop(), question.plan, (b"run", b"question"), wide=True)
    connection = database(shop(), ugly_rows(3))
    all_rows = connection.sql(work.stage_one()).fetchall()
    turns = [connection.sql(work.stage_one(3, i)).fetchall() for i in range(3)]
    assert sorted(map(str, all_rows)) == sorted(str(row) for rows in turns for row in rows)
    units = [{row[0] for row in rows} for rows in turns]
    assert len(all_rows) > 10 and all(units) and sum(map(len, units)) == len(set.union(*units))
    subset_rows = database(shop(), of_units(ugly_rows(3), {1, 2})).sql(work.stage_one()).fetchall()
    assert sorted(map(str, subset_rows)) == sorted(str(row) for row in all_rows if row[0] in (1, 2))
