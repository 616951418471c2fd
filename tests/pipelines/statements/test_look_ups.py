"""Public tables: one form, unique keys, a digest of their rows."""

from pathlib import Path

import pyarrow as pa
import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.pipelines.project.job_parts import LookUpConfig
from dpstream.pipelines.statements.look_ups import content, key_of, look_up_rows, look_up_table
from dpstream.pipelines.statements.row_local import RowTables

_COLUMNS = {"K": "STRING", "n": "INT64", "d": "DATE", "m": "NUMERIC", "f": "FLOAT64", "b": "BOOL"}
_LINES = ["b,2,2024-01-02,1.5,0.5,true", "a,1,,,nan,no", "a,3,2024-02-31,2,1e400,false"]


def _rows(folder: Path, *lines: str, key: tuple[str, ...] = ("K", "n")) -> pa.Table:
    (folder / "t.csv").write_text("\n".join(["K,n,d,m,f,b", *lines]) + "\n")
    config = LookUpConfig("T", "t.csv", key, _COLUMNS)
    table = look_up_table(config, folder)
    tables = RowTables(UnitIdentity("u", "int"), {"t": table}, keys={"t": key_of(config, table)})
    return look_up_rows(tables, "t")


def test_rows_are_canonical_and_in_order_of_the_key(tmp_path: Path) -> None:
    table = _rows(tmp_path, *_LINES)
    assert table.column("k").to_pylist() == ["a", "a", "b"]
    assert table.column("n").to_pylist() == [1, 3, 2]
    assert [v and str(v) for v in table.column("d").to_pylist()] == [None, None, "2024-01-02"]
    assert table.column("f").to_pylist() == [None, None, 0.5]
    assert table.column("b").to_pylist() == [False, False, True]


def test_keys_are_unique_as_they_are_compared(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="rows with one key") as caught:
        _rows(tmp_path, *_LINES, key=("k",))
    assert "2024" not in str(caught.value)
    spelled = ["e\u0301,1,,,,", "\u00e9,1,,,,"]
    with pytest.raises(PolicyError):
        _rows(tmp_path, *spelled)
    assert _rows(tmp_path, "a,,,,,", "a,,,,,", ",1,,,,", "a,1,,,,").num_rows == 1


@pytest.mark.parametrize("key", [(), ("x",), ("f",), ("m",), ("n", "f")])
def test_keys_that_are_none(key: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(DpstreamError) as caught:
        _rows(tmp_path, *_LINES, key=key)
    assert caught.value.field.startswith("look_up.") and caught.value.fix


@pytest.mark.parametrize(
    ("name", "path"), [("my t", "t.csv"), ("t", "t.txt"), ("t", "none.csv"), ("t", "sqlite:x")]
)
def test_tables_that_are_none(name: str, path: str, tmp_path: Path) -> None:
    config = LookUpConfig(name, path, ("k",), _COLUMNS)
    with pytest.raises(DpstreamError):
        table = look_up_table(config, tmp_path)
        tables = RowTables(UnitIdentity("u", "int"), {"t": table}, keys={"t": ("k",)})
        look_up_rows(tables, "t")


def test_the_digest_is_of_the_rows(tmp_path: Path) -> None:
    first = content(_rows(tmp_path, *_LINES))
    assert first == content(_rows(tmp_path, *reversed(_LINES)))
    others = [
        content(_rows(tmp_path, *_LINES[:2])),
        content(_rows(tmp_path, *_LINES[:2], "a,3,2024-02-31,2,0,false")),
        content(_rows(tmp_path, *_LINES[:2], "a,3,2024-02-29,2,1e400,false")),
        content(_rows(tmp_path, *_LINES[:2], "a,3,2024-02-31,3,1e400,false")),
        content(_rows(tmp_path, *_LINES[:2], "a,3,2024-02-31,2,1e400,")),
        content(pa.table({"k": ["ab", "c"]})), content(pa.table({"k": ["a", "bc"]})),
        content(pa.table({"k": ["a", None]})), content(pa.table({"k": ["a", ""]})),
        content(pa.table({"k": [b"a", b"\xff"]})), content(pa.table({"j": ["a", ""]})),
    ]  # fmt: skip
    assert len({first, *others}) == len(others) + 1


def test_the_digest_stays_what_it_is(tmp_path: Path) -> None:
    """It is part of plans that are in stores."""
    assert content(_rows(tmp_path, *_LINES)) == "44b73eb4aab8f4c1dd3c473c1d470abf"
