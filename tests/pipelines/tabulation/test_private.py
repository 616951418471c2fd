"""Pieces of a file: every line is of exactly one."""

import itertools
import re
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.tabulation.parameters import AGE_BINS
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES
from dpstream.pipelines.formats.rows import Refused
from dpstream.pipelines.tabulation import private as module
from dpstream.pipelines.tabulation.private import (
    LAYOUTS,
    RACE_COLUMNS,
    Lookup,
    Rule,
    dead_letter_folder,
    lines_of,
    lookup_of,
    pieces,
    read_one,
    read_piece,
    read_records,
    write_letters,
)
from tests.golden.pinned import check, of_refusals
from tests.pipelines.tabulation.office import Office


def lines_in(path: Path, size: int) -> list[tuple[int, bytes]]:
    """(position, line) of all pieces."""
    positioned_lines = []
    for piece in pieces(path, size):
        for line_block in lines_of(piece):
            positioned_lines += list(
                zip(line_block.positions.tolist(), line_block.lines.to_pylist(), strict=True)
            )
            assert line_block.returns == any(b"\r" in line for line in line_block.lines.to_pylist())
            blank = [line in (b"\n", b"\r\n") for line in line_block.lines.to_pylist()]
            assert line_block.blank.tolist() == blank
    return positioned_lines


@pytest.mark.parametrize("end", [b"\n", b""])
def test_every_size_gives_the_same_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    path = tmp_path / "file.txt"
    for data in (b"", b"HEADER", b"HEADER\n"):
        path.write_bytes(data)
        assert lines_in(path, 3) == []
    rows = [b"ab|c", b"", b"x" * 17, b"d\r", b"\r", b"", b"last"]
    path.write_bytes(b"\n".join([b"HEADER|LINE", *rows]) + end)
    expected, at = list[tuple[int, bytes]](), 12
    for row in rows:
        expected.append((at, row + b"\n"))
        at += len(row) + 1
    assert lines_in(path, 1 << 20) == expected
    monkeypatch.setattr(module, "BLOCK_BYTES", 3)
    for size in range(1, at + 3):
        assert lines_in(path, size) == expected, size


def test_a_line_that_is_too_long_is_of_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    long = b"x" * (3 * MAX_LINE_BYTES)
    path.write_bytes(b"H\na\n" + long + b"\nb\n")
    for size in (100, MAX_LINE_BYTES, 10 * MAX_LINE_BYTES):
        positioned_lines = lines_in(path, size) if size > 100 else lines_in(path, 1_000_003)
        assert [at for at, _ in positioned_lines] == [2, 4, 4 + len(long) + 1]
        assert len(positioned_lines[1][1]) > MAX_LINE_BYTES + 1 and positioned_lines[2][1] == b"b\n"


def test_the_columns_are_those_of_production() -> None:
    races = "|".join(f"QRACE{number}" for number in range(1, 9))
    place = "TABBLKST|TABBLKCOU|TABTRACTCE|TABBLK"
    assert "|".join(LAYOUTS["p"].columns) == f"QAGE|QSEX|HOUSEHOLDER|{place}|CENRACE|{races}|QSPAN"
    assert "|".join(LAYOUTS["h"].columns) == f"{place}|HHRACE|{races}|QSPAN|HOUSEHOLD_TYPE|TEN"
    assert LAYOUTS["p"].file == "person-records.txt"
    assert LAYOUTS["h"].file == "household-records.txt"


def test_rules_have_fixed_names() -> None:
    """They are published to the operator, and programs of theirs read them."""
    assert [rule.value for rule in Rule] == [
        "malformed", "line_too_long", "field_count", "block_form", "block_unknown", "age", "sex",
        "householder", "race_group", "no_race_code", "race_code_unknown", "race_code_after_null",
        "ethnicity_code_unknown", "household_type", "tenure",
    ]  # fmt: skip


PERSON = "028|1|True|01|001|000100|1000|01|1000|Null|Null|Null|Null|Null|Null|Null|1130"
HOUSEHOLD = "01|001|000100|1000|63|1000|1005|Null|Null|Null|Null|Null|Null|1130|5|4"
BLOCKS = ["010010001001000", "010010001001001", "720010001001000"]
CODES = ["1000", "1005", "1010", "1130"]


def lookup(program: str) -> Lookup:
    blocks = np.array([int(block) for block in BLOCKS])
    return Lookup(program, blocks, np.array([1, 72]), pa.array(CODES))


class FileLines(NamedTuple):
    """What lines have become, as Python's values: by position, records or rules."""

    records: dict[int, tuple[int, list[int], dict[str, int]]]
    rules: dict[int, str]


