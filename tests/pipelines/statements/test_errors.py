"""Refusals of statements: place, rule and fix, nothing of the statement; allowed parts, functions.

Names: WITH parts in their places, every column by its relation, and limits of size.
"""

import logging
import pickle
import random
import re
from pathlib import Path

import pytest
import sqlglot
from sqlglot import exp, parse_one

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.query.plan import MAX_GROUPS
from dpstream.pipelines.statements import statement
from dpstream.pipelines.statements.allowed import (
    FUNCTIONS,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_NODES,
    PARTS_REFUSED,
    REFUSED,
    check_nodes,
    inlined,
    parsed,
    qualified,
    require,
)
from dpstream.pipelines.statements.dialect import DpSql, PrivacyOptions
from dpstream.pipelines.statements.errors import RULES, Position, position, refusal
from dpstream.pipelines.statements.functions import (
    PLAIN,
    Options,
    integer_literal,
    number,
    options_of,
    pair,
    private_form,
)
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


def test_every_refusal_names_a_rule() -> None:
    codes = {code for _, code in REFUSED} | set(PARTS_REFUSED.values())
    assert codes <= set(RULES)


@pytest.mark.parametrize(
    ("items", "code"),
    [("RAND()", "nondeterministic"), ("ROW_NUMBER() OVER (ORDER BY a)", "window"),
     ("CURRENT_DATE()", "nondeterministic"), ("(SELECT 1 FROM t)", "subquery-expression"),
     ("EXTRACT(MICROSECOND FROM a)", "function"), ("CAST(a AS JSON)", "function"),
     ("SOUNDEX(a)", "function"), ("ARRAY_AGG(a)", "inner-aggregate")],
)  # fmt: skip
def test_what_is_on_no_list(items: str, code: str) -> None:
    with pytest.raises(DpstreamError) as error:
        check_nodes(parse_one(f"SELECT {items} AS x FROM t", dialect="bigquery"))
    assert RULES[code].text in str(error.value)


def test_every_function_that_a_refusal_lists_is_allowed() -> None:
    arguments = ("a", "a, b", "a, b, c", "a AS INT64", "YEAR FROM a", "a, MONTH",
                 "a, INTERVAL 1 DAY", "a, b, DAY")  # fmt: skip
    for name in FUNCTIONS:
        assert any(_is_allowed(f"SELECT {name}({given}) AS x FROM t") for given in arguments), name
    assert not _is_allowed("SELECT SOUNDEX(a) AS x FROM t")


def _is_allowed(text: str) -> bool:
    try:
        parsed(text)
    except DpstreamError:
        return False
    return True


