"""A ledger's file: opened, upgraded from what older programs wrote, refused where it must be."""

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.state.ledger.charges import Charge
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.file import SCHEMA_VERSION
from dpstream.state.ledger.lineage import begun_epoch
from dpstream.state.ledger.open import open_ledger, read_ledger
from dpstream.state.ledger.seal import check_old_seal
from dpstream.state.sqlite import database
from dpstream.state.sqlite.database import sqlite3
from tests.state.ledger.conformance import Asker
from tests.state.ledger.test_sqlite import DELTA, EPSILON, charge


def test_a_ledger_without_digest_gets_one(ledger: Ledger, tmp_path: Path) -> None:
    """One of version 2, which had all but that."""
    path = tmp_path / "data" / "ledger.db"
    ledger.charge(charge(1), EPSILON, DELTA)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE ledger_meta SET value = '2' WHERE name = 'schema_version'")
        db.execute("DELETE FROM ledger_meta WHERE name = 'seal'")
    db.close()
    assert len(read_ledger(path)) == 1
    again = open_ledger(path, "flights")
    again.charge(charge(2), EPSILON, DELTA)
    again.close()
    with sqlite3.connect(path) as db:
        assert len(db.execute("SELECT * FROM ledger_meta").fetchall()) == 2
    db.close()
    assert len(read_ledger(path)) == 2


def test_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(b"not a database" * 100)
    with pytest.raises(PolicyError, match="is damaged, or no ledger"):
        open_ledger(tmp_path / "ledger.db", "flights")


#: A ledger as the program wrote it before there were kinds, epochs and tokens.
OLD = """
CREATE TABLE entries (
  seq INTEGER PRIMARY KEY, data_set TEXT NOT NULL, run_id TEXT NOT NULL,
  entry TEXT NOT NULL, digest TEXT NOT NULL, UNIQUE (data_set, run_id));
INSERT INTO entries VALUES (1, 'flights', '0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a',
  '{"delta":1e-7,"epsilon":1.0,"mu":0.18,"plan_hash":"plan",\
"run_id":"0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a","threshold_delta":4e-8,\
"unit":"user over the whole stream"}', '29868d16b3aa5a391456d6eb4d96544a');
INSERT INTO entries VALUES (2, 'flights', '0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b',
  '{"delta":1e-7,"epsilon":0.5,"mu":0.1,"plan_hash":"plan",\
"run_id":"0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b","threshold_delta":0.0,\
"unit":"user over the whole stream"}', 'c2cddd8e6f32059018525a4c81f9eab1');
"""


def test_an_old_ledger_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with sqlite3.connect(path) as db:
        db.executescript(OLD)
    db.close()
    before = path.read_bytes()
    assert [(e.seq, e.charge.mu, e.charge.kind) for e in read_ledger(path)] == [
        (1, 0.18, "run"), (2, 0.1, "run"),
    ]  # fmt: skip
    assert path.read_bytes() == before  # who only looks writes nothing
    ledger = open_ledger(path, "flights")
    old = ledger.entries()
    assert [c.run_id for c in old] == ["0a" * 16, "0b" * 16]
    assert ledger.charge(old[1], EPSILON, DELTA) is False
    assert ledger.charge(charge(1), EPSILON, DELTA) is True
    ledger.close()
    assert len(read_ledger(path)) == 3
    with sqlite3.connect(path) as db:
        db.execute("UPDATE entries SET entry = replace(entry, '0.18', '0.08') WHERE seq = 1")
    db.close()
    with pytest.raises(PolicyError, match="chain is broken"):
        read_ledger(path)


def test_a_ledger_of_a_newer_program_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "data" / "ledger.db"
    with sqlite3.connect(path) as db:
        db.execute("UPDATE ledger_meta SET value = '5' WHERE name = 'schema_version'")
    db.close()
    for attempt in (lambda: open_ledger(path, "flights"), lambda: read_ledger(path)):
        with pytest.raises(PolicyError, match="schema version is beyond 4"):
            attempt()


