"""Exact tables of an office's files by SQL, with none of the engine's parts.

Written from the definition of the tables and, for households, from what the public production
program does with the totals of persons.  Everything is read as text.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb

from tests.pipelines.tabulation.office import Office

#: Lower edges of ages by how many bins there are.
AGES = {
    4: (0, 18, 45, 65),
    9: (0, 5, 18, 25, 35, 45, 55, 65, 75),
    23: (0, 5, 10, 15, 18, 20, 21, 22, 25, 30, 35, 40, 45, 50, 55, 60, 62, 65, 67, 70, 75, 80, 85),
}  # fmt: skip
_T3 = {0: "1,2,3,4,5", 1: "1,2,3", 2: "1", 3: "2,3", 4: "2", 5: "3", 6: "4,5", 7: "4", 8: "5"}
_T4 = {0: "1,2,3,4", 1: "1", 2: "2", 3: "3,4"}
#: Data cells by detail.
CELLS = {
    "t3": ((0,), (0, 1, 6), (0, 1, 2, 3, 6, 7, 8), tuple(range(9))),
    "t4": ((0,), (0, 1, 2, 3)),
}
_GROUPS = """
CREATE TABLE iteration AS
SELECT ITERATION_CODE AS code, LEVEL AS level, ALONE = 'True' AS alone, false AS ethnic,
       DETAILED_ONLY = 'True' AS detailed, COARSE_ONLY = 'True' AS coarse
FROM file('race-characteristic-iterations.txt') WHERE LEVEL <> '0'
UNION ALL
SELECT ITERATION_CODE, LEVEL, false, true, DETAILED_ONLY = 'True', COARSE_ONLY = 'True'
FROM file('ethnicity-characteristic-iterations.txt') WHERE LEVEL <> '0';
CREATE TABLE record AS SELECT row_number() OVER () AS id, * FROM file('{records}');
CREATE TABLE race AS
SELECT DISTINCT id, code FROM (UNPIVOT (SELECT id, {races} FROM record) ON {races}
                               INTO NAME place VALUE code) WHERE code <> 'Null';
CREATE TABLE map AS SELECT ITERATION_CODE AS iteration, RACE_ETH_CODE AS code
FROM file('race-and-ethnicity-code-to-iteration.txt');
CREATE TABLE many AS SELECT id, count(*) AS codes FROM race GROUP BY id;
CREATE TABLE member AS
SELECT id, iteration FROM race JOIN map USING (code) JOIN iteration i ON i.code = iteration
WHERE NOT ethnic AND NOT alone GROUP BY id, iteration
UNION ALL
SELECT id, iteration FROM race JOIN map USING (code) JOIN iteration i ON i.code = iteration
JOIN many USING (id) WHERE NOT ethnic AND alone
GROUP BY id, iteration, codes HAVING count(DISTINCT race.code) = codes
UNION ALL
SELECT id, iteration FROM record JOIN map ON QSPAN = code JOIN iteration i ON i.code = iteration
WHERE ethnic;
CREATE TABLE block AS
SELECT TABBLKST || TABBLKCOU || TABTRACTCE || TABBLK AS block, TABBLKST AS state,
       TABBLKST || TABBLKCOU AS county, TABBLKST || TABBLKCOU || TABTRACTCE AS tract,
       CASE WHEN PLACEFP <> '99999' THEN TABBLKST || PLACEFP END AS place,
       CASE WHEN AIANNHCE <> '9999' THEN AIANNHCE END AS aiannh