def read(path: Path, own: Lookup, size: int = 1 << 24) -> FileLines:
    """Everything in a file."""
    outcome = FileLines({}, {})
    for piece in pieces(path, size):
        for part in read_piece(piece, own):
            records = part.records
            assert len(records) == len(part.positions) == len(records.codes)
            for row, at in enumerate(part.positions.tolist()):
                leaf = {name: int(values[row]) for name, values in records.leaf.items()}
                outcome.records[at] = int(records.block[row]), records.codes[row].tolist(), leaf
            refused = zip(part.refused.offsets.tolist(), part.refused.reasons, strict=True)
            outcome.rules.update(refused)
    return outcome


def one(tmp_path: Path, program: str, line: str) -> tuple[
    tuple[int, list[int], dict[str, int]] | None, str | None
]:  # fmt: skip
    """The record of a line, or the rule that it breaks."""
    path = tmp_path / "records.txt"
    path.write_text("|".join(LAYOUTS[program].columns) + "\n" + line + "\n")
    outcome = read(path, lookup(program))
    assert len(outcome.records) + len(outcome.rules) <= 1
    return next(iter(outcome.records.values()), None), next(iter(outcome.rules.values()), None)


def test_a_person(tmp_path: Path) -> None:
    record, rule = one(tmp_path, "p", PERSON)
    assert rule is None
    assert record == (0, [0, -1, -1, -1, -1, -1, -1, -1, 3], {"t1t2": 8})
    record, _ = one(tmp_path, "p", PERSON.replace("028|1|True|01", "115|2|False|72"))
    assert record is not None and record[0] == 2 and record[2] == {"t1t2": 45}


def test_a_household(tmp_path: Path) -> None:
    record, rule = one(tmp_path, "h", HOUSEHOLD)
    assert rule is None
    assert record == (0, [0, 1, -1, -1, -1, -1, -1, -1, 3], {"t3": 4, "t4": 2})
    for tenure, leaf in ((1, 0), (2, 1), (3, 2)):
        record, _ = one(tmp_path, "h", f"{HOUSEHOLD[:-3]}1|{tenure}")
        assert record is not None and record[2] == {"t3": 0, "t4": leaf}


def test_ages_zero_padded_or_not(tmp_path: Path) -> None:
    texts = [f"{age:0{width}d}" for age in range(116) for width in (1, 2, 3)]
    path = tmp_path / "records.txt"
    lines = ["|".join(LAYOUTS["p"].columns), *(text + PERSON[3:] for text in texts)]
    path.write_text("\n".join(lines))
    outcome = read(path, lookup("p"))
    assert outcome.rules == {} and len(outcome.records) == len(texts)
    for text, (_, _, leaf) in zip(texts, outcome.records.values(), strict=True):
        assert leaf == {"t1t2": sum(edge <= int(text) for edge in AGE_BINS[23])}


def changed(program: str, line: str, **fields: str) -> str:
    """A line with other fields."""
    values = dict(zip(LAYOUTS[program].columns, line.split("|"), strict=True)) | fields
    return "|".join(values.values())


person, household = partial(changed, "p", PERSON), partial(changed, "h", HOUSEHOLD)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (PERSON + "|", Rule.FIELD_COUNT),
        (PERSON[:-5], Rule.FIELD_COUNT),
        ("x", Rule.FIELD_COUNT),
        (PERSON.replace("|01|", "|0\r1|"), Rule.MALFORMED),
        (person(QAGE="x" * (1 << 20)), Rule.LINE_TOO_LONG),
        (person(TABBLKST="1"), Rule.BLOCK_FORM),
        (person(TABBLKST="Nul"), Rule.BLOCK_FORM),
        (person(TABBLKCOU="01"), Rule.BLOCK_FORM),
        (person(TABTRACTCE="+00100"), Rule.BLOCK_FORM),
        (person(TABBLK=""), Rule.BLOCK_FORM),
        (person(TABBLK="9999"), Rule.BLOCK_UNKNOWN),
        (person(QAGE="116"), Rule.AGE),
        (person(QAGE="200"), Rule.AGE),
        (person(QAGE="-1"), Rule.AGE),
        (person(QAGE="0028"), Rule.AGE),
        (person(QAGE=""), Rule.AGE),
        (person(QAGE="28.0"), Rule.AGE),
        (person(QSEX="3"), Rule.SEX),
        (person(QSEX="01"), Rule.SEX),
        (person(HOUSEHOLDER="true"), Rule.HOUSEHOLDER),
        (person(CENRACE="00"), Rule.RACE_GROUP),
        (person(CENRACE="64"), Rule.RACE_GROUP),
        (person(CENRACE="1"), Rule.RACE_GROUP),
        (person(QRACE1="Null"), Rule.NO_RACE_CODE),
        (person(QRACE1="Null", QRACE2="1000"), Rule.NO_RACE_CODE),
        (person(QRACE1="9999"), Rule.RACE_CODE_UNKNOWN),
        (person(QRACE1="null"), Rule.RACE_CODE_UNKNOWN),
        (person(QRACE8="9999"), Rule.RACE_CODE_UNKNOWN),
        (person(QRACE3="1005"), Rule.RACE_CODE_AFTER_NULL),
        (person(QRACE8="1005"), Rule.RACE_CODE_AFTER_NULL),
        (person(QSPAN="Null"), Rule.ETHNICITY_CODE_UNKNOWN),
        (person(QSPAN="9999"), Rule.ETHNICITY_CODE_UNKNOWN),
        (household(HOUSEHOLD_TYPE="6"), Rule.HOUSEHOLD_TYPE),
        (household(HOUSEHOLD_TYPE="0"), Rule.HOUSEHOLD_TYPE),
        (household(TEN="5"), Rule.TENURE),
        (household(HHRACE="64"), Rule.RACE_GROUP),
        (household(QRACE1="Null"), Rule.NO_RACE_CODE),
        (person(QAGE="200", QSEX="3", TABBLK="9999"), Rule.BLOCK_UNKNOWN),
    ],
)
def test_rules(tmp_path: Path, line: str, rule: Rule) -> None:
    program = "h" if line.count("|") == 15 and line.startswith("01") else "p"
    assert one(tmp_path, program, line) == (None, rule.value)