def test_another_programs_database_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "accounts.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE accounts (x)")
    db.close()
    before = path.read_bytes()
    for attempt in (lambda: open_ledger(path, "flights"), lambda: read_ledger(path)):
        with pytest.raises(PolicyError, match="another program"):
            attempt()
    assert path.read_bytes() == before
    (tmp_path / "empty.db").touch()
    assert read_ledger(tmp_path / "empty.db") == []  # whose making was cut off
    with pytest.raises(UsageError, match="no such file"):
        read_ledger(tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()


def test_a_busy_ledger_says_so(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    other = open_ledger(tmp_path / "data" / "ledger.db", "flights")
    with (
        ledger.transaction(),
        pytest.raises(RunError, match=r"busy: another process has held it for 0\.05 s"),
    ):
        other.charge(charge(1), EPSILON, DELTA)
    assert other.charge(charge(1), EPSILON, DELTA) is True
    other.close()


#: A ledger of version 3: a stream, an answered tuning, a killed one, a promised epoch, a session.
VERSION_3 = r"""
CREATE TABLE choices (
  run_id TEXT PRIMARY KEY, data_set TEXT NOT NULL, request TEXT NOT NULL,
  receipt TEXT, digest TEXT);
CREATE TABLE entries (
  seq INTEGER PRIMARY KEY, data_set TEXT NOT NULL, run_id TEXT NOT NULL,
  entry TEXT NOT NULL, digest TEXT NOT NULL, UNIQUE (data_set, run_id));
CREATE TABLE tokens (
  run_id TEXT NOT NULL, token TEXT NOT NULL, previous TEXT, PRIMARY KEY (run_id, token));
CREATE TABLE ledger_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO choices VALUES('0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b','flights','answered',
  '{"contributions":8}','24ecb9dcc983d49623b05dd1737ed922');
INSERT INTO choices VALUES('0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c','flights','killed',NULL,NULL);
INSERT INTO tokens VALUES('0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d/promised','0',NULL);
INSERT INTO ledger_meta VALUES('schema_version','3');
INSERT INTO ledger_meta VALUES('seal','2280a314504edce0d879968d854ce5b1');
"""
ENTRY_3 = (
    '{"alone":false,"delta":1e-7,"epoch":0,"epsilon":1.0,'
    '"identity":"unit/1 {\\"name\\":\\"user\\",\\"type\\":\\"string\\"}","kind":"KIND","mu":MU,'
    '"periods":1,"plan_hash":"plan","run_id":"RUN","threshold_delta":0.0,"together":1,'
    '"unit":"user over the whole stream"}'
)
ENTRIES_3 = (
    ("0a", "stream", "0.125", "47e692fa3833f0b5bd86d16bd679a311"),
    ("0b", "choice", "0.125", "b65f2a3e4bd74b56243f8c8da987d3a7"),
    ("0c", "choice", "0.125", "28ab7b93e4dc9fdf0a44173e7a4723c1"),
    ("0d", "stream", "0.125", "62ad65d4acc043edb6aef6ddd1efefeb"),
    ("0e", "session", "null", "f19930c6ed061832f6c78d04d38b7bb0"),
)


def version_3(path: Path) -> None:
    """Write the ledger as the program of that time did."""
    with sqlite3.connect(path) as db:
        db.executescript(VERSION_3)
        for seq, (run, kind, mu, digest) in enumerate(ENTRIES_3, 1):
            text = ENTRY_3.replace("KIND", kind).replace("MU", mu).replace("RUN", 16 * run)
            db.execute(
                "INSERT INTO entries VALUES (?, 'flights', ?, ?, ?)", (seq, 16 * run, text, digest)
            )
    db.close()


def test_a_ledger_of_version_3_goes_on(tmp_path: Path) -> None:
    """Its receipt is read again, its killed tuning goes on, what was promised stays promised."""
    path = tmp_path / "ledger.db"
    version_3(path)
    before = path.read_bytes()
    assert [e.charge.kind for e in read_ledger(path)] == [kind for _, kind, _, _ in ENTRIES_3]
    assert path.read_bytes() == before
    with contextlib.closing(open_ledger(path, "flights")) as ledger:
        register = Asker(ledger, "choice")
        answer = register.read("0b" * 16)
        assert answer is not None and answer.receipt == b'{"contributions":8}'
        assert answer.digest == "24ecb9dcc983d49623b05dd1737ed922"  # as job files name it
        assert register.find("answered") == "0b" * 16 and register.find("killed") == "0c" * 16
        new = msgspec.structs.replace(ledger.entries()[1], run_id="0f" * 16)
        done = register.answered(new, "killed", (9.0, 1e-5), lambda run_id: run_id.encode())
        assert done[:2] == ("0c" * 16, b"0c" * 16) and not done.charged
        assert register.answered(new, "answered", (9.0, 1e-5), lambda _: b"") == answer
        assert begun_epoch(ledger, "0d" * 16) == -1 and begun_epoch(ledger, "0a" * 16) == 0
        assert len(ledger.entries()) == 5 and ledger.head().digest == ENTRIES_3[-1][3]
        zcdp = msgspec.structs.replace(new, kind="table", mu=None, rho=0.01)
        assert ledger.charge(zcdp, 9.0, 1e-5)
    assert read_ledger(path)[-1].charge == zcdp


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET run_id = 'x' WHERE seq = 2",
        "UPDATE choices SET receipt = NULL",
        "DELETE FROM tokens",
        "DELETE FROM ledger_meta WHERE name = 'seal'",
        "DELETE FROM entries WHERE seq = 5",
    ],
)
def test_an_upgrade_seals_no_damage(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "ledger.db"
    version_3(path)
    with sqlite3.connect(path) as db:
        db.execute(statement)
    db.close()
    before = path.read_bytes()
    for attempt in (lambda: read_ledger(path), lambda: open_ledger(path, "flights")):
        with pytest.raises(PolicyError, match="is damaged"):
            attempt()
    assert path.read_bytes() == before


def test_a_program_of_version_3_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    """One that opens it sees the version; one that had it open, the seal and the new entry."""
    path = tmp_path / "ledger.db"
    version_3(path)
    with contextlib.closing(open_ledger(path, "flights")) as ledger:
        zcdp = msgspec.structs.replace(ledger.entries()[4], run_id="0f" * 16, rho=0.01)
        ledger.charge(zcdp, 9.0, 1e-5)
    with sqlite3.connect(path) as db:
        ((version,),) = db.execute("SELECT value FROM ledger_meta WHERE name = 'schema_version'")
        assert int(version) == SCHEMA_VERSION > 3
        with pytest.raises(PolicyError, match="is damaged"):
            check_old_seal(db)
        *old, new = (text for (text,) in db.execute("SELECT entry FROM entries ORDER BY seq"))
    db.close()
    fields = {f.name for f in msgspec.structs.fields(Charge)} - {"rho"}
    known = msgspec.defstruct(
        "Charge3", [(f, Any, None) for f in sorted(fields)], forbid_unknown_fields=True
    )
    for text in old:
        msgspec.json.decode(text, type=known)
    with pytest.raises(msgspec.ValidationError, match="unknown field `rho`"):
        msgspec.json.decode(new, type=known)
