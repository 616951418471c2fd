"""All public files together; of the private one only its header."""

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.files import load, public_paths, records_path, validate
from tests.pipelines.tabulation.office import Office


def test_generated_files_are_right(made: Office) -> None:
    assert made.faults() == []
    loaded = made.load()
    assert loaded.totals is None and loaded.files.geography.num_rows == 480


def test_households_need_totals(made: Office) -> None:
    [fault] = made.faults("h")
    assert (fault.file, fault.rule) == ("pop-group-totals.txt", "is missing")
    with pytest.raises(UsageError, match=r"pop-group-totals.txt: is missing"):
        made.load("h")


def test_faults_of_all_files_at_once(spoilt: Office) -> None:
    spoilt.configure(reader="cef", state_filter_us=["01", "02"])
    spoilt.spoil("GRF-C.txt", lambda lines: [*lines, lines[1]])
    spoilt.spoil("race-and-ethnicity-codes.txt", lambda lines: [*lines, lines[1]])
    spoilt.spoil("person-records.txt", lambda lines: ["QSEX|QAGE", *lines[1:]])
    faults = spoilt.faults()
    assert {fault.file for fault in faults} == {
        "config.json", "race-and-ethnicity-codes.txt", "person-records.txt"
    }  # fmt: skip
    spoilt.configure(reader="csv")
    assert {fault.file for fault in spoilt.faults()} >= {"GRF-C.txt"}
    with pytest.raises(UsageError, match=r"faults\)"):
        spoilt.load()


def test_no_record_is_looked_at(spoilt: Office) -> None:
    path = records_path(spoilt.data, "p")
    header = path.read_bytes().partition(b"\n")[0]
    for rest in (b"", b"\n", b"\n\xff\xff|secret\n" + b"x" * 100):
        path.write_bytes(header + rest)
        assert spoilt.faults() == []
    path.write_bytes(b"\xef\xbb\xbf" + header + b"\r\n")
    assert spoilt.faults() == []


def test_headers_of_records(spoilt: Office) -> None:
    path = records_path(spoilt.data, "p")
    names = path.read_text().partition("\n")[0].split("|")
    for wrong in (names[1:], [*names, "secret"], [*names[1:], names[0]]):
        path.write_text("|".join(wrong) + "\n")
        assert spoilt.faults() and "secret" not in str(spoilt.faults())
    path.unlink()
    assert [fault.rule for fault in spoilt.faults()] == ["is missing"]
    assert load(spoilt.parameters, spoilt.data, Choice("p"), records=False).totals is None
    path.mkdir()
    assert [fault.rule for fault in spoilt.faults()] == ["cannot be read"]


def test_no_fault_shows_a_value(spoilt: Office) -> None:
    def spoil(lines: list[str]) -> list[str]:
        return [lines[0], *("|".join(["sécret!"] * len(line.split("|"))) for line in lines[1:])]

    for path in [*spoilt.parameters.glob("*.txt"), spoilt.data / "GRF-C.txt"]:
        spoilt.spoil(path.name, spoil)
    spoilt.configure(privacy_defn="sécret!", state_filter_us=["sécret!"], reader="sécret!")
    faults = validate(spoilt.parameters, spoilt.data, Choice("p"))
    assert len(faults) > 500 and not any("cret" in str(fault) for fault in faults)


def test_the_public_files_of_each_program(made: Office) -> None:
    persons = public_paths(made.parameters, made.data, "p")
    assert len(persons) == 6 and all(path.exists() for path in persons)
    assert [path.name for path in public_paths(made.parameters, made.data, "h")][6:] == [
        "pop-group-totals.txt"
    ]
