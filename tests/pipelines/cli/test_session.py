"""``dpstream session``: records come and go, ranges are closed, and only the operator is told."""

from pathlib import Path

from tests.pipelines.cli.sessions import called, loaded, prepared, refused, told


def test_records_come_and_go(tmp_path: Path) -> None:
    table = prepared(tmp_path)
    first = told("init", table)
    assert first == {"version": 1, "tidied": True, "warnings": []}
    assert "holds a table already" in refused(3, "init", table)
    more = tmp_path / "more.csv"
    more.write_text("name,a,b,epsilon,rho\nr0,0,1,1.0,0.5\nr9,0,1,1.0,0.5\n")
    added = called("add", table, str(more), "--operator")
    assert "Version 2" in added.stdout and "records" not in added.stdout
    assert "8 records, 7 usable; 1 taken" in added.stderr and "1 refused" in added.stderr
    assert told("replace", table, str(more), "--operator")["operator_only"]["taken"] == 2
    gone = tmp_path / "gone.csv"
    gone.write_text("name\nr9\n")
    assert told("delete", table, str(gone), "--operator")["operator_only"]["records"] == 7


def test_a_range_is_closed_for_ever(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    assert called("close", table, "--arrival", "b", "--before", "3").output == "Closed.\n"
    assert told("close", table, "--arrival", "b", "--before", "3") == {"closed": False}
    said = refused(3, "ask", table, "--where", "b = 2 AND epsilon = 2", "--epsilon", "0.001")
    assert "0 left where a" in said or "0 left where" in said
    assert "closed  where b < 3" in called("budget", table).output
    assert refused(2, "close", table, "--arrival", "epsilon", "--before", "1").startswith("usage")


def test_nothing_private_is_said(tmp_path: Path) -> None:
    """Canaries: ids, values outside of the domain, and values inside that no question was about."""
    table = prepared(tmp_path)
    rows = "name,a,b,epsilon,rho\n" + "".join(
        f"canary-{n},{n % 4},{'canary' if n % 3 else 7},{'nan' if n == 5 else 1.75},0.5\n"
        for n in range(40)
    )
    (tmp_path / "small.csv").write_text(rows)
    said = [called("init", table), called("add", table, str(tmp_path / "small.csv"))]
    page = str(tmp_path / "page.html")
    for words in (
        ["ask", table, "--where", "epsilon >= 1.5", "--epsilon", "0.5", "--by", "a"],
        ["ask", table, "--where", "b = 'canary'", "--epsilon", "0.5"],
        ["ask", table, "median(b)", "--where", "epsilon >= 1.5", "--rho", "0.5", "--drop"],
        ["plan", table, "--epsilon", "0.5"], ["budget", table], ["transcript", table, "--json"],
        ["select", table, "rich", "--with-epsilon", "0.5"], ["picture", table, "--out", page],
        ["delete", table, str(tmp_path / "small.csv")], ["budget", table],
    ):  # fmt: skip
        said.append(called(*words))
    outputs = "".join(result.output for result in said)
    public = [Path(page), tmp_path / "ledger.db", tmp_path / "small.names.json"]
    held = b"".join(path.read_bytes() for path in public) + outputs.encode()
    assert len(outputs) > 1_000 and b"canary-" not in held
    assert held.count(b"canary") == 0


def test_help_has_examples() -> None:
    for name in ("init", "add", "replace", "delete", "close", "ask", "plan", "allot", "select",
                 "stand", "budget", "transcript", "picture"):  # fmt: skip
        assert "Examples:" in called(name, "--help").output, name