@pytest.mark.parametrize("line", [
    "", person(TABBLKST="02"), person(TABBLKST="02", QAGE="200", TABBLK="x"),
])  # fmt: skip
def test_states_that_do_not_run_are_left_out_without_a_word(tmp_path: Path, line: str) -> None:
    assert one(tmp_path, "p", line) == (None, None)


def test_nul_bytes_change_no_other_record(tmp_path: Path) -> None:
    """Many records: what stops other readers at a NUL byte."""
    lines = [PERSON] * 12_000
    bad = range(9_000, 12_000, 53)
    for number in bad:
        lines[number] = PERSON.replace("|", "y" * (number % 17) + "\0|")
    text = "|".join(LAYOUTS["p"].columns) + "\n" + "\n".join(lines) + "\n"
    (tmp_path / "records.txt").write_text(text)
    outcome = read(tmp_path / "records.txt", lookup("p"))
    assert len(outcome.records) == 12_000 - len(bad) and len(outcome.rules) == len(bad)
    assert set(outcome.rules.values()) == {Rule.MALFORMED}
    assert len(set(map(str, outcome.records.values()))) == 1


def test_all_eight_codes(tmp_path: Path) -> None:
    every = dict(zip(RACE_COLUMNS, itertools.cycle(CODES[:3]), strict=False))
    record, _ = one(tmp_path, "p", person(**every))
    assert record is not None and record[1] == [0, 1, 2, 0, 1, 2, 0, 1, 3]


def by_hand(line: str, own: Lookup, columns: tuple[str, ...]) -> tuple[int, list[int]] | str | None:
    """Block and codes of a well-formed line, the rule that it breaks, or nothing: one at a time."""
    fields = line.removesuffix("\r").split("|")
    if not fields[0] and len(fields) == 1:
        return None
    if "\r" in line.removesuffix("\r"):
        return "malformed"
    if len(fields) != len(columns):
        return "field_count"
    of = dict(zip(columns, fields, strict=True))
    parts = [of[name] for name in ("TABBLKST", "TABBLKCOU", "TABTRACTCE", "TABBLK")]
    if re.fullmatch("[0-9]{2}", parts[0]) and int(parts[0]) not in own.states:
        return None
    if not re.fullmatch("[0-9]{2}/[0-9]{3}/[0-9]{6}/[0-9]{4}", "/".join(parts)):
        return "block_form"
    if int("".join(parts)) not in own.blocks:
        return "block_unknown"
    if not re.fullmatch("[0-9]{1,3}", of["QAGE"]) or int(of["QAGE"]) > 115:
        return "age"
    if of["QSEX"] not in ("1", "2"):
        return "sex"
    if of["HOUSEHOLDER"] not in ("True", "False"):
        return "householder"
    if not re.fullmatch("[0-9]{2}", of["CENRACE"]) or not 1 <= int(of["CENRACE"]) <= 63:
        return "race_group"
    races, race_codes = [of[name] for name in RACE_COLUMNS], own.codes.to_pylist()
    if races[0] == "Null":
        return "no_race_code"
    if not set(races) <= {*race_codes, "Null"}:
        return "race_code_unknown"
    given = list(itertools.takewhile(lambda code: code != "Null", races))
    if any(code != "Null" for code in races[len(given) :]):
        return "race_code_after_null"
    if of["QSPAN"] not in race_codes:
        return "ethnicity_code_unknown"
    codes = [race_codes.index(code) for code in given] + [-1] * (8 - len(given))
    block = int(np.flatnonzero(own.blocks == int("".join(parts)))[0])
    return block, [*codes, race_codes.index(of["QSPAN"])]


