"""The manifest of a table's folder: whole or refused, and of one account."""

import itertools
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.accounting.regions.space import Budget, Integer
from dpstream.accounting.sessions.table import SessionTable
from dpstream.pipelines.session.records.manifest import (
    MANIFEST,
    Manifest,
    Part,
    check_account,
    commit,
    read_manifest,
    refuse_table,
)
from tests import accounts

ID = "1d" * 8


def table(high: int = 9) -> SessionTable:
    dimensions = (Integer(name="a", low=0, high=high, missing="point"), Budget(name="e", most=1.0))
    return SessionTable(name="small", dimensions=dimensions)


TABLE = table()


def manifest(*parts: Part, version: int = 1) -> Manifest:
    return Manifest(1, ID, TABLE.digest, version, "string", "00" * 32, parts)


def test_a_manifest_is_whole_or_refused(tmp_path: Path) -> None:
    part_manifest = manifest(Part("ab", 3, True))
    commit(tmp_path, part_manifest)
    assert read_manifest(tmp_path, TABLE) == part_manifest
    data = (tmp_path / MANIFEST).read_bytes()
    for at, bit in itertools.product(range(len(data)), (1, 0x80)):  # the second is no UTF-8
        (tmp_path / MANIFEST).write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        with pytest.raises(RunError, match="damaged"):
            read_manifest(tmp_path, TABLE)
    for size in range(0, len(data), 9):
        (tmp_path / MANIFEST).write_bytes(data[:size])
        with pytest.raises(RunError, match="damaged"):
            read_manifest(tmp_path, TABLE)


def test_manifests_of_others(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no table"):
        read_manifest(tmp_path, TABLE)
    commit(tmp_path, manifest())
    with pytest.raises(PolicyError, match="holds another table"):
        read_manifest(tmp_path, table(8))
    commit(tmp_path, Manifest(2, ID, TABLE.digest, 1, None, None, ()))
    with pytest.raises(PolicyError, match="holds another table"):
        read_manifest(tmp_path, TABLE)


def test_one_that_is_made_finds_no_table(tmp_path: Path) -> None:
    refuse_table(tmp_path, "t")
    commit(tmp_path, manifest())
    with pytest.raises(PolicyError):
        refuse_table(tmp_path, "t")


def test_a_table_has_one_account(tmp_path: Path) -> None:
    own = accounts.of_records(tmp_path / "own.db")
    with pytest.raises(PolicyError) as caught:
        check_account(manifest(), own.history())
    assert caught.value.field == "table.coordinates"
    assert ID in caught.value.rule and accounts.ID in caught.value.rule
    own.name_table(ID)
    check_account(manifest(version=7), own.history())
    own.close()
