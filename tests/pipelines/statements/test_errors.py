"""Refusals of statements: place, rule and fix, and nothing of the statement but its names.

The refusals of `REFUSED` are golden text, ``REWRITE=1`` writes them anew.
"""

import logging
import pickle
import random
import re
from functools import partial
from pathlib import Path

import pytest
import sqlglot
from sqlglot import exp

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.query.plan import MAX_GROUPS
from dpstream.pipelines.statements import statement
from dpstream.pipelines.statements.allowed import (
    FUNCTIONS,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_NODES,
    PARTS_REFUSED,
    parsed,
)
from dpstream.pipelines.statements.allowed import REFUSED as REFUSED_NODES
from dpstream.pipelines.statements.dialect import DpSql
from dpstream.pipelines.statements.errors import RULES, Position, refusal
from dpstream.pipelines.statements.statement import checked, statement_of
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.sql.pairs import PAIRS
from tests.pipelines.sql.queries import generated
from tests.pipelines.sql.shop import shop

HERE = Path(__file__).parent
PIPELINES = HERE.parents[2] / "pipelines"
FOLDERS = ("statements", "sql", "tables")

_CATALOG = shop()
_SECRET, _NUMBER = "Zwetschgenmus", "861930274"
_TOKEN = re.compile(r"\d+e-?\d+|\d+\.\d+|\w+|'[^']*'|=>|<>|[^\w\s]")
_WORDS = r"""( ) , ' ` SELECT FROM WHERE NULL * => OVER -- /* UNNEST [ ] { } ; WITH AS ON JOIN 1e999
0x @ CASE END INTERVAL CAST UNION ALL LIMIT ORDER BY é $1 STRUCT ARRAY CLAMPED BETWEEN REPORT |>
PIVOT ATTACH COPY . \ " $$ ::"""
_EXTRA = [*re.findall(r"\S+", _WORDS), "\0"]

