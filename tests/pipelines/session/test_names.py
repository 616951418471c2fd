"""Names of subspaces: kept beside the project file, replaced whole."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.session import names
from dpstream.pipelines.session.config import Config
from tests.pipelines.session.tables import config_at


def test_names_are_kept(tmp_path: Path) -> None:
    table = config_at(tmp_path)
    assert names.read(table) == names.Names()
    names.write(table, "night", "hour >= 22")
    names.write(table, "day", "hour < 22")
    names.write(table, "night", "hour >= 21")
    names.write(table, "first", run_id="ab")
    assert names.predicate(table, "night") == "hour >= 21"
    assert sorted(names.read(table).subspaces) == ["day", "night"]
    assert names.file_of(table) == tmp_path / "rides.names.json"
    assert names.allotment(table, "first") == "ab" and names.allotment(table, "cd") == "cd"
    with pytest.raises(UsageError, match=r"named 'noon'.*known here: day, night") as caught:
        names.predicate(table, "noon", " --project shop")
    assert "`dpstream session select rides noon --where 'CONDITION' --project shop`" in str(
        caught.value
    )
    names.check("night")
    with pytest.raises(UsageError, match="letters"):
        names.check("a b")


def _write_some(table: Config, who: int) -> None:
    for i in range(20):
        names.write(table, f"n{who}_{i}", "hour >= 22")


def test_no_name_is_lost_that_another_process_writes(tmp_path: Path) -> None:
    table = config_at(tmp_path)
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        list(pool.map(_write_some, [table] * 3, range(3)))
    assert len(names.read(table).subspaces) == 60


@pytest.mark.parametrize("text", ["[", "[1]", '{"subspaces": {"a": 1}}', '{"a": {}}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    table = config_at(tmp_path)
    for data in (text.encode(), b'{"subspaces": {"\xff": "hour >= 22"}}'):
        names.file_of(table).write_bytes(data)
        with pytest.raises(PolicyError, match="another form"):
            names.read(table)
