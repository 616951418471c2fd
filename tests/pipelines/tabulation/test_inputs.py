"""All public files together, of the private one only its header; and what follows from them."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.inputs import (
    content_of,
    digest_of,
    inputs_of,
    load,
    prepared,
    public_paths,
    records_path,
    stamps,
    validate,
)
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
    assert [fault.rule for fault in spoilt.faults()] == ["cannot be read: it is a folder"]


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


def test_records_are_no_part_of_what_is_public(spoilt: Office) -> None:
    before = inputs_of(spoilt.parameters, spoilt.data, Choice("p"))
    plan = prepared(before).plan
    spoilt.spoil("person-records.txt", lambda lines: lines[:-1])
    after = inputs_of(spoilt.parameters, spoilt.data, Choice("p"))
    assert after == before and prepared(after).plan.hash == plan.hash
    assert before.records.name == "person-records.txt" and before.records in before.paths
    for name in ("config.json", "GRF-C.txt", "race-and-ethnicity-codes.txt"):
        was = inputs_of(spoilt.parameters, spoilt.data, Choice("p"))
        spoilt.path(name).write_text(spoilt.path(name).read_text() + "\n")
        assert inputs_of(spoilt.parameters, spoilt.data, Choice("p")).digest != was.digest


def test_files_that_changed_since_are_refused(spoilt: Office) -> None:
    inputs = inputs_of(spoilt.parameters, spoilt.data, Choice("p"))
    spoilt.configure(zero_suppression_chance=0.25)
    with pytest.raises(RunError, match="changed while it was read"):
        prepared(inputs)
    assert prepared(inputs_of(spoilt.parameters, spoilt.data, Choice("p")))


def test_plans_differ_by_what_is_asked(made: Office) -> None:
    choices = (Choice("p"), Choice("p", "rounded"), Choice("p", estimates="combined"))
    hashes = {prepared(inputs_of(made.parameters, made.data, c)).plan.hash for c in choices}
    assert len(hashes) == 3


def test_levels_without_a_budget_are_no_tables(spoilt: Office) -> None:
    fields = {name: 0 for name in _budgets(spoilt)}
    spoilt.configure(**fields)
    with pytest.raises(UsageError):
        prepared(inputs_of(spoilt.parameters, spoilt.data, Choice("p")))


def _budgets(made: Office) -> list[str]:
    import json

    config = json.loads(made.path("config.json").read_text())
    return [name for name in config if name.startswith("privacy_budget_p_level")]


def test_content_tells_files_apart_and_stamps_notice_a_change(
    tmp_path: Path, spoilt: Office
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("x")
    b.write_text("x")
    assert content_of(a) != content_of(b)  # by their names
    assert digest_of([a, b]) != digest_of([b, a])
    with pytest.raises(UsageError, match="missing"):
        content_of(tmp_path / "c")
    with pytest.raises(RunError, match="cannot be read"):
        content_of(tmp_path)
    inputs = inputs_of(spoilt.parameters, spoilt.data, Choice("p"))
    before = stamps(inputs)
    assert stamps(inputs) == before and len(before) == len(inputs.paths) == 7
    inputs.records.touch()
    assert stamps(inputs) != before
