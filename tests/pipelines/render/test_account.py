"""What an account accepts, was charged and has left, as text.

Released values as Python, JSON and people read them.

Labels, tables and values of text: aligned, complete, and safe to print.
"""

import base64
import hashlib
import json
import math
import re
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from dpstream.accounting.query.bounds import Cut
from dpstream.pipelines.render.account import (
    acceptance_lines,
    accepted_lines,
    charge_lines,
    place_lines,
    run_lines,
    view_text,
)
from dpstream.pipelines.render.answer import (
    INTERVALS,
    cut_lines,
    json_rows,
    json_value,
    python_values,
    rows_text,
)
from dpstream.pipelines.render.charts import (
    COLOURS,
    LINE_POINTS,
    Picture,
    axes_of,
    counts,
    drawn_positions,
    lines,
    relative_noise,
    swatches,
    values_axis,
)
from dpstream.pipelines.render.layout import (
    count,
    each,
    labelled,
    page,
    table_text,
    value_text,
    with_interval,
    wrapped,
)
from dpstream.pipelines.render.page import (
    begins_with,
    document,
    embedded,
    ending_of,
    mark_of,
    pages,
    policy,
    script_text,
    write_own,
)
from dpstream.state.durable import PRIVATE
from tests.golden.refusals import Refused

ACCOUNT: dict[str, Any] = {
    "data_set": "shop", "charges": 1, "used": 0.12345, "with_this": 0.25, "more": 3,
    "counted_as": 1, "filter": "plain", "period": None, "person": None,
    "limit": {"epsilon": 8.0, "delta": 1e-5},
}  # fmt: skip
ACCEPTED: dict[str, Any] = {
    "accepted": True, "refusal": None, "charged": {"epsilon": 1.0, "delta": 1e-9}, "run_id": None,
    "answered": False, "account": ACCOUNT,
}  # fmt: skip
REFUSED = ACCEPTED | {
    "accepted": False, "charged": None, "account": None,
    "refusal": {"field": "store", "rule": "is missing", "fix": "name one"},
}  # fmt: skip


def test_what_would_be_accepted() -> None:
    first, account, warning = acceptance_lines(ACCEPTED, "Can ask", ["weak"])
    assert first == "Can ask     yes: (1, 1e-09) would be charged before a record is read"
    assert account == (
        "Account     shop: 1 charge used 12.4% of epsilon 8 at delta 1e-05, 25% after this one, "
        "then room for 3 like it (filter: sum of epsilons)"
    )
    assert warning == "Warning     weak"
    free = accepted_lines(ACCEPTED | {"charged": None}, "Can run")
    assert free == ["Can run     yes: nothing more is charged"]
    [resumed] = accepted_lines(ACCEPTED | {"charged": None, "run_id": "ab"}, "Can run")
    assert resumed == "Can run     yes: run ab continues, and nothing more is charged"
    [again] = accepted_lines(ACCEPTED | {"run_id": "ab", "answered": True}, "Can ask")
    assert "run ab" in again and again.endswith("no further charge")


def test_a_refusal_has_its_fix_and_no_account() -> None:
    assert acceptance_lines(REFUSED) == [
        "Can run     NO. store: is missing", "            Fix: name one",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("with_this", "words"),
    [(None, "epsilon 8 at delta 1e-05"), (math.inf, "more than all after this one")],
)
def test_what_an_account_would_have_spent(with_this: float | None, words: str) -> None:
    account = ACCOUNT | {"with_this": with_this, "charges": 2_000, "filter": None}
    line = acceptance_lines(ACCEPTED | {"account": account})[1]
    assert words in line and "2,000 charges" in line
    line = acceptance_lines(ACCEPTED | {"account": ACCOUNT | {"counted_as": 2}})[1]
    assert "25% after this one, which counts 2 times, then" in line


def test_without_an_account_it_says_what_is_missing() -> None:
    [_, account] = acceptance_lines(ACCEPTED | {"account": None})
    assert account.startswith("Account     none")


