"""``dpstream session budget|transcript|picture|stand``: what everybody may see."""

from pathlib import Path

from click.testing import CliRunner

from dpstream.pipelines.cli.main import cli
from tests.pipelines.cli.sessions import called, json_of, loaded, refused

QUOTA = "\n[table.small.quota]\nepsilon = 1.5\n"


def test_budgets_and_transcripts(tmp_path: Path) -> None:
    table = loaded(tmp_path, QUOTA)
    assert called("transcript", *table).output == "Nothing was asked yet.\n"
    run_id = json_of("ask", *table, "--where", "a < 2 AND epsilon >= 1", "--epsilon", "0.5")[
        "run_id"
    ]
    text = called("budget", *table).output
    assert "epsilon     spent by a point at most 0.5, at least 0" in text
    assert "0.5  where a < 2 AND epsilon >= 1" in text
    assert "Quota       analyst: epsilon 1.5 of a point, charged to one at most 0.5" in text
    part = json_of("budget", *table, "--where", "a = 0 AND epsilon = 2")
    assert part["budgets"]["epsilon"]["least_spent"] == 0.5
    transcript = called("transcript", *table).output
    assert run_id[:12] in transcript and "question epsilon 0.5: count" in transcript
    [entry] = json_of("transcript", *table)["entries"]
    assert entry["run_id"] == run_id and entry["amount"] == 0.5


def test_pictures(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    json_of("ask", *table, "--where", "epsilon >= 1", "--epsilon", "0.5")
    page = tmp_path / "page.html"
    assert json_of("picture", *table, "--out", str(page), "--by", "a,b") == {"out": "page.html"}
    assert "spent by a point, at most" in page.read_text()
    for words in (["--by", "a,b", "--epsilon", "1"], ["--over-time"], ["--kind", "rho"]):
        out = tmp_path / "one.png"
        assert called("picture", *table, "--out", str(out), *words).exit_code == 0
        assert out.read_bytes()[:4] == b"\x89PNG"
    refused(2, "picture", *table, "--out", str(tmp_path / "a.svg"))
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    refused(3, "picture", *table, "--out", str(mine))


def test_standing_queries(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    words = ["stand", *table, "--where", "epsilon >= 1", "--arrival", "b", "--width", "2",
             "--until", "6", "--epsilon", "1"]  # fmt: skip
    first = json_of(*words, "--tick", "one")
    assert json_of(*words, "--tick", "one")["receipt"] == first["receipt"]
    json_of(*words, "--tick", "two")
    wheres = [entry["where"][0] for entry in json_of("transcript", *table)["entries"]]
    assert wheres == ["b < 2 AND epsilon >= 1", "b >= 2 AND b < 4 AND epsilon >= 1"]
    json_of(*words, "--tick", "three")
    assert "no window" in refused(3, *words, "--tick", "four")


def test_the_ledger_says_that_entries_are_of_points(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    json_of("ask", *table, "--where", "epsilon >= 1", "--epsilon", "0.5")
    outcome = CliRunner().invoke(cli, ["account", "show", str(tmp_path / "ledger.db")])
    assert "record of small" in outcome.output and "paid by some points alone" in outcome.output
