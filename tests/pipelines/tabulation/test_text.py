"""Public text files and their columns of digits; faults name places and rules, never values."""

import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES
from dpstream.pipelines.tabulation import text
from dpstream.pipelines.tabulation.text import MAX_LISTED, Fault, Faults, numbers_of, refuse


def test_a_fault_says_where_what_and_how() -> None:
    faults = Faults("GRF-C.txt")
    faults.rows(
        np.array([False, True]), np.array([2, 3]), "TABBLK", "is not 4 digits", "correct it"
    )
    [fault] = faults.faults
    assert str(fault) == "GRF-C.txt, row 3, TABBLK: is not 4 digits. Fix: correct it."
    assert fault._asdict()["row"] == 3
    assert str(Fault("config.json", None, "", "is missing", "add it")).startswith("config.json: is")


def test_very_many_are_counted() -> None:
    faults = Faults("x")
    many = MAX_LISTED + 7
    faults.rows(np.ones(many, np.bool_), np.arange(many), "A", "is wrong", "correct it")
    assert len(faults.faults) == MAX_LISTED + 1
    assert faults.faults[-1].row is None and "7 more rows" in faults.faults[-1].rule


def test_a_refusal_shows_the_first_and_counts_the_others() -> None:
    refuse([])
    one = Fault("config.json", None, "run_us", "is required", "add it")
    with pytest.raises(UsageError, match=r"^config.json run_us: is required. Fix: add it.$"):
        refuse([one])
    with pytest.raises(UsageError, match=r"\(2 faults\). Fix: add it; `dpstream census validate"):
        refuse([one, Fault("GRF-C.txt", 2, "", "", "")])


def test_digits_and_what_is_none() -> None:
    texts = ["0042", "9999", "42", "00042", "4 42", "-042", "12.5", "", "٤٢", "12a4"]
    numbers, good = numbers_of(pa.array(texts), 4)
    assert good.tolist() == [True, True] + [False] * 8
    assert numbers[:2].tolist() == [42, 9999] and numbers.dtype == np.int64


def test_slices_and_nothing() -> None:
    column = pa.array(["01", "02", "03", "04"]).slice(1, 2)
    assert numbers_of(column, 2)[0].tolist() == [2, 3]
    numbers, good = numbers_of(pa.array([], pa.string()), 2)
    assert len(numbers) == 0 and len(good) == 0


def test_eighteen_digits() -> None:
    numbers, good = numbers_of(pa.array(["9" * 18]), 18)
    assert numbers.tolist() == [10**18 - 1] and good.all()


def read(path: Path, data: bytes, columns: str = "A|B", more: bool = False) -> tuple[
    dict[str, list[str]] | None, list[int], list[tuple[int | None, str, str]]
]:  # fmt: skip
    path = path / "file.txt"
    path.write_bytes(data)
    faults = Faults(path.name)
    rows = text.read_rows(path, columns.split("|"), faults, more)
    fault_rows = [(fault.row, fault.column, fault.rule) for fault in faults.faults]
    if rows is None:
        return None, [], fault_rows
    return rows.table.to_pydict(), rows.numbers.tolist(), fault_rows