FROM file('GRF-C.txt') WHERE TABBLKST IN ({states});
CREATE TABLE region AS
SELECT * FROM (
  SELECT block, 'USA' AS kind, '1' AS region FROM block WHERE state <> '72'
  UNION ALL SELECT block, 'STATE', state FROM block WHERE state <> '72'
  UNION ALL SELECT block, 'COUNTY', county FROM block WHERE state <> '72'
  UNION ALL SELECT block, 'TRACT', tract FROM block WHERE state <> '72'
  UNION ALL SELECT block, 'PLACE', place FROM block WHERE state <> '72'
  UNION ALL SELECT block, 'AIANNH', aiannh FROM block WHERE state <> '72'
  UNION ALL SELECT block, 'PR-STATE', state FROM block WHERE state = '72'
  UNION ALL SELECT block, 'PR-COUNTY', county FROM block WHERE state = '72'
  UNION ALL SELECT block, 'PR-TRACT', tract FROM block WHERE state = '72'
  UNION ALL SELECT block, 'PR-PLACE', place FROM block WHERE state = '72'
) WHERE region IS NOT NULL;
CREATE TABLE pop AS
SELECT DISTINCT region, kind, code, level, detailed FROM region, iteration
WHERE CASE WHEN kind IN ('USA', 'STATE', 'PR-STATE') THEN NOT coarse ELSE NOT detailed END;
CREATE TABLE inside AS
SELECT region, kind, iteration AS code, record.* EXCLUDE (id)
FROM record JOIN member USING (id)
JOIN region ON block = TABBLKST || TABBLKCOU || TABTRACTCE || TABBLK
JOIN pop USING (region, kind) WHERE pop.code = iteration;
"""


class Oracle:
    """The exact tables of an office.

    Args:
        states: FIPS codes that run.
    """

    def __init__(self, office: Office, program: str, states: list[str], races: int = 8) -> None:
        self._db = duckdb.connect()
        records = {"p": "person-records.txt", "h": "household-records.txt"}[program]
        text = _GROUPS.format(
            records=records,
            races=", ".join(f"QRACE{i + 1}" for i in range(races)),
            states=", ".join(f"'{state}'" for state in states),
        )
        for name in {part.split("'")[0] for part in text.split("file('")[1:]}:
            text = text.replace(f"file('{name}')", _file(office.path(name)))
        self._db.execute(text)

    def totals(self) -> dict[tuple[str, ...], tuple[int, str, bool]]:
        """By (region, kind, iteration): records, level of the iteration, DETAILED_ONLY."""
        rows = self._db.execute(
            "SELECT region, kind, code, count(inside.QSPAN), level, detailed FROM pop "
            "LEFT JOIN inside USING (region, kind, code) GROUP BY ALL"
        ).fetchall()
        return {row[:3]: row[3:] for row in rows}

    def exact_t1(self) -> dict[tuple[str, ...], int]:
        """What is published of totals without noise, where zeros are suppressed: below the state
        those above 0."""
        state = ("USA", "STATE", "PR-STATE")
        return {
            key: count for key, (count, *_) in self.totals().items() if count > 0 or key[1] in state
        }

    def ages(self, bins: int) -> dict[tuple[str, ...], int]:
        """By group and (AGESTART, AGEEND, SEX): how many; those of nobody are not there."""
        edges = AGES[bins]
        ends = (*(edge - 1 for edge in edges[1:]), 115)
        cases = " ".join(
            f"WHEN CAST(QAGE AS INT) BETWEEN {low} AND {high} THEN '{low}|{high}'"
            for low, high in zip(edges, ends, strict=True)
        )
        rows = self._db.execute(
            f"SELECT region, kind, code, CASE {cases} END AS age, QSEX, count(*) FROM inside "
            "GROUP BY ALL UNION ALL SELECT region, kind, code, '*|*', QSEX, count(*) FROM inside "
            "GROUP BY ALL"
        ).fetchall()
        return {(*row[:3], *row[3].split("|"), row[4]): row[5] for row in rows}

    def households(
        self, table: str, totals: Path, thresholds: dict[str, list[float]]
    ) -> list[dict[tuple[str, ...], int]]:
        """By detail, every row that a table of households has: group and data cell, and how many.

        Every group of the totals of persons is tabulated whose iteration its region type takes:
        nation and state those that are not COARSE_ONLY, smaller regions those that are not
        DETAILED_ONLY.  Its detail is the number of thresholds that its total reaches, whatever its
        iteration; whether a block lies in its region does not matter.  Totals of other states, and
        of AIANNH areas without a block, are not read.

        Args:
            totals: folder of the totals of persons.
            thresholds: by level, as the configuration has them.
        """
        self._db.execute("CREATE OR REPLACE TABLE steps (kind TEXT, level TEXT, step DOUBLE)")
        for label, steps in thresholds.items():
            kind, level = label.strip("()").split(", ")
            for step in steps[: len(CELLS[table]) - 1]:
                self._db.execute("INSERT INTO steps VALUES (?, ?, ?)", [kind, level, step])
        states = self._db.execute("SELECT DISTINCT state FROM block").fetchall()
        rows = self._db.execute(
            f"""
            SELECT REGION_ID, REGION_TYPE, ITERATION_CODE,
              (SELECT count(*) FROM steps WHERE steps.kind = REGION_TYPE
               AND steps.level = i.level AND step <= CAST(t.COUNT AS BIGINT))
            FROM {_file(totals / "*.csv")} t JOIN iteration i ON i.code = ITERATION_CODE
            WHERE CASE WHEN REGION_TYPE IN ('USA', 'STATE', 'PR-STATE') THEN NOT i.coarse
                       ELSE NOT i.detailed END
            AND (REGION_TYPE = 'USA' OR REGION_TYPE <> 'AIANNH' AND left(REGION_ID, 2) IN ?
                 OR REGION_TYPE = 'AIANNH' AND REGION_ID IN (SELECT aiannh FROM block))
            """,
            [[state for (state,) in states]],
        ).fetchall()
        counts, out = self.data_cells(table), [dict[tuple[str, ...], int]() for _ in CELLS[table]]
        for *group, detail in rows:
            for cell in CELLS[table][detail]:
                key = (*group, str(cell))
                assert key not in out[detail]
                out[detail][key] = counts.get(key, 0)
        return out

    def data_cells(self, table: str) -> dict[tuple[str, ...], int]:
        """By group and data cell: how many; those of nobody are not there."""
        column, cells = ("HOUSEHOLD_TYPE", _T3) if table == "t3" else ("TEN", _T4)
        out = dict[tuple[str, ...], int]()
        for cell, values in cells.items():
            inside = ", ".join(f"'{value}'" for value in values.split(","))
            rows = self._db.execute(
                "SELECT region, kind, code, count(*) FROM inside "
                f"WHERE {column} IN ({inside}) GROUP BY ALL"
            ).fetchall()
            out |= {(*row[:3], str(cell)): row[3] for row in rows}
        return out


def age_rows(bins: int) -> Iterator[tuple[str, str, str]]:
    """(AGESTART, AGEEND, SEX) of every row of a group."""
    edges = AGES[bins]
    for sex in ("1", "2"):
        for low, high in zip(edges, (*(edge - 1 for edge in edges[1:]), 115), strict=True):
            yield str(low), str(high), sex
        yield "*", "*", sex


def published(folder: Path) -> dict[tuple[str, ...], int]:
    """Rows of all files of a folder; each once."""
    out: dict[tuple[str, ...], int] = {}
    for path in sorted(folder.glob("*.csv")):
        for line in path.read_text().splitlines()[1:]:
            *key, count = line.split("|")
            assert tuple(key) not in out
            out[tuple(key)] = int(count)
    return out


def _file(path: Path) -> Any:
    return (
        f"read_csv('{path}', delim='|', header=true, all_varchar=true, quote='', escape='', "
        "nullstr='an absent text')"
    )