def test_allowed_statements_pass_and_long_ones_do_not() -> None:
    check_nodes(parse_one("SELECT ABS(a) AS x, COUNT(*) AS n FROM t WHERE b > 1 GROUP BY x"))
    many = ", ".join(f"c{n}" for n in range(MAX_NODES // 2))
    with pytest.raises(DpstreamError, match="too long"):
        check_nodes(parse_one(f"SELECT {many} FROM t"))


def test_a_refusal_says_where() -> None:
    tree = parsed("SELECT\n  abc AS x FROM t")
    [column] = tree.find_all(exp.Column)
    assert position(column) == Position(2, 3)
    assert position(exp.Null()) == Position(1, 1)
    require(True, "syntax", column)
    with pytest.raises(DpstreamError, match="2"):
        require(False, "syntax", column)


SCHEMA = {"t": {"a": "INT64", "b": "STRING"}, "s": {"a": "INT64"}}


@pytest.mark.parametrize(
    ("text", "code"),
    [("", "one-statement"), ("SELECT a FROM t; SELECT b FROM t", "one-statement"),
     ("DROP TABLE t", "select-only"), ("SELECT FROM", "syntax"),
     ("SELECT a FROM t" + " " * MAX_CHARACTERS, "too-large"),
     (f"SELECT {'(' * (MAX_DEPTH + 1)}a{')' * (MAX_DEPTH + 1)} FROM t", "too-large")],
)  # fmt: skip
def test_what_is_no_statement(text: str, code: str) -> None:
    with pytest.raises(DpstreamError) as error:
        parsed(text)
    assert RULES[code].text in str(error.value)


def test_a_part_used_twice_is_the_same_relation_twice() -> None:
    text = "WITH w AS (SELECT a FROM t), v AS (SELECT a FROM w) SELECT x.a FROM v AS x, w AS y"
    tree = inlined(parsed(text))
    assert tree.args.get("with_") is None and not list(tree.find_all(exp.CTE))
    assert [table.name for table in tree.find_all(exp.Table)] == ["t", "t"]


def test_parts_that_multiply_are_too_large() -> None:
    parts = ["w0 AS (SELECT a FROM t)"]
    parts += [f"w{n} AS (SELECT x.a FROM w{n - 1} AS x, w{n - 1} AS y)" for n in range(1, 30)]
    with pytest.raises(DpstreamError) as error:
        inlined(parsed(f"WITH {', '.join(parts)} SELECT a FROM w29"))
    assert RULES["too-large"].text in str(error.value)


def test_columns_say_their_relation_and_type() -> None:
    tree = qualified(inlined(parsed("SELECT B, s.a AS c FROM T, S")), SCHEMA)
    types = {(c.table, c.name): c.type.this for c in tree.find_all(exp.Column)}
    assert set(types) == {("t", "b"), ("s", "a")}
    assert types["s", "a"] == exp.DType.BIGINT


def test_a_table_that_nobody_knows() -> None:
    with pytest.raises(DpstreamError) as error:
        qualified(inlined(parsed("SELECT a FROM u")), SCHEMA)
    assert RULES["unknown-table"].text in str(error.value)


@pytest.mark.parametrize("name", sorted(PLAIN.values()))
def test_plain_aggregates_have_a_private_form(name: str) -> None:
    form = private_form(parse_one(f"{name}(a)"))
    assert form.name == name and form.expressions[0].name == "a"
    assert private_form(form) is form


@pytest.mark.parametrize(
    ("call", "code"),
    [("LOGICAL_OR(flag)", "dp-aggregate"), ("SUM(COUNT(n))", "nested-aggregate"),
     ("COUNT(DISTINCT page)", "count-distinct"), ("SUM(*)", "arguments"),
     ("SUM(n, contribution_bounds_per_group => (5, 5))", "bounds"),
     ("COUNT(n, contribution_bounds_per_group => (0, 1.5))", "count-bounds"),
     ("COUNT(n, contribution_bounds_per_row => (0, 1))", "arguments"),
     ("COUNT(DISTINCT uid, contribution_bounds_per_group => (0, 1))", "bounds"),
     ("PERCENTILE_CONT(n, 1.5)", "quantile"), ("APPROX_QUANTILES(n, 1000)", "quantile"),
     ("SUM(n, contribution_norm => 1e61)", "norm"), ("SUM(n, contribution_norm => 1e-61)", "norm"),
     ("SUM(n, contribution_norm => 0)", "norm"), ("SUM(page)", "numbers"),
     ("AVG(flag)", "numbers"), ("MEDIAN(CONCAT(page, 'x'))", "numbers")],
)  # fmt: skip
def test_what_no_private_function_takes(call: str, code: str) -> None:
    form = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9)"
    with pytest.raises(DpstreamError) as error:
        statement_of(f"{form} {call} AS x FROM visits", shop())
    assert RULES[code].text in str(error.value)


def tree(text: str) -> exp.Expression:
    return parse_one(text, dialect="bigquery")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1.0), ("-2.5", -2.5), ("- - 3", 3.0), ("1e3", 1000.0), ("1e999", None), ("'1'", None),
     ("1 + 1", None), ("x", None), ("-x", None), ("NULL", None)],
)  # fmt: skip
def test_a_number_is_a_literal(text: str, value: float | None) -> None:
    assert number(tree(text)) == value
    assert number(None) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("10", 10), ("2", None), ("11", None), ("3.0", None), ("-3", None), ("'3'", None)],
)
def test_a_whole_number_lies_in_its_range(text: str, value: int | None) -> None:
    assert integer_literal(tree(text), 3, 10) == value
    assert integer_literal(exp.Literal.number("٣"), 3, 10) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("(0, 5)", (0.0, 5.0)), ("(-1.5, 1)", (-1.5, 1.0)), ("(5, 5)", None), ("(5, 0)", None),
     ("(1, 2, 3)", None), ("(0, 1e60)", (0.0, 1e60)), ("(0, 1.1e60)", None), ("(-1e-61, 0)", None),
     ("(0, 5e-324)", None), ("(-1e-60, 0)", (-1e-60, 0.0)), ("(-1e308, 1e308)", None),
     ("(x, 1)", None), ("(1)", None)],
)  # fmt: skip
def test_a_pair_is_ordered(text: str, value: tuple[float, float] | None) -> None:
    assert pair(tree(text)) == value