def test_every_fault_of_a_line(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbfA|B\r\n1|"x\r\n\n2|\xef\xbb\xbfy\r\n3\n4|\xff\n5|a\rb\n6|' + b"z" * 3
    rows, numbers, faults = read(tmp_path, data)
    assert rows == {"A": ["1", "2", "6"], "B": ['"x', "\ufeffy", "zzz"]}
    assert numbers == [2, 4, 8]
    assert sorted(faults, key=str) == [
        (5, "", "does not have 2 fields, as the header has"),
        (6, "", "is not UTF-8"),
        (7, "", "has a carriage return inside"),
    ]


def test_nul_bytes_change_no_other_line(tmp_path: Path) -> None:
    """Many lines of long fields: what stops other readers at a NUL byte."""
    lines = [b"%d|%s" % (i, b"x" * 40) for i in range(20_000)]
    spoilt = {i: b"y" * (i % 37) + b"\0|" + b"\0" * (i % 11) for i in range(9_000, 20_000, 97)}
    data = b"\n".join([b"A|B", *(spoilt.get(i, line) for i, line in enumerate(lines))])
    rows, numbers, faults = read(tmp_path, data)
    good = [i for i in range(20_000) if i not in spoilt]
    assert rows is not None and rows["A"] == list(map(str, good))
    assert set(rows["B"]) == {"x" * 40} and numbers == [i + 2 for i in good]
    assert {rule for _, _, rule in faults} == {"has a NUL byte"}


@pytest.mark.parametrize("value", [b"\xff", b"\xc3", b"a\rb", b"\r"])
def test_a_value_alone_that_is_wrong(tmp_path: Path, value: bytes) -> None:
    rows, numbers, [(row, _, rule)] = read(tmp_path, b"A|B\n1|x\n2|" + value + b" \n3|y\n")
    assert rows == {"A": ["1", "3"], "B": ["x", "y"]} and numbers == [2, 4]
    assert row == 3 and ("UTF-8" in rule) == (b"\r" not in value)


def test_a_line_that_is_too_long(tmp_path: Path) -> None:
    data = b"A|B\n1|" + b"x" * (MAX_LINE_BYTES + 1) + b"\n2|y\n"
    rows, numbers, [(row, _, rule)] = read(tmp_path, data)
    assert rows == {"A": ["2"], "B": ["y"]} and numbers == [3]
    assert row == 2 and "longer" in rule


def test_a_file_without_further_line_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that it takes is that of some blocks, and its end is not looked for."""
    monkeypatch.setattr(limits, "MAX_UNBROKEN_BYTES", 4 << 20)
    monkeypatch.setattr(text, "BLOCK_BYTES", 1 << 16)
    path, faults = tmp_path / "f.txt", Faults("f")
    path.write_bytes(b"A|B\n1|x\n")
    with open(path, "ab") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    rows = [block.table.to_pydict() for block in text.read_blocks(path, ("A", "B"), faults)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == [{"A": ["1"], "B": ["x"]}] and peak < 8 << 20
    [fault] = faults.faults
    assert "no line break" in fault.rule
    monkeypatch.setattr(limits, "MAX_UNBROKEN_BYTES", 1 << 30)
    faults = Faults("f")
    list(text.read_blocks(path, ("A", "B"), faults))
    assert [fault.rule.split()[1] for fault in faults.faults] == ["longer"]


@pytest.mark.parametrize(
    ("header", "rule"),
    [
        (b"A\n", "is missing in the header"),
        (b"A|B|B\n", "is there more than once in the header"),
        (b"B|A\n", "has its columns in another order"),
        (b"A|B|secret\n", "has columns that are not its own (number 3)"),
        (b"\xff|B\n", "has no header in UTF-8"),
        (b"\n", "has no header in UTF-8"),
    ],
)
def test_headers(tmp_path: Path, header: bytes, rule: str) -> None:
    rows, _, faults = read(tmp_path, header + b"1|2\n")
    assert rows is None
    assert rule in [fault_rule for _, _, fault_rule in faults] and "secret" not in str(faults)
    assert all(row == 1 for row, _, _ in faults)


def test_further_columns_are_ignored_where_they_may_be(tmp_path: Path) -> None:
    rows, _, faults = read(tmp_path, b"X|A|Y|B|X\n1|2|3|4|5\n", more=True)
    assert rows == {"A": ["2"], "B": ["4"]} and faults == []
    _, _, faults = read(tmp_path, b"X|B|A\n1|2|3\n", more=True)
    assert faults == [(1, "", "has its columns in another order")]


def test_a_header_alone_and_no_file(tmp_path: Path) -> None:
    assert read(tmp_path, b"A|B") == ({"A": [], "B": []}, [], [])
    faults = Faults("x")
    assert text.read_rows(tmp_path / "no.txt", ["A"], faults) is None
    assert text.read_rows(tmp_path, ["A"], faults) is None
    assert [fault.rule for fault in faults.faults] == [
        "is missing",
        "cannot be read: it is a folder",
    ]


def test_blocks_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{n}|{'x' * (n % 7)}" for n in range(500)]
    data = ("A|B\n" + "\n".join(lines)).encode()
    single_block = read(tmp_path, data)
    monkeypatch.setattr(text, "BLOCK_BYTES", 13)
    parts = read(tmp_path, data)
    assert single_block == parts and single_block[1] == list(range(2, 502))


def test_values_stay_as_they_are(tmp_path: Path) -> None:
    rows, _, faults = read(tmp_path, b"A|B\n007|\n|NULL\n")
    assert rows == {"A": ["007", ""], "B": ["", "NULL"]} and faults == []
    assert np.array(rows["A"]).dtype.kind == "U"
