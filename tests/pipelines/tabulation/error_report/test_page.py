"""The page: whole, without a script or a link, stamped, and every figure in it."""

from pathlib import Path
from typing import Any

from dpstream.accounting.figures import up
from dpstream.pipelines.tabulation.error_report.page import context, render
from tests.browser import DESKTOP, PHONE, browser
from tests.reports import Page

Reported = tuple[dict[str, Any], Path]


def test_page(reported: Reported) -> None:
    figures, out = reported
    text = (out / "report.html").read_text()
    page = Page(text)
    assert page.open == [] and text == render(figures)
    assert not page.every("script") and not page.every("link") and "http" not in page.text
    assert "This page is not private." in page.text and figures["stamp"] in page.text
    assert "INSECURE" in page.text
    assert len(page.every("section")) == 4 and len(page.every("svg")) == 2
    assert figures["plan"]["guarantee"]["text"] in page.text
    for row in figures["plan"]["accountings"]:
        assert f'<td class="n">{up(row["epsilon"])}</td>' in text  # as in the plan
    rows = (
        len(figures["margins"])
        + len(figures["totals"])
        + len(context(figures)["details"][0]["rows"])
    )
    assert len(page.every("tr")) == rows + 4 + len(figures["plan"]["accountings"])
    shares = context(figures)["details"][0]["rows"]
    assert all(abs(sum(row["shares"]) - 1) < 1e-9 for row in shares)


def test_texts_are_escaped(reported: Reported) -> None:
    runs = [{"run_id": "<script>alert(1)</script>", "insecure": False}]
    page = Page(render(reported[0] | {"runs": runs}))
    assert not page.every("script") and "INSECURE" not in page.text


def test_every_kind_of_figure_is_in_the_chart(reported: Reported) -> None:
    """Kinds of few figures too: their interval says how little they show."""
    held = context(reported[0])["held"]
    assert [name for _, name in held["legend"]] == [
        "t1 total", "t1 total only", "t2 sex by age", "t2 sex",
    ]  # fmt: skip
    dots = {(row["level"], row["table"], row["figure"]) for row in reported[0]["margins"]}
    # One line of an interval for each, beside the target's.
    assert held["picture"]["svg"].count("<path") > len(dots)


def test_page_without_a_figure(reported: Reported) -> None:
    nothing = reported[0] | {"margins": [], "cells": [], "totals": []}
    page = Page(render(nothing))
    assert page.open == [] and page.every("svg") == []


def test_tables_fit_the_desk_and_the_page_fits_the_phone(
    reported: Reported, tmp_path: Path
) -> None:
    address = (reported[1] / "report.html").as_uri()
    beyond = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
    with browser(tmp_path) as chromium:
        for screen in (DESKTOP, PHONE):
            tab = chromium.open(address, screen)
            assert tab.width <= screen[0] and tab.complaints() == []
            assert screen == PHONE or tab.run(f"{beyond}.length") == 0
