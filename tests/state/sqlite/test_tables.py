"""The format of a store, and rows of meta that are what was put there."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.sqlite.backup import backup_file, check_file
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.file import create_store, peek_identity, peek_note
from dpstream.state.sqlite.tables import TABLES, put_meta, read_meta
from tests.state.conformance import IDENTITY
from tests.state.sqlite.bench import SqliteBench


def change(path: Path, statement: str, *values: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(statement, values)
    db.close()


def refusal(attempt: object) -> str:
    with pytest.raises(PolicyError) as caught:
        attempt()  # type: ignore[operator]
    assert caught.value.field == "store"
    return caught.value.fix


@pytest.mark.parametrize("before", ["1", "2", "sealed 3", "sealed format 2"])
def test_another_format_is_refused_and_left_alone(
    bench: SqliteBench, tmp_path: Path, before: str
) -> None:
    """Programs before format 1 wrote a number without a digest, or with one (3)."""
    bench.open().close()
    bench.close()
    if before == "sealed format 2":
        with sqlite3.connect(bench.path) as db:
            put_meta(db, "format", "2")
        db.close()
    else:
        change(bench.path, "DELETE FROM meta WHERE name = 'format'")
        name = "schema_version"
        with sqlite3.connect(bench.path) as db:
            if before == "sealed 3":
                put_meta(db, name, "3")
            else:
                db.execute("INSERT INTO meta VALUES (?, ?)", (name, before))
        db.close()
    was = Path(bench.path).read_bytes()
    fixes = {
        refusal(attempt)
        for attempt in (
            bench.open,
            lambda: create_store(bench.path, IDENTITY),
            lambda: peek_identity(bench.path),
            lambda: peek_note(bench.path, "x"),
            lambda: check_file(Path(bench.path)),
            lambda: backup_file(bench.path, tmp_path / "backup"),
        )
    }
    assert len(fixes) == 1 and "the program that wrote it" in fixes.pop()
    assert Path(bench.path).read_bytes() == was and not (tmp_path / "backup").exists()


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM meta WHERE name = 'format'",
        "UPDATE meta SET value = '1' WHERE name = 'format'",
        "UPDATE meta SET value = '' WHERE name = 'format'",
        "DELETE FROM meta WHERE name = 'identity'",
    ],
)
def test_a_format_or_identity_that_no_program_wrote_is_damage(
    bench: SqliteBench, damage: str
) -> None:
    bench.open().close()
    bench.close()
    change(bench.path, damage)
    for attempt in (bench.open, lambda: create_store(bench.path, IDENTITY)):
        assert "state restore" in refusal(attempt)


def test_a_row_of_meta_is_read_as_it_was_put() -> None:
    db = sqlite3.connect(":memory:")
    db.executescript(TABLES)
    assert read_meta(db, "x") is None
    for text in ("a b", "", "ä"):
        put_meta(db, "x", text)
        assert read_meta(db, "x") == text
    put_meta(db, "y", "c")
    db.execute("UPDATE meta SET value = (SELECT value FROM meta WHERE name = 'y')")
    with pytest.raises(PolicyError, match="is damaged"):
        read_meta(db, "x")
    db.close()