def options(text: str, grouped: bool = False, normed: bool = False) -> Options:
    tree = parsed(f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({text}) COUNT(*) AS n FROM t")
    [node] = tree.find_all(PrivacyOptions)
    return options_of(node, grouped, normed)


BASE = "epsilon = 1, delta = 1e-9"


@pytest.mark.parametrize(
    ("text", "code"),
    [("delta = 1e-9", "epsilon"), ("epsilon = 0, delta = 1e-9", "epsilon"),
     ("epsilon = 1001, delta = 1e-9", "epsilon"),
     ("epsilon = 1, mechanism = gaussian", "delta"),
     ("epsilon = 1, delta = 0, mechanism = gaussian", "delta"),
     (f"{BASE}, optimise = best", "optimise"),
     ("epsilon = 1, delta = 1", "delta"), (f"{BASE}, nothing = 1", "option-unknown"),
     (f"{BASE}, epsilon = 2", "option-twice"), (f"{BASE}, mechanism = snapping", "mechanism"),
     (f"{BASE}, max_rows_contributed = 0", "max-rows"), (f"{BASE}, contribution_norm = 0", "norm"),
     (f"{BASE}, min_privacy_units_per_group = 0", "min-units"),
     (f"{BASE}, min_privacy_units_per_group = 4194305", "min-units"),
     (f"{BASE}, contribution_norm = 1e300", "norm"),
     (f"{BASE}, contribution_norm = 1e-300", "norm"),
     (f"{BASE}, max_groups_contributed = 4097", "max-groups"),
     (f"{BASE}, group_selection_strategy = PUBLIC_GROUPS", "public-groups"),
     (f"{BASE}, group_selection_strategy = best", "selection")],
)  # fmt: skip
def test_out_of_range(text: str, code: str) -> None:
    with pytest.raises(DpstreamError) as error:
        options(text)
    assert RULES[code].text in str(error.value)


def test_groups_are_asked_for_where_there_are_some() -> None:
    assert options(BASE).groups == 1
    with pytest.raises(DpstreamError) as error:
        options(BASE, grouped=True)
    assert RULES["max-groups"].text in str(error.value)
    assert options(BASE, grouped=True, normed=True).groups == MAX_GROUPS
    assert options(f"{BASE}, max_groups_contributed = 9", grouped=True).groups == 9
    with pytest.raises(DpstreamError) as error:
        options(f"{BASE}, max_groups_contributed = {MAX_GROUPS + 1}", True, True)
    assert RULES["max-groups"].text in str(error.value)


def test_delta_is_not_needed_where_nothing_is_selected() -> None:
    for more in ("", ", mechanism = geometric", ", delta = 0", ", mechanism = auto"):
        pure = f"epsilon = 1, max_groups_contributed = 2{more}"
        assert options(pure).delta == 0.0
        public = f"{pure}, group_selection_strategy = public_groups"
        assert options(public, grouped=True).selection == "public_groups"
        with pytest.raises(DpstreamError):
            options(pure, grouped=True)


@pytest.mark.parametrize("word", ["limit", "answer", "LIMIT"])
def test_what_the_choice_of_noise_goes_by(word: str) -> None:
    assert options(BASE).optimise == "limit"
    assert options(f"{BASE}, optimise = {word}").optimise == word.lower()