_BASE = "epsilon = 1, delta = 1e-9"
_ONE = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({_BASE})"
_THREE = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({_BASE}, max_groups_contributed = 3)"
_BY_DEPT = "FROM users GROUP BY dept"
_PARTS = ["w0 AS (SELECT uid FROM users)"] + [
    f"w{n} AS (SELECT x.uid FROM w{n - 1} AS x, w{n - 1} AS y)" for n in range(1, 30)
]
REFUSED = [
    # Names that do not exist, with those that do.
    f"{_THREE} agee, COUNT(*) AS n FROM users GROUP BY agee",
    f"{_THREE} u.agee, COUNT(*) AS n FROM users AS u GROUP BY u.agee",
    f"{_THREE} dept, COUNT(*) AS n FROM users AS u JOIN users AS w ON u.uid = w.uid GROUP BY dept",
    f"{_THREE} dept, COUNT(*) AS n FROM userz GROUP BY dept",
    f"{_THREE} dept, COUNTT(*) AS n {_BY_DEPT}",
    f"{_THREE} dept, COUNT(*) AS n FROM users WHERE MD5(dept) = '' GROUP BY dept",
    f"{_THREE} dept, LOGICAL_OR(age > 3) AS n {_BY_DEPT}",
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, dlta = 1e-9) COUNT(*) AS n FROM users",
    f"{_THREE} dept, SUM(age, contribution_bound_per_row => (0, 9)) AS n {_BY_DEPT}",
    # Places.
    "SELECT dept\nFROM users",
    f"{_ONE}\n  COUNT(*) AS n\nFROM users AS a\n JOIN visits AS b ON a.age = b.n",
    f"{_ONE}\n  COUNT(*) AS n\nFROM users\nWHERE age < 5 AND RAND() < 1",
    f"{_ONE}\n  COUNT(*) AS n\nFROM secrets",
    f"{_ONE}\n  SUM(agee) AS n\nFROM users",
    f"{_ONE}\n\tCOUNT(*) AS n\n\tFRM users",
    f"{_ONE}\n\tCOUNT(*) AS n\n\tFROM users WHERE WHERE age < 5",
    f"{_ONE}\n /* a\nb */ COUNT(*) AS n\nFROM users WHERE page = 'a\nb' ) AND",
    "SELECT dept\nFROM users WHERE dept = 'open\n",
    "\n  DELETE FROM users",
    # What is no statement, or too large.
    "",
    "SELECT age FROM users; SELECT dept FROM users",
    "DROP TABLE users",
    "SELECT FROM",
    "SELECT age FROM users" + " " * MAX_CHARACTERS,
    f"SELECT {'(' * (MAX_DEPTH + 1)}age{')' * (MAX_DEPTH + 1)} FROM users",
    f"SELECT {', '.join(f'c{n}' for n in range(MAX_NODES // 2))} FROM users",
    f"WITH {', '.join(_PARTS)} SELECT uid FROM w29",
    # Parts that are on no list.
    *(
        f"{_ONE} COUNT(*) AS n FROM visits WHERE {part} IS NULL"
        for part in (
            "RAND()", "ROW_NUMBER() OVER (ORDER BY n)", "CURRENT_DATE()",
            "(SELECT 1 FROM visits)", "EXTRACT(MICROSECOND FROM at)", "CAST(n AS JSON)",
            "SOUNDEX(page)", "ARRAY_AGG(n)",
        )
    ),
    # What no private function takes.
    *(
        f"{_ONE} {call} AS x FROM visits"
        for call in (
            "LOGICAL_OR(flag)", "SUM(COUNT(n))", "COUNT(DISTINCT page, n)", "SUM(*)",
            "SUM(n, contribution_bounds_per_group => (5, 5))",
            "SUM(n, contribution_bounds_per_group => (5, 0))",
            "SUM(n, contribution_bounds_per_group => (1, 2, 3))",
            "SUM(n, contribution_bounds_per_group => (1))",
            "SUM(n, contribution_bounds_per_group => (page, 1))",
            "SUM(n, contribution_bounds_per_group => (1 + 1, 3))",
            "SUM(n, contribution_bounds_per_group => ('1', 3))",
            "SUM(n, contribution_bounds_per_group => (0, 1e999))",
            "SUM(n, contribution_bounds_per_group => (0, 1.1e60))",
            "SUM(n, contribution_bounds_per_group => (-1e-61, 0))",
            "SUM(n, contribution_bounds_per_group => (0, 5e-324))",
            "SUM(n, contribution_bounds_per_group => (-1e308, 1e308))",
            "COUNT(n, contribution_bounds_per_group => (0, 1.5))",
            "COUNT(n, contribution_bounds_per_row => (0, 1))",
            "COUNT(DISTINCT uid, contribution_bounds_per_group => (0, 0.5))",
            "PERCENTILE_CONT(n, 1.5)", "APPROX_QUANTILES(n, 1000)", "APPROX_QUANTILES(n, 3.0)",
            "APPROX_QUANTILES(n, -3)", "APPROX_QUANTILES(n, '3')", "APPROX_QUANTILES(n, ٣)",
            "SUM(n, contribution_norm => 1e61)", "SUM(n, contribution_norm => 1e-61)",
            "SUM(n, contribution_norm => 0)", "SUM(page)", "AVG(flag)",
            "MEDIAN(CONCAT(page, 'x'))",
        )
    ),
    # Joins.
    *(
        f"{_ONE} COUNT(*) AS n FROM visits AS a {join}"
        for join in (
            "CROSS JOIN users AS b", "JOIN users AS b ON a.uid = b.uid OR a.n = b.age",
            "JOIN users AS b ON a.uid = b.uid AND SUM(a.n) > 1", "LEFT JOIN pages AS b",
            "RIGHT JOIN pages AS b ON a.page = b.page", "JOIN users AS a ON a.uid = a.uid",
            "NATURAL JOIN users AS b",
        )
    ),
    f"{_ONE} COUNT(*) AS n FROM (SELECT COALESCE(a.uid, 5) AS uid FROM users AS a FULL JOIN visits "
    "AS b ON a.uid = b.uid) AS r",
    f"{_ONE} COUNT(*) AS n FROM (SELECT a.uid FROM users AS a FULL JOIN visits AS b "
    "ON a.uid = b.uid) AS r",
    # Options.
    *(
        f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options}) COUNT(*) AS n FROM users"
        for options in (
            "delta = 1e-9", "epsilon = 0, delta = 1e-9", "epsilon = 1001, delta = 1e-9",
            "epsilon = 1, mechanism = gaussian", "epsilon = 1, delta = 0, mechanism = gaussian",
            f"{_BASE}, optimise = best", "epsilon = 1, delta = 1", f"{_BASE}, nothing = 1",
            f"{_BASE}, epsilon = 2", f"{_BASE}, mechanism = snapping",
            f"{_BASE}, max_rows_contributed = 0", f"{_BASE}, contribution_norm = 0",
            f"{_BASE}, min_privacy_units_per_group = 0",
            f"{_BASE}, min_privacy_units_per_group = 4194305",
            f"{_BASE}, contribution_norm = 1e300", f"{_BASE}, contribution_norm = 1e-300",
            f"{_BASE}, max_groups_contributed = {MAX_GROUPS + 1}",
            f"{_BASE}, group_selection_strategy = PUBLIC_GROUPS",
            f"{_BASE}, group_selection_strategy = best",
        )
    ),
    *(
        f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options}) dept, COUNT(*) AS n {_BY_DEPT}"
        for options in (
            _BASE, f"{_BASE}, contribution_norm = 2, max_groups_contributed = {MAX_GROUPS + 1}",
            "epsilon = 1, max_groups_contributed = 2",
            "epsilon = 1, max_groups_contributed = 2, delta = 0",
            "epsilon = 1, max_groups_contributed = 2, mechanism = geometric",
        )
    ),
    # Columns that are called like a part of an interval would be case_name in its place.
    *(
        text.format(f"{_ONE} COUNT(DISTINCT uid WITH REPORT) AS a, SUM(age) AS {name} FROM users")
        for name in ("a_sd", "a_noise_low", "a_noise_high")
        for text in ("{}", f"SELECT r.a, r.{name} FROM ({{}}) AS r")
    ),
]  # fmt: skip


