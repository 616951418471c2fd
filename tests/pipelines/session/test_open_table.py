"""The desk: opened in order, closed whole, and reading the newest records."""

from pathlib import Path
from shutil import rmtree

import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.session.config import load_config
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.records.load import add, init
from dpstream.state.ledger.open import PROJECT_FILE
from tests import accounts
from tests.pipelines.session.small import PROJECT, RECORDS, config_at


def test_a_scan_is_of_the_newest_version(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    (tmp_path / "more.csv").write_text(RECORDS.splitlines()[0] + "\nx,1,1,1.0,0.5\n")
    for held in (False, True):
        with OpenTable(config, "alice", held) as open_table:
            first = open_table.scan()
            assert open_table.scan() is first
            add(config, [tmp_path / "more.csv"])
            assert (
                open_table.scan() is not first
                and open_table.scan().manifest.version > first.manifest.version
            )


def test_records_of_a_table_that_was_made_anew_are_not_read_any_more(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    with OpenTable(config, "alice", held=True) as open_table:
        first = open_table.scan()
        rmtree(config.folder)
        init(config)  # the ids' key is another: other parts, of the same number
        assert (
            open_table.scan() is not first
            and open_table.scan().manifest.version == first.manifest.version
        )


def test_a_ledger_that_lacks_the_last_charge_is_refused(tmp_path: Path) -> None:
    from dpstream.pipelines.session.session import Session

    config = config_at(tmp_path)
    with Session(config) as session:
        session.where("epsilon >= 1").count(0.5)
    before = (tmp_path / "ledger.db").read_bytes()
    with Session(config) as session:
        session.where("epsilon >= 1").count(0.25)
    (tmp_path / "ledger.db").write_bytes(before)
    with pytest.raises(PolicyError, match="older or replaced"):
        OpenTable(config, "alice")


def test_the_key_is_wiped(tmp_path: Path) -> None:
    with OpenTable(config_at(tmp_path), "alice") as open_table:
        ring = open_table.ring
        assert open_table.insecure and ring is open_table.ring
    with pytest.raises(Exception, match="destroyed"):
        ring.source_fingerprint([b"x"])


def test_names_of_analysts(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    for name in ("", "a\nb", "x" * 201):
        with pytest.raises(UsageError, match="--analyst"):
            OpenTable(config, name)


def test_another_table_in_the_ledger_is_refused(tmp_path: Path) -> None:
    from dpstream.pipelines.session.session import Session

    with Session(config_at(tmp_path)) as session:
        session.where("epsilon >= 1").count(1)
    text = PROJECT.format(key="22" * 32, more="")
    assert "high = 4" in text
    accounts.write(tmp_path / PROJECT_FILE, text.replace("high = 4", "high = 5"))
    with pytest.raises(PolicyError, match="another table"):
        OpenTable(load_config(tmp_path), "alice")
