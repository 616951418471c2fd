"""The page: self-contained, escaped, of the ledger alone; files that are not ours stay."""

import re
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.session import page
from dpstream.pipelines.session.page import Chosen
from dpstream.pipelines.session.records.load import add
from dpstream.pipelines.session.session import Session
from tests.browser import DESKTOP, PHONE, browser
from tests.pipelines.session.small import RECORDS, config_at


def opened(folder: Path, records: str = RECORDS) -> Session:
    session = Session(config_at(folder, records), analyst="<b>alice</b>")
    session.where("a < 2 AND epsilon >= 1").count(0.5)
    session.where("rho >= 0.5").as_pinq(0.25, "rho").count(0.125)
    return session


def test_the_page_is_of_the_ledger_alone(tmp_path: Path) -> None:
    pages = []
    for number, records in enumerate((RECORDS, RECORDS.splitlines()[0] + "\n")):
        with opened(tmp_path / str(number), records) as session:
            (session.open_table.config.folder / "manifest.json").unlink()
            text = page.render(session.open_table, Chosen((("b", "epsilon"),)))
        pages.append(re.sub(r"[0-9a-f]{32}|\d{4}-\d\d-\d\d[T ][\d:]+(Z| UTC)", "", text))
    # But for the clock's marks on the picture over time nothing differs.
    one, other = (re.sub(r"<svg.*?</svg>", "", text, flags=re.S) for text in pages)
    assert one == other


def test_the_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        text = page.render(session.open_table, Chosen())
    assert text.startswith(page.MARK) and "INSECURE" in text
    assert "&lt;b&gt;alice" in text and "<b>alice" not in text
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", text) and "<script" not in text
    for phrase in ("allotment", "draw: count", "question: count", "a &lt; 2 AND epsilon &gt;= 1",
                 "zCDP", "rho"):  # fmt: skip
        assert phrase in text, phrase
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    with opened(tmp_path / "table") as session:
        file = tmp_path / "page.html"
        file.write_text(page.render(session.open_table, Chosen()), encoding="utf-8")
    with browser(tmp_path / "browser") as chromium:
        for screen in (DESKTOP, PHONE):
            tab = chromium.open(file.as_uri(), screen)
            assert tab.width <= screen[0] and not tab.complaints() and not tab.requests()
            assert tab.run("[...document.querySelectorAll('svg')].every(s => s.clientWidth > 100)")
            assert "<b>alice</b>" in tab.run("document.body.textContent")


def test_frames_and_pairs(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        part = session.where("a = 1 OR a = 3")
        assert page.frame_of(part.boxes())[0].tolist() == [1, 4]
        with pytest.raises(UsageError, match="true nowhere"):
            page.frame_of(session.where("a < 0").boxes())
        assert page.png(session.open_table, Chosen(kind="rho")).startswith(b"\x89PNG")
        assert page.png(session.open_table, Chosen(over_time=True)).startswith(b"\x89PNG")
        for wrong in (Chosen(kind="delta"), Chosen((("a", "b"), ("b", "a")))):
            with pytest.raises(UsageError):
                page.png(session.open_table, wrong)
    assert page.pairs_of(["a, b"]) == (("a", "b"),) and page.initial_of("0.5") == 500_000
    for wrong_pair in ("a", "a,b,c"):
        with pytest.raises(UsageError, match="--by"):
            page.pairs_of([wrong_pair])


def test_only_files_of_our_own_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "a.html"
    for _ in range(2):
        page.write(out, page.MARK + " x")
    assert out.read_text() == page.MARK + " x"
    mine = tmp_path / "mine.html"
    mine.write_text("<p>mine")
    with pytest.raises(PolicyError, match="something else"):
        page.write(mine, page.MARK)
    assert mine.read_text() == "<p>mine" and page.kind_of(Path("x.PNG")) == "png"
    with pytest.raises(UsageError, match="--out"):
        page.kind_of(Path("x.svg"))


def test_a_page_of_nothing_asked(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    add(config, [tmp_path / "small.csv"])
    with Session(config) as session:
        assert "Nothing was asked yet" in page.render(session.open_table, Chosen())
