"""The page: whole, without a script or a link, stamped, and every figure in it."""

from pathlib import Path
from typing import Any

from dpstream.accounting.figures import up
from dpstream.pipelines.tabulation.report_page import context, render
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
    assert figures["plan"]["guarantee"]["words"] in page.text
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
