"""Names of subspaces: kept beside the table's file, replaced whole."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.session import names


def test_names_are_kept(tmp_path: Path) -> None:
    table = tmp_path / "rides.toml"
    assert names.read(table) == {}
    names.write(table, "night", "hour >= 22")
    names.write(table, "day", "hour < 22")
    names.write(table, "night", "hour >= 21")
    assert names.predicate(table, "night") == "hour >= 21"
    assert sorted(names.read(table)) == ["day", "night"]
    assert names.file_of(table).name == "rides.subspaces.json"
    with pytest.raises(UsageError, match="no such name"):
        names.predicate(table, "noon")
    with pytest.raises(UsageError, match="letters"):
        names.write(table, "a b", "")


@pytest.mark.parametrize("text", ["[", "[1]", '{"a": 1}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    names.file_of(tmp_path / "t.toml").write_text(text)
    with pytest.raises(PolicyError, match="no names"):
        names.read(tmp_path / "t.toml")