_SPOILERS = ("", "Null", "9999", "1005", "01", "3", "02", "\r", "|", "x", "٣", "115", "72")


def test_spoilt_lines_against_one_at_a_time(spoilt: Office) -> None:
    """Generated records of which most are spoilt somewhere, in pieces of several sizes."""
    loaded = spoilt.load()
    own = lookup_of(loaded.files, loaded.parameters)
    rng = np.random.default_rng(7)
    path = spoilt.data / LAYOUTS["p"].file
    lines = path.read_text().splitlines()
    for number in range(1, len(lines)):
        if rng.random() < 0.6:
            fields = lines[number].split("|")
            for _ in range(rng.integers(1, 3)):
                fields[rng.integers(len(fields))] = _SPOILERS[rng.integers(len(_SPOILERS))]
            lines[number] = "|".join(fields)
        if rng.random() < 0.1:
            lines[number] += "\r"
    path.write_bytes("\n".join(lines).encode())
    outcome = read(path, own)
    at, seen = len(lines[0]) + 1, set[str]()
    for line in lines[1:]:
        expected = by_hand(line, own, LAYOUTS["p"].columns)
        if isinstance(expected, tuple):
            assert outcome.records[at][:2] == expected
        elif expected is None:
            assert at not in outcome.records and at not in outcome.rules
        else:
            assert outcome.rules[at] == expected, line
            seen.add(expected)
        at += len(line.encode()) + 1
    assert len(seen) >= 10 and len(outcome.records) > 50
    for size in (1_009, 5_000):
        assert read(path, own, size) == outcome


def test_generated_records_are_right(made: Office) -> None:
    for program in ("p", "h"):
        loaded = made.load("p")
        own = lookup_of(loaded.files, loaded.parameters)._replace(program=program)
        outcome = read(made.data / LAYOUTS[program].file, own)
        assert outcome.rules == {} and len(outcome.records) == {"p": 300, "h": 120}[program]


def test_positions_and_rules_for_the_owner_alone(tmp_path: Path) -> None:
    folder = dead_letter_folder(tmp_path / "out")
    assert folder == tmp_path / "dead_letter" / "out"
    refused = [Refused(np.array([70, 7]), ["age", "sex"]), Refused(np.array([], np.int64), [])]
    assert write_letters(folder, refused) == 2
    [file] = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert pq.read_table(file).to_pylist() == [
        {"partition": 0, "offset": 7, "reason": "sex"},
        {"partition": 0, "offset": 70, "reason": "age"},
    ]
    assert write_letters(folder, refused) == 2 and len(list(folder.iterdir())) == 1
    assert write_letters(tmp_path / "none", [Refused(np.array([], np.int64), [])]) == 0
    assert not (tmp_path / "none").exists()


def test_pieces_hold_every_record_once(made: Office) -> None:
    loaded = made.load()
    lookup, path = lookup_of(loaded.files, loaded.parameters), made.path("person-records.txt")
    batches = list(read_records(path, lookup, None))
    parts = [batch for piece in pieces(path, 1_500) for batch in read_one(piece, lookup, None)]
    assert len(parts) > 5 and sum(map(len, batches)) == 300
    for column in ("block", "codes"):
        a, b = (
            np.concatenate([getattr(x, column) for x in record_batches])
            for record_batches in (batches, parts)
        )
        assert (a == b).all()


def test_refused_records_are_written_once_whoever_reads_them(
    spoilt: Office, tmp_path: Path
) -> None:
    spoilt.spoil("person-records.txt", lambda lines: [*lines[:9], "nonsense", *lines[9:]])
    loaded = spoilt.load()
    lookup, path = lookup_of(loaded.files, loaded.parameters), spoilt.path("person-records.txt")
    for _ in range(2):
        assert sum(map(len, read_records(path, lookup, tmp_path / "letters"))) == 300
    [letter] = (tmp_path / "letters").iterdir()
    [row] = pq.read_table(letter).to_pylist()
    assert path.read_bytes()[row["offset"] :].startswith(b"nonsense\n")
    (tmp_path / "file").touch()
    [piece] = pieces(path)
    calls: dict[str, Callable[[], object]] = {
        "without a folder": lambda: list(read_records(path, lookup, None)),
        "a file that is gone": lambda: list(read_records(tmp_path / "gone.txt", lookup, None)),
        "a piece that is gone": lambda: list(
            read_one(piece._replace(path=str(tmp_path / "gone.txt")), lookup, None)
        ),
        "letters below a file": lambda: write_letters(
            tmp_path / "file" / "inside", [Refused(np.array([1]), ["age"])]
        ),
    }
    check(Path(__file__).with_name("refusals_private.txt"), of_refusals(calls))
