"""Public text files: iterations, codes, blocks and totals; faults name places, never values."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting import limits
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES
from dpstream.pipelines.tabulation import text
from dpstream.pipelines.tabulation.public_files import (
    CODES,
    ETHNICITY_ITERATIONS,
    GEOGRAPHY,
    MAP,
    RACE_ITERATIONS,
    TOTALS,
    is_in,
    read_geography,
    read_totals,
    texts,
)
from dpstream.pipelines.tabulation.text import MAX_LISTED, Fault, Faults, numbers_of, refuse
from tests.golden.pinned import check, of_cases, of_refusals
from tests.pipelines.tabulation.office import Office


def test_faults_say_where_what_and_how() -> None:
    faults, many = Faults("GRF-C.txt"), MAX_LISTED + 7
    guard = np.array([False, True]), "TABBLK", "is not 4 digits", "correct it"
    faults.rows(np.array([2, 3]), guard)
    faults.rows(np.arange(many), (np.ones(many, np.bool_), "A", "is wrong", "correct it"))
    assert len(faults.faults) == MAX_LISTED + 2
    one = Fault("config.json", None, "run_us", "is required", "add it")
    lines = _lines([faults.faults[0], faults.faults[-1], one])
    refusals = of_refusals({
        "none": lambda: refuse([]), "one": lambda: refuse([one]),
        "two": lambda: refuse([one, faults.faults[0]]),
    })  # fmt: skip
    check(Path(__file__).with_name("faults_text.txt"), lines + refusals)


def _lines(faults: list[Fault]) -> str:
    return "".join(f"{fault}\n" for fault in faults)


def test_digits_and_what_is_none() -> None:
    texts = ["0042", "9999", "42", "00042", "4 42", "-042", "12.5", "", "٤٢", "12a4"]
    numbers, good = numbers_of(pa.array(texts), 4)
    assert good.tolist() == [True, True] + [False] * 8
    assert numbers[:2].tolist() == [42, 9999] and numbers.dtype == np.int64
    column = pa.array(["01", "02", "03", "04"]).slice(1, 2)
    assert numbers_of(column, 2)[0].tolist() == [2, 3]
    assert [len(part) for part in numbers_of(pa.array([], pa.string()), 2)] == [0, 0]
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


def test_faults_of_lines_and_headers(tmp_path: Path) -> None:
    long = b"x" * (MAX_LINE_BYTES + 1)
    cases: dict[str, tuple[bytes, bool]] = {
        "every fault of a line": (
            b'\xef\xbb\xbfA|B\r\n1|"x\r\n\n2|\xef\xbb\xbfy\r\n3\n4|\xff\n5|a\rb\n6|zzz', False
        ),
        **{
            f"a value {value!r}": (b"A|B\n1|x\n2|" + value + b" \n3|y\n", False)
            for value in (b"\xff", b"\xc3", b"a\rb", b"\r")
        },
        "a line that is too long": (b"A|B\n1|" + long + b"\n2|y\n", False),
        **{
            f"the header {header!r}": (header + b"1|2\n", False)
            for header in (b"A\n", b"A|B|B\n", b"B|A\n", b"A|B|secret\n", b"\xff|B\n", b"\n")
        },
        "further columns": (b"X|A|Y|B|X\n1|2|3|4|5\n", True),
        "further columns, turned": (b"X|B|A\n1|2|3\n", True),
        "a header alone": (b"A|B", False), "values as they are": (b"A|B\n007|\n|NULL\n", False),
    }  # fmt: skip
    texts = {}
    for name, (data, more) in cases.items():
        rows, numbers, faults = read(tmp_path, data, more=more)
        texts[name] = f"{rows} {numbers}\n" + "".join(f"{fault}\n" for fault in faults)
    for name, path in {"no file": tmp_path / "no.txt", "a folder": tmp_path}.items():
        own = Faults("x")
        assert text.read_rows(path, ["A"], own) is None
        texts[name] = _lines(own.faults)
    check(Path(__file__).with_name("faults_lines.txt"), of_cases(texts))


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


def test_blocks_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{n}|{'x' * (n % 7)}" for n in range(500)]
    data = ("A|B\n" + "\n".join(lines)).encode()
    single_block = read(tmp_path, data)
    monkeypatch.setattr(text, "BLOCK_BYTES", 13)
    parts = read(tmp_path, data)
    assert single_block == parts and single_block[1] == list(range(2, 502))


Change = Callable[[list[str]], Any]


def test_what_is_counted(made: Office) -> None:
    files = made.load().files
    table = files.iterations
    assert sorted(set(table["LEVEL"].to_pylist())) == [1, 2]
    listed = [line.split("|") for line in made.path(RACE_ITERATIONS).read_text().splitlines()[1:]]
    race = [row for row in listed if row[2] != "0"]
    assert table["CODE"].to_pylist()[: len(race)] == [row[0] for row in race]
    assert table["ALONE"].to_pylist()[: len(race)] == [row[3] == "True" for row in race]
    assert set(table["ALONE"].to_pylist()[len(race) :]) == {None}
    assert table["ETHNICITY"].to_pylist() == [False] * len(race) + [True] * (
        table.num_rows - len(race)
    )
    codes = files.codes.to_pylist()
    assert codes == sorted(line[:4] for line in made.path(CODES).read_text().splitlines()[1:])
    pairs = {tuple(line.split("|")) for line in made.path(MAP).read_text().splitlines()[1:]}
    counted = set(table["CODE"].to_pylist())
    counted_pairs = {
        (table["CODE"][row].as_py(), codes[code]) for row, code in files.members.tolist()
    }
    assert counted_pairs == {pair for pair in pairs if pair[0] in counted}


def test_the_order_of_lines_does_not_matter_for_codes(made: Office, spoilt: Office) -> None:
    spoilt.spoil(CODES, lambda lines: [lines[0], *reversed(lines[1:])])
    spoilt.spoil(MAP, lambda lines: [lines[0], *reversed(lines[1:])])
    first, second = made.load().files, spoilt.load().files
    assert first.codes == second.codes
    assert first.members.tolist() == second.members.tolist()


def field(row: int, place: int, value: str) -> Change:
    """Set a field of a line; the header is 0."""

    def change(lines: list[str]) -> None:
        fields = lines[row].split("|")
        fields[place] = value
        lines[row] = "|".join(fields)

    return change


def twice(lines: list[str]) -> None:
    lines.append(lines[1])


#: Spoilt files: where, and how.
SPOILT: list[tuple[str, str, Change]] = [
    *((RACE_ITERATIONS, f"{row} {place} {value!r}", field(row, place, value))
      for row, place, value in ((5, 0, "12"), (5, 2, "3"), (5, 3, "true"), (5, 4, "yes"),
                                (5, 5, "Null"), (1, 5, "False"))),
    (RACE_ITERATIONS, "twice", twice), (CODES, "twice", twice), (MAP, "twice", twice),
    (RACE_ITERATIONS, "of no regions", lambda lines: [*lines[:-1], "|".join(
        [*lines[-1].split("|")[:4], "True", "True"])]),
    (ETHNICITY_ITERATIONS, "0003", field(2, 0, "0003")), (CODES, "0999", field(2, 0, "0999")),
    (MAP, "no iteration", lambda lines: [*lines, "9999|1000"]),
    (MAP, "no code", lambda lines: [*lines, "0003|9998"]),
]  # fmt: skip


def test_faults_of_race_and_ethnicity(spoilt: Office) -> None:
    texts = {}
    for name, how, change in SPOILT:
        before = spoilt.path(name).read_bytes()
        spoilt.spoil(name, change)
        texts[f"{name} {how}"] = _lines(spoilt.faults())
        spoilt.path(name).write_bytes(before)
    check(Path(__file__).with_name("faults_iterations.txt"), of_cases(texts))


def test_a_code_may_belong_to_no_iteration(spoilt: Office) -> None:
    spoilt.spoil(CODES, lambda lines: [*lines, "9998|Nobody"])
    assert spoilt.faults() == []
    files = spoilt.load().files
    assert files.codes.to_pylist().index("9998") not in files.members[:, 1]


def members(office: Office, level: str, alone: str) -> list[tuple[str, str]]:
    """(iteration, code) of race, of one level and kind."""
    listed = [line.split("|") for line in office.path(RACE_ITERATIONS).read_text().splitlines()]
    of = {row[0] for row in listed if row[2:6] == [level, alone, "False", "False"]}
    rows = [line.split("|") for line in office.path(MAP).read_text().splitlines()]
    return [(row[0], row[1]) for row in rows if row[0] in of]


@pytest.mark.parametrize("alone", ["True", "False"])
@pytest.mark.parametrize("level", ["1", "2"])
def test_a_second_iteration_of_a_kind(spoilt: Office, level: str, alone: str) -> None:
    pairs = members(spoilt, level, alone)
    other = next(pair for pair in pairs if pair[0] != pairs[0][0])
    spoilt.spoil(MAP, lambda lines: [*lines, f"{other[0]}|{pairs[0][1]}"])
    map_faults = [fault for fault in spoilt.faults() if fault.file == MAP]
    assert {fault.row for fault in map_faults} == {107} and len(map_faults) == 2
    assert all("second iteration" in fault.rule for fault in map_faults)


@pytest.mark.parametrize(
    ("flags", "regions"),
    [(["True", "False"], "nation and states"), (["False", "True"], "small regions")],
)
def test_a_second_iteration_where_only_some_regions_take_it(
    spoilt: Office, flags: list[str], regions: str
) -> None:
    listed = [line.split("|") for line in spoilt.path(RACE_ITERATIONS).read_text().splitlines()]
    narrow = next(row[0] for row in listed if row[2:6] == ["2", "True", *flags])
    code = members(spoilt, "2", "True")[0][1]
    spoilt.spoil(MAP, lambda lines: [*lines, f"{narrow}|{code}"])
    [fault] = spoilt.faults()
    assert fault.row == 107 and fault.rule.endswith(f"counted for {regions}")


def test_of_two_granularities_a_code_may_have_one_each(made: Office) -> None:
    """The merged iteration of small regions has codes of iterations of large ones."""
    files = made.load().files
    coarse = [row for row, flag in enumerate(files.iterations["COARSE_ONLY"].to_pylist()) if flag]
    large = {row for row, flag in enumerate(files.iterations["DETAILED_ONLY"].to_pylist()) if flag}
    of = {code for row, code in files.members.tolist() if row in coarse}
    assert of and of <= {code for row, code in files.members.tolist() if row in large}


_GEOGRAPHY = "TABBLKST|TABBLKCOU|TABTRACTCE|TABBLK|PLACEFP|AIANNHCE"
_BLOCKS = [
    "02|001|000001|0002|00007|0001",
    "01|001|000001|0001|99999|9999",
    "72|031|050901|2040|10001|0003",
    "04|001|000001|0001|99999|9999",
]


def blocks_of(made: Office, rows: list[str], states: tuple[str, ...] = ("01", "02", "72")) -> tuple[
    list[dict[str, str | None]] | None, list[tuple[int | None, str, str]]
]:  # fmt: skip
    path = made.data / "other.txt"
    path.write_text("\n".join([_GEOGRAPHY, *rows]) + "\n")
    faults = Faults(GEOGRAPHY)
    table = read_geography(path, states, faults)
    fault_rows = [(fault.row, fault.column, fault.rule) for fault in faults.faults]
    return None if table is None else table.to_pylist(), fault_rows


def test_blocks_of_the_run_are_sorted(spoilt: Office) -> None:
    blocks, faults = blocks_of(spoilt, _BLOCKS)
    assert faults == [] and blocks is not None
    assert [row["block"] for row in blocks] == [
        "010010000010001", "020010000010002", "720310509012040"
    ]  # fmt: skip
    assert blocks[1] == {
        "block": "020010000010002", "state": "02", "county": "02001", "tract": "02001000001",
        "place": "0200007", "aiannh": "0001",
    }  # fmt: skip
    assert blocks[0]["place"] is None and blocks[0]["aiannh"] is None
    # Areas are counted outside of Puerto Rico only.
    assert blocks[2]["place"] == "7210001" and blocks[2]["aiannh"] is None


def test_faults_of_blocks(spoilt: Office) -> None:
    rows = {
        "a block twice": [*_BLOCKS, _BLOCKS[0].replace("00007", "99999")],
        "a block twice of a state that does not run": [*_BLOCKS, _BLOCKS[3]],
        **{row: [*_BLOCKS, row] for row in (
            "1|001|000001|0009|99999|9999", "01|1|000001|0009|99999|9999",
            "01|001|00000x|0009|99999|9999", "01|001|000001||99999|9999",
            "01|001|000001|0009|999999|9999", "01|001|000001|0009|99999|-999",
        )},
        "no rows": [],
    }  # fmt: skip
    faults: dict[str, object] = {name: blocks_of(spoilt, lines)[1] for name, lines in rows.items()}
    faults["a state without blocks"] = blocks_of(spoilt, _BLOCKS, ("01", "05"))[1]
    text = of_cases({name: f"{listed}\n" for name, listed in faults.items()})
    check(Path(__file__).with_name("faults_blocks.txt"), text)


def test_texts_and_places_in_sorted_numbers() -> None:
    assert texts(np.array([7, 123]), 4).to_pylist() == ["0007", "0123"]
    assert is_in(np.array([1, 2, 9]), np.array([2, 5])).tolist() == [False, True, False]
    assert is_in(np.array([1]), np.array([], np.int64)).tolist() == [False]


_TOTALS = "REGION_ID|REGION_TYPE|ITERATION_CODE|COUNT"


@pytest.fixture
def rows(made: Office) -> list[str]:
    """Groups that are counted: of a race, a place, and Puerto Rico."""
    files = made.load("p").files
    table = files.iterations.to_pylist()
    of_all = next(r["CODE"] for r in table if not (r["DETAILED_ONLY"] or r["COARSE_ONLY"]))
    place = next(p for p in files.geography["place"].to_pylist() if p and p[:2] == "01")
    tract = next(t for t in files.geography["tract"].to_pylist() if t[:2] == "72")
    return [
        f"1|USA|{of_all}|120",
        f"{place}|PLACE|{of_all}|-3",
        f"{tract}|PR-TRACT|{of_all}|000",
    ]


def totals_of(
    office: Office, *files: list[str], folder: bool = False
) -> tuple[list[dict[str, object]] | None, list[Fault]]:
    path = office.data / TOTALS
    if folder:
        path.mkdir()
    for number, lines in enumerate(files):
        own = path / f"part-{number}.csv" if folder else path
        own.write_text("\n".join([_TOTALS, *lines]) + "\n")
    loaded = office.load("p")
    faults = list[Fault]()
    table = read_totals(office.data, loaded.files, loaded.parameters, faults)
    return None if table is None else table.to_pylist(), faults


def test_totals_of_groups(spoilt: Office, rows: list[str]) -> None:
    table, faults = totals_of(spoilt, rows)
    assert faults == [] and table is not None
    code = rows[0].split("|")[2]
    assert [tuple(str(row[name]) for name in _TOTALS.split("|")) for row in table] == [
        ("1", "USA", code, "120"),
        (rows[1].split("|")[0], "PLACE", code, "-3"),
        (rows[2].split("|")[0], "PR-TRACT", code, "0"),
    ]


def test_a_folder_is_as_one_file(spoilt: Office, rows: list[str], tmp_path: Path) -> None:
    file_totals, _ = totals_of(spoilt, rows)
    (spoilt.data / TOTALS).unlink()
    parts, faults = totals_of(spoilt, rows[:1], rows[1:], folder=True)
    assert parts == file_totals and faults == []


def test_groups_of_no_level_are_skipped(spoilt: Office, made: Office, rows: list[str]) -> None:
    table = made.load("p").files.iterations.to_pylist()
    large = next(r["CODE"] for r in table if r["DETAILED_ONLY"])
    spoilt.configure(run_pr=False)
    counted, faults = totals_of(spoilt, [*rows, f"01|STATE|{large}|5", f"01001|COUNTY|{large}|6"])
    assert faults == [] and counted is not None
    assert [row["COUNT"] for row in counted] == [120, -3, 5]


def test_faults_of_totals(spoilt: Office, rows: list[str]) -> None:
    changes = [
        ("USA", "WORLD"), ("1|USA", "2|USA"), ("1|USA", "02|COUNTY"), ("1|USA", "720011|PR-COUNTY"),
        ("1|USA", "00x1|AIANNH"), ("|120", "|12.5"), ("|120", "|1" + "0" * 15), ("|120", "|"),
        ("|120", "|0x1F"), ("|120", "|-9223372036854775808"), ("|120", "|+5"),
        (rows[0].split("|")[2], "9999"),
    ]  # fmt: skip
    texts = {}
    for change in changes:
        table, faults = totals_of(spoilt, [rows[0].replace(*change), *rows[1:]])
        assert table is None
        texts[change[1]] = _lines(faults)
    (spoilt.data / TOTALS).unlink()
    texts["no file"] = _lines(totals_of(spoilt)[1])
    texts["a group twice"] = _lines(totals_of(spoilt, rows, [rows[1]], folder=True)[1])
    check(Path(__file__).with_name("faults_totals.txt"), of_cases(texts))


def test_regions_without_a_block(spoilt: Office, rows: list[str]) -> None:
    """Those of states that run count; other states are skipped, whatever their ids look like."""
    code = rows[0].split("|")[2]
    empty = [f"01999|COUNTY|{code}|7", f"7299999|PR-PLACE|{code}|8"]
    skipped = [f"55|STATE|{code}|1", f"55833|PLACE|{code}|2", f"8888|AIANNH|{code}|3",
               f"01001|PR-COUNTY|{code}|4", f"72001|COUNTY|{code}|5"]  # fmt: skip
    table, faults = totals_of(spoilt, [*rows, *empty, *skipped])
    assert faults == [] and table is not None
    assert [row["COUNT"] for row in table] == [120, -3, 0, 7, 8]
    _, faults = totals_of(spoilt, [*empty, *skipped])
    assert [(fault.row, fault.rule) for fault in faults] == [
        (None, "has no group of a region with a block of the run: its tables would be of nobody")
    ]


def test_no_group_of_the_run_and_no_file(spoilt: Office, rows: list[str]) -> None:
    """It would be charged, and every table be a header."""
    spoilt.configure(run_pr=False)
    for lines in ([], [""], rows[2:]):
        table, [fault] = totals_of(spoilt, lines)
        assert table is None and fault.rule.startswith("has no group of a region with a block")
