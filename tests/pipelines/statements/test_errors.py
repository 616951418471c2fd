"""Refusals of statements: rules with a fix each, and no literal of a statement in any error."""

import logging
import pickle
import random
import re
from pathlib import Path

import pytest
import sqlglot
from sqlglot import exp

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.pipelines.statements import statement
from dpstream.pipelines.statements.dialect import DpSql
from dpstream.pipelines.statements.errors import RULES, Position, refusal
from dpstream.pipelines.statements.statement import checked, statement_of
from tests.pipelines.sql.pairs import PAIRS
from tests.pipelines.sql.queries import generated
from tests.pipelines.sql.shop import shop

PIPELINES = Path(__file__).parents[3] / "pipelines"
FOLDERS = ("statements", "sql", "tables")


def test_each_rule_says_what_is_wrong_and_what_to_write() -> None:
    for code, rule in RULES.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)
        assert rule.text and rule.fix and rule.text != rule.fix
        assert rule.text[0].islower() and not rule.text.endswith(".")
    assert RULES["join-without-unit"].privacy and not RULES["syntax"].privacy


def test_each_rule_is_asked_somewhere() -> None:
    paths = [path for folder in FOLDERS for path in (PIPELINES / folder).glob("*.py")]
    sources = "".join(path.read_text() for path in paths if path.name != "errors.py")
    assert [code for code in RULES if f'"{code}"' not in sources] == []


_CATALOG = shop()
_SECRET, _NUMBER = "Zwetschgenmus", "861930274"
_TOKEN = re.compile(r"\d+e-?\d+|\d+\.\d+|\w+|'[^']*'|=>|<>|[^\w\s]")
_WORDS = r"""( ) , ' ` SELECT FROM WHERE NULL * => OVER -- /* UNNEST [ ] { } ; WITH AS ON JOIN 1e999
0x @ CASE END INTERVAL CAST UNION ALL LIMIT ORDER BY é $1 STRUCT ARRAY CLAMPED BETWEEN REPORT |>
PIVOT ATTACH COPY . \ " $$ ::"""
_EXTRA = [*re.findall(r"\S+", _WORDS), "\0"]


@pytest.mark.parametrize(("sql", "name", "fix"), [
    ("{o} agee, COUNT(*) AS n FROM users GROUP BY agee", "agee",
     "did you mean 'age'? known here: age, dept, "),
    ("{o} u.agee, COUNT(*) AS n FROM users AS u GROUP BY u.agee", "u.agee",
     "did you mean 'u.age'? known here: u.age, "),
    ("{o} dept, COUNT(*) AS n FROM users AS u JOIN users AS w ON u.uid = w.uid GROUP BY dept",
     "dept", "known here: u.dept, w.dept"),
    ("{o} dept, COUNT(*) AS n FROM userz GROUP BY dept", "userz",
     "did you mean 'users'? known here: "),
    ("{o} dept, COUNTT(*) AS n FROM users GROUP BY dept", "COUNTT",
     "did you mean 'COUNT'? known here: ABS, APPROX_QUANTILES, "),
    ("{o} dept, COUNT(*) AS n FROM users WHERE MD5(dept) = '' GROUP BY dept", "MD5",
     "known here: ABS, "),
    ("{o} dept, COUNTIF(age > 3) AS n FROM users GROUP BY dept", "COUNTIF", "use COUNT, SUM, AVG"),
    ("SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, dlta = 1e-9) COUNT(*) AS n FROM users",
     "dlta", "did you mean 'delta'? known here: allow_large_delta, "),
    ("{o} dept, SUM(age, contribution_bound_per_row => (0, 9)) AS n FROM users GROUP BY dept",
     "contribution_bound_per_row", "did you mean 'contribution_bounds_per_row'?"),
])  # fmt: skip
def test_a_name_that_does_not_exist_is_printed_with_those_that_do(
    sql: str, name: str, fix: str
) -> None:
    options = "epsilon = 1, delta = 1e-9, max_groups_contributed = 3"
    text = sql.format(o=f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options})")
    with pytest.raises(DpstreamError) as caught:
        statement_of(text, _CATALOG)
    error = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert f"'{name}'" in error.rule and fix in error.fix
    assert error.position == Position(1, text.index(name) + 1)