def test_what_was_charged_now_or_before() -> None:
    cost = "(1, 1e-09) per unit"
    assert charge_lines(cost, True, "ab") == [f"Charged {cost}; run ab"]
    before, how = charge_lines(cost, False, "ab", "2024-01-01T00:00:00Z")
    assert before == f"Charged before {cost}; first answered 2024-01-01T00:00:00Z"
    assert "--fresh" in how and "--as-of" in how
    assert charge_lines(cost, False, "ab")[0] == f"Charged before {cost}; run ab"
    assert charge_lines(cost, None, "ab") == [f"Costs {cost}, no account adds it up; run ab"]
    assert run_lines(cost, True, "ab") == [f"Costs {cost}, charged once; run ab"]


def test_project_environment_and_account_are_named() -> None:
    assert place_lines("dpstream.toml", "prod", "shop", "shop.account.db") == [
        "Project     dpstream.toml, environment prod", "Account     shop (shop.account.db)",
    ]  # fmt: skip
    project, account = place_lines("a/dpstream.toml", None, None, "")
    assert project == "Project     a/dpstream.toml" and account.startswith("Account     none")


def test_a_charge_that_only_its_own_guarantee_fits_says_that_nothing_may_follow() -> None:
    account = ACCOUNT | {"with_this": 1.0, "filter": "first", "more": 0}
    [_, line] = acceptance_lines(ACCEPTED | {"account": account})
    assert line.endswith("every later one is refused")
    account = ACCOUNT | {"filter": "renyi", "more": 0}
    [_, line] = acceptance_lines(ACCEPTED | {"account": account})
    assert line.endswith("then no more like it (filter: Renyi divergence)")


LEFT = {"epsilon": 1.0, "mu": 0.3, "rho": 0.05, "delta": 4e-6}


def test_what_is_left() -> None:
    figures = ACCOUNT | {
        "id": "a7", "unit": {"text": "user (string)"}, "entries": [{"seq": 1, "event": "table",
        "id": "t"}], "spent": {"epsilon": 7.0000001, "delta": 1e-5}, "used": 0.51234,
        "left": LEFT, "warnings": ["weak"],
    }  # fmt: skip
    assert view_text(figures).splitlines()[4:] == [
        "Spent       51.3% of the limit; epsilon 7.00001 at delta 1e-05 per unit, for charges "
        "fixed beforehand",
        "Limit       epsilon 8 at delta 1e-05",
        "Left        a plain epsilon 1, Gaussian noise of mu 0.3, or zCDP of rho 0.05; thresholds "
        "of delta 4e-06",
        "Warning     weak",
    ]