def case_name(text: str) -> str:
    """A statement as the name of its case."""
    return text if len(text) < 300 else f"{text[:40].strip()} ... of {len(text)} characters"


def test_refusals() -> None:
    calls = {case_name(text): partial(statement_of, text, _CATALOG) for text in REFUSED}
    check(HERE / "refused.txt", of_refusals(calls))


def test_each_rule_says_what_is_wrong_and_what_to_write_and_pickles() -> None:
    for code, rule in RULES.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)
        assert rule.text and rule.fix and rule.text != rule.fix
        assert rule.text[0].islower() and not rule.text.endswith(".")
        error = refusal(code, Position(3, 7))
        assert isinstance(error, PolicyError if rule.privacy else UsageError)
        assert error.field == "statement, line 3, column 7" and code in error.rule
        again = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert (str(again), again.code, again.position) == (str(error), code, Position(3, 7))
    assert RULES["join-without-unit"].privacy and not RULES["syntax"].privacy
    assert {code for _, code in REFUSED_NODES} | set(PARTS_REFUSED.values()) <= set(RULES)


def test_each_rule_is_asked_somewhere() -> None:
    paths = [path for folder in FOLDERS for path in (PIPELINES / folder).glob("*.py")]
    sources = "".join(path.read_text() for path in paths if path.name != "errors.py")
    assert [code for code in RULES if f'"{code}"' not in sources] == []


@pytest.mark.parametrize("literal", ["'{}'", "r'{}'", "b'{}'", '"{}"', "$${}$$", "0x{}", "{}1"])
@pytest.mark.parametrize("text", [
    "OPTIONS({} = 1) COUNT(*) AS n FROM users",
    "OPTIONS(epsilon = 1) SUM(age, {} => (0, 1)) AS n FROM users",
    "OPTIONS(epsilon = 1) COUNT(*) AS n FROM {}",
    "OPTIONS(epsilon = 1) COUNT(*) AS n FROM users WHERE users.{} = age",
])  # fmt: skip
def test_no_spelling_of_a_literal_is_a_name(text: str, literal: str, refused: Refused) -> None:
    private = literal.format("919191")
    caught = refused(
        lambda: statement_of(f"SELECT WITH DIFFERENTIAL_PRIVACY {text.format(private)}", _CATALOG)
    )
    assert "919191" not in str(caught)


