"""Tables by version, and rows of meta that are what was put there."""

import re

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.tables import TABLES, VERSION_2, VERSION_3, put_meta, read_meta
from tests.state.sqlite.bench import SqliteBench


def test_another_schema_version_is_refused(bench: SqliteBench) -> None:
    with sqlite3.connect(bench.path) as db:
        put_meta(db, "schema_version", "4")
    db.close()
    with pytest.raises(PolicyError, match="schema version"):
        bench.open()


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


def test_an_upgrade_makes_what_a_new_store_has() -> None:
    """Each version adds to the one before, twice over without harm."""
    first = TABLES.removesuffix(VERSION_2 + VERSION_3)
    assert first != TABLES
    schemas = []
    for scripts in ([TABLES], [first, VERSION_2, VERSION_3, VERSION_3]):
        db = sqlite3.connect(":memory:")
        for script in scripts:
            db.executescript(script)
        schemas.append(dict(db.execute("SELECT name, sql FROM sqlite_master")))
        db.close()
    made = set(re.findall(r"(?:TABLE|INDEX) IF NOT EXISTS (\w+)", TABLES))
    assert schemas[0] == schemas[1] and made <= set(schemas[0]) and len(made) == 8