def test_events_are_listed_in_order() -> None:
    charge = {
        "event": "charge", "kind": "stream", "run_id": "ab", "epoch": 1, "epsilon": 1.0,
        "delta": 1e-9, "mu": 0.21291, "rho": None, "counted_as": 1, "at": "2024-01-01T00:00:00Z",
    }  # fmt: skip
    events: list[dict[str, Any]] = [
        {"event": "created", "limit": [8.0, 1e-5]}, charge, {"event": "receipt", "run_id": "ab"},
        {"event": "limit", "limit": [9.0, 1e-5]}, {"event": "closed", "run_ids": ["ab", "cd"]},
        {"event": "widened", "old": "m1", "new": "m2"}, {"event": "table", "id": "t"},
        {"event": "created", "limit": None},
    ]  # fmt: skip
    figures = {
        "id": "a7", "data_set": "shop", "unit": {"text": "user (string), all records"},
        "entries": [{"seq": n, **event} for n, event in enumerate(events)],
        "spent": {"epsilon": None, "delta": 1e-5}, "limit": None, "left": None, "warnings": [],
    }  # fmt: skip
    assert view_text(figures).splitlines() == [
        "Account     a7", "Data set    shop", "Unit        user (string), all records",
        "      0     created  limit epsilon 8, delta 1e-05",
        "      1     stream   ab epoch 1  2024-01-01T00:00:00Z  (1, 1e-09), mu 0.213",
        "      2     answered ab",
        "      3     limit    limit epsilon 9, delta 1e-05",
        "      4     closed   ab, cd",
        "      5     widened  table model m1 into m2",
        "      6     table    t",
        "      7     created",
        "Spent       more than any epsilon at delta 1e-05 per unit, for charges fixed beforehand",
        "Limit       none: each record has a budget of its own",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "literals"),
    [
        ("DATE", {
            "0044-03-15 (BC)": "-0043-03-15", "0001-12-31 (BC)": "+0000-12-31",
            "0005-02-29 (BC)": "-0004-02-29", "10000-01-01": "+10000-01-01",
            "12345-06-07": "+12345-06-07", "200000-02-29": "+200000-02-29",
            "5877642-06-25 (BC)": "-5877641-06-25", "5881580-07-10": "+5881580-07-10",
            "infinity": "infinity", "-infinity": "-infinity",
        }),
        ("TIMESTAMP", {
            "0044-03-15 (BC) 23:59:59": "-0043-03-15T23:59:59",
            "12345-06-07 01:02:03.5": "+12345-06-07T01:02:03.500000",
            "290309-12-22 (BC) 00:00:00": "-290308-12-22T00:00:00", "infinity": "infinity",
        }),
        ("TIMESTAMPTZ", {
            "12345-06-07 01:02:03+00": "+12345-06-07T01:02:03Z", "-infinity": "-infinity",
        }),
    ],
)  # fmt: skip
def test_days_and_instants_beyond_the_calendar_are_exact_texts(
    kind: str, literals: dict[str, str]
) -> None:
    """As DuckDB writes them, and each by itself: the others of its column stay what they are."""
    near = "2024-02-29" if kind == "DATE" else "2024-02-29 01:00:00+00"
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    listed = ", ".join(f"('{text}'::{kind})" for text in (*literals, near))
    column = connection.sql(f"SELECT * FROM (VALUES {listed}, (NULL)) t(x)").to_arrow_table()["x"]
    *far, usual, missing = python_values(column)
    assert far == list(literals.values()) and missing is None
    assert usual.isoformat()[:10] == "2024-02-29" and not isinstance(usual, str)
    words = rows_text(pa.table({"x": column}), {}).split()
    assert set(literals.values()) <= set(words) and any(t.startswith("2024-02-29") for t in words)
    rows = json_rows(pa.table({"x": column}), {})
    assert [row["values"]["x"] for row in rows][: len(far)] == far
    assert rows[-2]["values"]["x"].startswith("2024-02-29")


def test_days_of_every_year_are_those_of_the_calendar() -> None:
    """400 years later every day has the same text but for its year."""
    days = range(-700_000, 2_900_000, 997)
    later = pa.chunked_array([pa.array([day + 25 * 146_097 for day in days], pa.date32())])
    near = pa.chunked_array([pa.array(days, pa.date32())])
    for one, other in zip(python_values(near), python_values(later), strict=True):
        assert other == f"{one.year + 10_000:+}-{one:%m-%d}"
    assert python_values(pa.chunked_array([pa.array([1, None])])) == [1, None]


def test_values_that_json_has_not() -> None:
    values = [
        b"\x01",
        [math.nan, 1],
        math.inf,
        -math.inf,
        None,
        True,
        datetime(2024, 1, 2, tzinfo=UTC),
    ]
    assert [json_value(value) for value in values] == [
        "01", ["NaN", 1], "Infinity", "-Infinity", None, True, "2024-01-02T00:00:00Z",
    ]  # fmt: skip