def _secretive(text: str) -> str:
    """The statement with every literal outside of OPTIONS replaced by a known one."""
    try:
        tree = sqlglot.parse_one(text, dialect=DpSql)
    except (sqlglot.errors.SqlglotError, RecursionError):
        return text.replace("'unclosed", f"'{_SECRET}")
    for node in list(tree.find_all(exp.Literal)):
        if node.find_ancestor(exp.PropertyEQ, exp.Kwarg, exp.Interval) is None:
            new = exp.Literal.string(_SECRET) if node.is_string else exp.Literal.number(_NUMBER)
            node.replace(new)
    return tree.sql(dialect=DpSql)


def test_no_literal_enters_an_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seen = 0
    for _, refused, _ in PAIRS:
        text = _secretive(refused) + f" /* {_SECRET} */"
        try:
            statement_of(text, _CATALOG)
        except DpstreamError as error:
            error_text = f"{error} {error.as_dict()} {error.__cause__} {error.args}"
            assert _SECRET not in error_text and _NUMBER not in error_text
            assert (error.__cause__ is None and error.__suppress_context__) or not error.__context__
            seen += _SECRET in text or _NUMBER in text
    assert seen > 300
    assert _SECRET not in caplog.text and _NUMBER not in caplog.text


def fuzz(seed: int) -> str | None:
    """One broken statement; gives the rule it breaks."""
    draw = random.Random(seed)
    text = draw.choice(PAIRS)[draw.randrange(2)] if seed % 3 else generated(draw.randrange(99))
    tokens = _TOKEN.findall(text[:4_000]) or [""]
    words = [place for place, token in enumerate(tokens) if token[:1].isalnum()] or [0]
    for _ in range(draw.randint(1, 3)):
        place, how = draw.randrange(len(tokens) or 1), draw.randrange(9)
        if how == 0:
            del tokens[place : place + draw.randint(1, 6)]
        elif how == 1:
            tokens.insert(place, draw.choice(_EXTRA))
        elif how == 2:
            tokens[place:place] = tokens[place : place + draw.randint(1, 8)]
        else:  # a word in another's place: often still a statement
            one, other = (min(draw.choice(words), len(tokens) - 1) for _ in range(2))
            if tokens:
                tokens[one] = tokens[other]
    broken = " ".join(tokens)
    if draw.random() < 0.05:
        broken = broken[: draw.randrange(len(broken) + 1)]
    try:
        checked(broken, _CATALOG)
    except DpstreamError as error:
        return str(error.code)  # type: ignore[attr-defined]
    return None


def test_fuzzed_statements_are_accepted_or_coded() -> None:
    codes = {fuzz(seed) for seed in range(500)}
    assert {None, "syntax", "unknown-table"} < codes and len(codes) > 15


@pytest.mark.slow
def test_many_fuzzed_statements() -> None:
    assert len({fuzz(seed) for seed in range(500, 50_500)}) > 30


def test_mistakes_of_this_program_are_refusals(
    monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    def broken(text: str, catalog: object) -> None:
        raise IndexError(text)

    monkeypatch.setattr(statement, "checked", broken)
    caught = refused(statement_of, _SECRET, _CATALOG)
    assert _SECRET not in str(caught) and caught.__suppress_context__


def test_every_function_that_a_refusal_lists_is_allowed() -> None:
    arguments = ("a", "a, b", "a, b, c", "a AS INT64", "YEAR FROM a", "a, MONTH",
                 "a, INTERVAL 1 DAY", "a, b, DAY", "a, 'x'", "'%Y', a", "a, [1, 2]")  # fmt: skip
    for name in FUNCTIONS:
        assert any(_is_allowed(f"SELECT {name}({given}) AS x FROM t") for given in arguments), name
    assert not _is_allowed("SELECT SOUNDEX(a) AS x FROM t")


def _is_allowed(text: str) -> bool:
    try:
        parsed(text)
    except DpstreamError:
        return False
    return True