@pytest.mark.parametrize("text", [
    f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS('{_SECRET}' = 1) COUNT(*) AS n FROM users",
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1) "
    f"SUM(age, '{_SECRET}' => (0, 1)) AS n FROM users",
])  # fmt: skip
def test_a_literal_is_no_name(text: str) -> None:
    with pytest.raises(DpstreamError) as caught:
        statement_of(text, _CATALOG)
    assert _SECRET.lower() not in str(caught.value).lower()
    assert caught.value.position == Position(1, text.index("'") + 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("literal", ["r'{}'", "b'{}'", '"{}"', "$${}$$", "0x{}", "{}1"])
@pytest.mark.parametrize("text", [
    "OPTIONS({} = 1) COUNT(*) AS n FROM users",
    "OPTIONS(epsilon = 1) SUM(age, {} => (0, 1)) AS n FROM users",
    "OPTIONS(epsilon = 1) COUNT(*) AS n FROM {}",
    "OPTIONS(epsilon = 1) COUNT(*) AS n FROM users WHERE users.{} = age",
])  # fmt: skip
def test_no_spelling_of_a_literal_is_a_name(text: str, literal: str) -> None:
    private = literal.format("919191")
    with pytest.raises(DpstreamError) as caught:
        statement_of(f"SELECT WITH DIFFERENTIAL_PRIVACY {text.format(private)}", _CATALOG)
    assert "919191" not in str(caught.value)


def test_every_refusal_is_whole_and_pickles() -> None:
    for code, rule in RULES.items():
        error = refusal(code, Position(3, 7))
        assert isinstance(error, PolicyError if rule.privacy else UsageError)
        assert error.field == "statement, line 3, column 7" and code in error.rule
        assert rule.fix and rule.text and error.exit_code in (2, 3)
        again = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert (str(again), again.code, again.position) == (str(error), code, Position(3, 7))


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


@pytest.mark.parametrize(("text", "line", "column"), [
    ("SELECT dept\nFROM users", 1, 1),
    ("SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9)\n  COUNT(*) AS n\n"
     "FROM users AS a\n JOIN visits AS b ON a.age = b.n", 4, 22),
    ("SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9)\n  COUNT(*) AS n\n"
     "FROM users\nWHERE age < 5 AND RAND() < 1", 4, 19),
    ("SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9)\n  COUNT(*) AS n\n"
     "FROM secrets", 3, 6),
    ("SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9)\n  SUM(agee) AS n\n"
     "FROM users", 2, 7),
    ("SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9)\n\tCOUNT(*) AS n\n"
     "\tFRM users", 3, 2),
    ("SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9)\n\tCOUNT(*) AS n\n"
     "\tFROM users WHERE WHERE age < 5", 3, 19),
    ("SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1)\n /* a\nb */ COUNT(*) AS n\n"
     "FROM users WHERE page = 'a\nb' ) AND", 5, 4),
    ("SELECT dept\nFROM users WHERE dept = 'open\n", 2, 25),
    ("\n  DELETE FROM users", 2, 3),
])  # fmt: skip
def test_positions(text: str, line: int, column: int) -> None:
    with pytest.raises(DpstreamError) as caught:
        statement_of(text, _CATALOG)
    assert caught.value.position == Position(line, column)  # type: ignore[attr-defined]


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


def test_mistakes_of_this_program_are_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: str, catalog: object) -> None:
        raise IndexError(text)

    monkeypatch.setattr(statement, "checked", broken)
    with pytest.raises(DpstreamError) as caught:
        statement_of(_SECRET, _CATALOG)
    assert _SECRET not in str(caught.value) and caught.value.__suppress_context__


@pytest.mark.slow
def test_many_fuzzed_statements() -> None:
    assert len({fuzz(seed) for seed in range(500, 50_500)}) > 30