def test_rows_show_half_of_an_interval() -> None:
    table = pa.table({"page": ["a", "b"], "n": [1_234.0, None]})
    text = rows_text(table, {"n": pa.table({"low": [1_200.0, None], "high": [1_268.0, None]})})
    assert text.splitlines() == [
        "page          n",
        "----  ---------",
        "a     1,234 ±34",
        "b          NULL",
    ]
    assert "±" not in rows_text(table, {})


CUT = Cut("values", 0.0, 9.0, 0.0, 0.02, 0.01, 0.1, 0.3)


def test_what_bounds_cut_is_said_of_each() -> None:
    """Each kind of bound has its own subject; given bounds are named."""
    kinds = ("values", "bounds", "rows", "groups")
    cuts = {kind: msgspec.structs.replace(CUT, of=kind) for kind in kinds}
    lines = cut_lines(cuts, ("rows of s",), "user", "page", True)
    assert lines[0] == INTERVALS and len(lines) == 6
    assert lines[1].startswith(
        "Bounds of values, chosen privately: 0 to 9; about 0% of values are below"
    )
    assert (
        "counts up to 9 times the given bounds" in lines[2]
        and "random page of each user" in lines[2]
    )
    assert lines[3].startswith("At most 9 rows of one user in a page count, chosen privately")
    assert (
        lines[4].startswith("At most 9 pages of one user count")
        and "pairs of user and page" in lines[4]
    )
    assert lines[5] == "Not estimated: what the given bounds cut (rows of s)."
    assert all("about 10% of" in line and "up to 30%" in line for line in lines[1:5])
    assert cut_lines({}, (), "user", "", False) == []


def test_further_lines_stand_below_the_text() -> None:
    lines = [*labelled("Can run", "no", "Fix: wait"), *each("Warning", ["a", "b"])]
    text = "Can run     no\n            Fix: wait\nWarning     a\nWarning     b\n"
    assert page(lines) == text and page([]) == "" and each("Note", []) == []


def test_long_texts_are_wrapped() -> None:
    lines = wrapped("Budget", "word " * 40)
    assert len(lines) == 3 and all(len(line) <= 100 for line in lines)
    assert lines[1].startswith(" " * 12 + "word")


def test_numbers_have_their_noun() -> None:
    assert [count(n, "charge") for n in (0, 1, 2_000)] == ["0 charges", "1 charge", "2,000 charges"]
    assert count(3, "box", "boxes") == "3 boxes"


def test_values_are_one_safe_line() -> None:
    values = {
        1_234_567.0: "1,234,567", 0.1234567: "0.123457", 1e16: "1e+16", 1.5: "1.5", -2.0: "-2",
        None: "NULL", b"\x00\xff": "00ff", "a\x1b[2J\n": "a\ufffd[2J\ufffd", math.inf: "Infinity",
        datetime(2024, 1, 2, 3, tzinfo=UTC): "2024-01-02T03:00:00Z", date(2024, 1, 2): "2024-01-02",
        True: "True",
    }  # fmt: skip
    assert {value: value_text(value) for value in values} == values
    assert value_text([1.0, None]) == "[1, NULL]"


def test_an_interval_is_its_half_width() -> None:
    """And the value has the digits of that, because further ones are noise."""
    assert with_interval(100.0, 90.2, 109.8) == "100 ±9.8"
    assert with_interval(28.0607, 22.38, 33.74) == "28.06 ±5.68"
    assert with_interval(0.1, 0.1, 0.1) == "0.1 ±0"
    assert with_interval(5.5, 4.5, 6.5) == "5.5 ±1" and value_text(-0.0) == "0"
    assert with_interval(1_234.567, 984.6, 1_484.6) == "1,235 ±250"
    # Of a median, and of a value that a bound has cut.
    assert with_interval(9.13, 9.048, 12.0) == "9.13 [9.05, 12]"
    assert with_interval(20, 16.4, 20.0) == "20 [16.4, 20]"
    assert with_interval(0.0123456, 0.0121456, 0.0125456) == "0.0123456 ±2e-4"
    assert (
        with_interval(7, 5.0, 9.5) == "7 ±2.25" and with_interval([1.5], 1.0, 2.0) == "[1.5] ±0.5"
    )
    for low, high in ((None, 1.0), (1.0, None), (-math.inf, math.inf), (math.nan, 1.0)):
        assert with_interval(1.23456, low, high) == "1.23456"


