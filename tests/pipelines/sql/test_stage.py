"""Shards of units and formats of files decide nothing."""

import secrets
from pathlib import Path
from typing import cast

import pytest

from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.sql.stage import MAX_SHARDS, LocalShards
from dpstream.pipelines.tables.engine import Engine, MemoryLimitError
from tests.pipelines.sql.asking import ALL, KEY, answer_to, data_set, dp


def test_shards_and_kinds_of_files_change_no_byte_of_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one run id (a fixed one), 1 and 5 turns of units and three formats agree."""
    tables = []
    text = dp(ALL + ", STDDEV(n, contribution_bounds_per_row => (-3, 8)) AS d, SUM(n) AS x, "
              "MAX(seconds) AS hi") + " ORDER BY page"  # fmt: skip
    text = text.replace("max_groups_contributed = 12", "max_groups_contributed = 4")
    text = text.replace("epsilon = 2", "epsilon = 60")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "5a" * size)
    for kind, shards in (("parquet", 1), ("parquet", 5), ("csv", 1), ("jsonl", 3)):
        folder = tmp_path / f"{kind}{shards}"
        folder.mkdir()
        data_set(folder, kind=kind)
        tables.append(answer_to(folder, text, shards=shards))
    assert tables[0].header.bounds.keys() == {"x", "hi"} and tables[0].table.num_rows >= 6
    first = tables[0].table.drop_columns([])
    assert all(answer.table.equals(first) for answer in tables[1:2])
    # Another catalog is another question: noise differs, the columns do not.
    assert all(answer.table.schema == first.schema for answer in tables[2:])


def test_turns_grow_fourfold_and_end_at_the_most() -> None:
    turns, tried = LocalShards(cast(Engine, None), KeyRing(bytes.fromhex(KEY)), 1), []

    def once() -> None:
        tried.append(turns._shards)
        raise MemoryLimitError("memory", "is too small", "give more")

    with pytest.raises(MemoryLimitError):
        turns._fitted(once)
    assert tried == [1, 4, 16, 64, 256, 1024, MAX_SHARDS] and MAX_SHARDS == 4_096