def test_columns_are_aligned() -> None:
    text = table_text(["page", "n"], [["a", "long name"], ["1", "10"]], [False, True])
    assert text.splitlines() == [
        "page        n", "---------  --", "a           1", "long name  10",
    ]  # fmt: skip
    assert table_text(["n"], [[]], [True]) == "n\n-\n"
    assert table_text([""], [["", ""]], [False]).splitlines() == ["", "-", "", ""]


# Templates escape what they are given; a page replaces only an older one of its own.


def test_texts_are_escaped_and_names_must_be_there() -> None:
    template = pages().from_string("{{ a }}{{ b }} {{ n|human }}")
    assert template.render(a="<b>&", b=Markup("<i>"), n=12345) == "&lt;b&gt;&amp;<i> 12,345"
    with pytest.raises(UndefinedError):
        template.render(a="", b="")


def test_templates_include_each_other() -> None:
    style = pages().get_template("style.css.j2").render()
    assert "--ink" in style and "<" not in style
    assert pages().from_string('<style>{% include "style.css.j2" %}</style>').render() == (
        f"<style>{style}</style>"
    )


def test_the_policy_names_the_script_and_nothing_else() -> None:
    digest = base64.b64encode(hashlib.sha256(script_text().encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policy(True).split("; "))
    assert rules["script-src"] == f"'sha256-{digest}'" and rules["default-src"] == "'none'"
    assert rules["base-uri"] == rules["form-action"] == "'none'" and "connect-src" not in rules
    assert policy(True, live=True) == policy(True) + "; connect-src 'self'"
    assert policy(images=True) == policy() + "; img-src data:" and "script-src" not in policy()
    page = document("waiting.html.j2", "report", script=True, live="7", text="<b>not yet")
    assert page.startswith(mark_of("report")) and f"<script>{script_text()}</script>" in page
    assert "&lt;b&gt;not yet" in page and "connect-src" in page
    assert "<script" not in document("waiting.html.j2", "report", text="")


def test_the_script_writes_text_alone() -> None:
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert sink not in script_text()
    assert "</script" not in script_text() and "<!--" not in script_text()


def test_data_holds_no_mark_of_html() -> None:
    evil = ["</script><script>alert(1)</script>", "<!--", "&lt;", "\u2028\u2029", '"\\']
    text = embedded({"keys": evil})
    assert not set("<>&\u2028\u2029") & set(text) and json.loads(text) == {"keys": evil}


def test_only_files_of_its_own_are_replaced(tmp_path: Path, refused: Refused) -> None:
    out, mark = tmp_path / "a.html", mark_of("report")
    for content in ("one", "two"):
        write_own(out, mark + content, mark)
    assert out.read_text() == mark + "two" and begins_with(out, mark)
    for other in (mark_of("session"), "<p>mine", ""):
        out.write_text(other)
        error = refused(write_own, out, mark, mark)
        assert error.field == "--out" and out.read_text() == other
    refused(write_own, tmp_path / "none" / "a.html", mark, mark)


def test_what_is_not_private_is_for_its_owner_alone(tmp_path: Path) -> None:
    write_own(tmp_path / "a.html", mark_of("report"), mark_of("report"), PRIVATE)
    assert (tmp_path / "a.html").stat().st_mode & 0o777 == 0o600


def test_a_name_has_one_of_the_endings(refused: Refused) -> None:
    assert ending_of(Path("a/x.PNG"), ("html", "png")) == "png"
    for name in ("a/x.svg", "a/x", "a/.png"):
        refused(ending_of, Path(name), ("html", "png"), "--picture")


def test_the_same_numbers_are_the_same_bytes() -> None:
    series = [np.array([1.0, 2.0, 400.0])]
    one, other = (lines("n", series, 'w "<&', "across", "up") for _ in range(2))
    assert one == other and one.text == 'w "<&'
    assert one.svg.startswith('<svg role="img" aria-label="w &quot;&lt;&amp;" viewBox=')
    assert "<metadata" not in one.svg and "#0a0b00" not in one.svg and "var(--s0)" in one.svg


def test_pictures_of_one_page_have_ids_of_their_own() -> None:
    values, sds = np.array([1.0, -5.0]), np.array([0.1, 2.0])
    one, other = (relative_noise(name, values, sds, "w").svg for name in ("a", "b"))
    assert 'id="a-' in one and 'id="b-' not in one and 'id="b-' in other


def ticks(picture: Picture) -> list[str]:
    return re.findall(r"<text[^>]*>([\d.,]+)</text>", picture.svg)


@pytest.mark.parametrize("triggers", [1, 2, 3, 7, 30])
def test_ticks_of_integers_are_integers(triggers: int) -> None:
    values = np.full(triggers, 0.5)
    labels = ticks(lines("n", [values], "w", "a", "u"))
    height = labels.index("0", 1)  # where the labels of the other axis begin
    keys = ticks(counts("n", np.arange(triggers) + 1, np.ones(triggers, np.int64), "w", "a"))
    for numbers in (labels[:height], keys[: keys.index("0", 1)]):
        assert numbers and all(number.isdigit() for number in numbers)
        assert len(numbers) == len({*numbers})


def test_values_shown_without_fractions_have_no_label_twice() -> None:
    _, axes = axes_of(3.6, 2.2)
    for low, high in ((1_000.0, 1_001.5), (2_000.2, 2_003.0), (0.2, 0.9)):
        axes.set_ylim(low, high)
        values_axis(axes.yaxis)
        labels = [axes.yaxis.get_major_formatter()(at) for at in axes.yaxis.get_majorticklocs()]
        assert len(labels) == len({*labels}) > 1


@pytest.mark.parametrize("scale", [1.0, 1.6, 5.0, 40.0, 1e4])
def test_values_near_each_other_have_labels_too(scale: float) -> None:
    """Also where no power of ten is among them."""
    values = np.linspace(210.0, 210.0 * scale + 1, 5)
    picture = relative_noise("n", values, values / 8, "w")
    numbers = [float(label.replace(",", "")) for label in ticks(picture)]
    assert sum(200 <= number <= 1.2 * values[-1] for number in numbers) >= 2


def test_a_long_line_keeps_its_extremes() -> None:
    assert drawn_positions(np.zeros(LINE_POINTS)).tolist() == list(range(LINE_POINTS))
    values = np.random.default_rng(1).standard_normal(10 * LINE_POINTS)
    indices = drawn_positions(values)
    assert len(indices) <= LINE_POINTS + 2 and (np.diff(indices) > 0).all()
    assert {0, len(values) - 1, values.argmin(), values.argmax()} <= set(indices.tolist())


def test_further_lines_are_dashed() -> None:
    assert swatches(COLOURS + 1) == [*(f"s{n}" for n in range(COLOURS)), "s0 dashed"]


def test_points_and_what_they_say() -> None:
    figure, axes = axes_of(2, 2)
    axes.plot([1, 2], [3, 4])
    picture = Picture.of(figure, "p", "words", ["<b>", "two"], ([1, 2], [3, 4]))
    assert isinstance(picture.svg, Markup) and not isinstance(picture.tips, Markup)
    (left, top, first), (right, bottom, second) = json.loads(picture.tips)
    assert 0 < left < right < 1 and 0 < bottom < top < 1 and (first, second) == ("<b>", "two")
    assert Picture.of(figure, "p", "words").tips == ""
