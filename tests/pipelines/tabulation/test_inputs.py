"""All public files together, of the private one only its header; and the plan that follows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.tabulation.parameters import PR_LEVELS, US_LEVELS, Level
from dpstream.pipelines.render.census_plan import census_text
from dpstream.pipelines.tabulation.config import Choice, fields_of, read_config, states_of
from dpstream.pipelines.tabulation.inputs import (
    content_of,
    digest_of,
    faults,
    figures,
    inputs_of,
    load,
    plan,
    prepared,
    public_paths,
    records_path,
    stamps,
    validate,
)
from dpstream.pipelines.tabulation.text import Fault, Faults
from tests.golden.pinned import check, of_cases, of_refusals
from tests.pipelines.tabulation.office import Office


def faults_of(office: Office, choice: Choice = Choice("p")) -> str:  # noqa: B008
    """Every fault of the configuration, a line each."""
    faults = Faults("config.json")
    resolved = read_config(office.parameters / "config.json", choice, faults)
    assert (resolved is None) == bool(faults.faults)
    return "".join(f"{fault}\n" for fault in faults.faults) or "right\n"


def test_parameters_of_persons(made: Office) -> None:
    parameters = made.load().parameters
    assert (
        parameters.program == "p" and parameters.definition == "zcdp" and parameters.fraction == 0.1
    )
    assert set(parameters.budgets["t1t2"]) == {*US_LEVELS, *PR_LEVELS}
    assert parameters.budgets["t1t2"][Level(2, "USA")] == 2.134
    assert parameters.budgets["t1t2"][Level(1, "AIANNH")] == 0.0
    assert parameters.thresholds["t1t2"][Level(1, "TRACT")] == (20.0, 100.0, 400.0)
    assert parameters.state_filter == ("01", "02") and states_of(parameters) == ("01", "02", "72")
    assert (
        parameters.zero_suppression == 0.5
        and parameters.allow_negative
        and parameters.max_race_codes == 8
    )


def test_parameters_of_households(spoilt: Office) -> None:
    faults = Faults("config.json")
    config = read_config(spoilt.parameters / "config.json", Choice("h", "rounded"), faults)
    assert config is not None and faults.faults == [] and config.noise == "rounded"
    assert set(config.budgets) == {"t3", "t4"} and config.fraction is None
    assert config.zero_suppression == 0.0
    assert len(config.thresholds["t3"][Level(1, "USA")]) == 3
    assert len(config.thresholds["t4"][Level(1, "USA")]) == 1


def test_only_levels_of_the_run(spoilt: Office) -> None:
    spoilt.configure(run_pr=False)
    assert set(spoilt.load().parameters.budgets["t1t2"]) == {*US_LEVELS}
    spoilt.configure(run_us=False, run_pr=True, state_filter_us=None)
    parameters = spoilt.load().parameters
    assert set(parameters.thresholds["t1t2"]) == {*PR_LEVELS} and states_of(parameters) == ("72",)


_BUDGET, _STATES, _T = "privacy_budget_p_level_1_usa", "state_filter_us", "thresholds_p"
_FRACTION = "privacy_budget_p_stage_1_fraction"
#: Fields that are set, one at a time; ``None`` takes one away.
FIELDS: list[dict[str, Any]] = [
    *({"max_race_codes": value} for value in (0, 9, 1.5, True)),
    {"privacy_defn": "dp"}, {"reader": "cef"}, {"run_us": False, "run_pr": False},
    {"run_us": "yes"}, {"allow_negative_counts": None}, {"zero_suppression_chance": 1.0},
    *({_BUDGET: value} for value in (
        None, -0.1, float("nan"), -float("inf"), "nan", "-1", 10**400, 1e9, "much", True, "0.25",
        float("inf"), "inf", "Infinity",
    )),
    *({_FRACTION: value} for value in ("1/0", "2/2", 1, 0, "1/10")),
    *({_STATES: value} for value in ([], None, ["01", "01"], ["72"], ["1"], [1], "01")),
    {_T: {}}, {_T: []}, {"zero_suppression_chance": None, "zero_supression_chance": 0.5},
    {"max_race_codes": 0, "reader": "cef", "zero_suppression_chance": None,
     "zero_suppression_chanc": 0.5, _BUDGET: -1},  # all at once
    {"comment": "second try", "author": ["a", "b"], "run_id": 7},  # which nobody looks at
    {"thresholds_h_t3": 7, "privacy_budget_h_t4_level_1_usa": "much"},  # of the other program
    {"privacy_defn": "puredp"},
]  # fmt: skip
#: Thresholds of a level.
THRESHOLDS: list[tuple[str, dict[str, Any]]] = [
    *((_T, {"(USA, 1)": n}) for n in ([1, 2], [3, 2, 4], [1, 2, float("nan")],
                                      [4, 7, float("inf")])),
    ("thresholds_h_t3", {"(USA, 1)": [1, 2]}), ("thresholds_h_t4", {"(USA, 1)": []}),
    ("thresholds_h_t4", {"(USA, 1)": [1, 2]}),
    (_T, {"(USA, 1)": None, "(USA,1)": [1, 2, 3]}), (_T, {"(FARM, 1)": [1, 2, 3]}),
]  # fmt: skip
#: Bytes of a file that is no configuration.
NO_FILES = (b"{", b"\xff{}", b"[" * 100_000, b"[1]", b'{"run_us": true, "run_us": false}',
            b" " * (1 << 20) + b"{}")  # fmt: skip


def test_faults_of_the_configuration(spoilt: Office) -> None:
    path, texts = spoilt.parameters / "config.json", dict[str, str]()
    written = path.read_bytes()
    own = json.loads(written)
    for number, fields in enumerate(FIELDS):
        spoilt.configure(**fields)
        texts[f"{number}: {json.dumps(fields)[:99]}"] = faults_of(spoilt)
        path.write_bytes(written)
    for name, thresholds in THRESHOLDS:
        changed = {k: v for k, v in (own[name] | thresholds).items() if v is not None}
        spoilt.configure(**{name: changed})
        choice = Choice("p" if name == _T else "h")
        texts[f"{name} {json.dumps(thresholds)}"] = faults_of(spoilt, choice)
        path.write_bytes(written)
    spoilt.configure(privacy_defn="puredp", privacy_budget_h_t3_level_1_usa="0.25")
    texts["rounded noise of puredp"] = faults_of(spoilt, Choice("p", "rounded"))
    texts["a text as a number of households"] = faults_of(spoilt, Choice("h"))
    for data in NO_FILES:
        path.write_bytes(data)
        texts[f"{len(data)} bytes {data[:20]!r}"] = faults_of(spoilt)
    path.write_bytes(b"\xef\xbb\xbf" + written)
    texts["a byte order mark"] = faults_of(spoilt)
    path.unlink()
    texts["no file"] = faults_of(spoilt)
    path.mkdir()
    texts["a folder"] = faults_of(spoilt)
    check(Path(__file__).with_name("faults_config.txt"), of_cases(texts))


def test_numbers_as_texts(spoilt: Office) -> None:
    """Persons may have them, as in production."""
    spoilt.configure(**{_BUDGET: "inf", _FRACTION: "1/10"})
    parameters = spoilt.load().parameters
    assert parameters.budgets["t1t2"][Level(1, "USA")] == float("inf")
    assert parameters.fraction == 0.1
    assert not set(fields_of("h")) & {"thresholds_p", "zero_suppression_chance"}


def test_generated_files_are_right(made: Office) -> None:
    assert made.faults() == []
    loaded = made.load()
    assert loaded.totals is None and loaded.files.geography.num_rows == 480


def test_what_is_refused(made: Office, spoilt: Office, tmp_path: Path) -> None:
    """Faults of all files at once; a plan and the inputs of an execution that makes no sense."""
    persons, texts = Choice("p"), dict[str, str]()
    inputs = inputs_of(*spoilt, persons)
    spoilt.configure(zero_suppression_chance=0.25)
    changed = of_refusals({"changed": lambda: prepared(inputs)})
    now = prepared(inputs_of(*spoilt, persons)).plan.hash
    assert now != prepared(inputs_of(*made, persons)).plan.hash
    texts["households without totals"] = _lines(made.faults("h"))
    spoilt.configure(reader="cef", state_filter_us=["01", "02"])
    spoilt.spoil("GRF-C.txt", lambda lines: [*lines, lines[1]])
    spoilt.spoil("race-and-ethnicity-codes.txt", lambda lines: [*lines, lines[1]])
    spoilt.spoil("person-records.txt", lambda lines: ["QSEX|QAGE", *lines[1:]])
    texts["all files"] = _lines(spoilt.faults())
    refused = of_refusals({"a reader": lambda: plan(*spoilt, persons)})
    spoilt.configure(reader="csv")
    texts["all but the configuration"] = _lines(spoilt.faults())
    calls: dict[str, Callable[[], object]] = {
        "households": lambda: made.load("h"),
        "estimates of one step": lambda: plan(*made, Choice("h", estimates="combined")),
        "no delta": lambda: figures(plan(*made, persons), 0.0),
        "a delta of 1": lambda: figures(plan(*made, persons), 1.0),
        "no number": lambda: figures(plan(*made, persons), float("nan")),
        "many faults": spoilt.load,
        "no file": lambda: content_of(tmp_path / "c"),
        "a folder": lambda: content_of(spoilt.data),
    }
    text = of_cases(texts) + "".join(("\n", changed, "\n", refused, "\n", of_refusals(calls)))
    check(Path(__file__).with_name("refusals_inputs.txt"), text)


def _lines(faults: list[Fault]) -> str:
    return "".join(f"{fault}\n" for fault in faults)


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
    names, texts = path.read_text().partition("\n")[0].split("|"), dict[str, str]()
    for wrong in (names[1:], [*names, "secret"], [*names[1:], names[0]]):
        path.write_text("|".join(wrong) + "\n")
        texts[" ".join(wrong)] = _lines(spoilt.faults())
        assert "secret" not in texts[" ".join(wrong)]
    path.unlink()
    texts["no file"] = _lines(spoilt.faults())
    assert load(*spoilt, Choice("p"), records=False).totals is None
    path.mkdir()
    texts["a folder"] = _lines(spoilt.faults())
    check(Path(__file__).with_name("faults_header.txt"), of_cases(texts))


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


def test_plans_differ_by_what_is_asked(made: Office) -> None:
    choices = (Choice("p"), Choice("p", "rounded"), Choice("p", estimates="combined"))
    hashes = {prepared(inputs_of(made.parameters, made.data, c)).plan.hash for c in choices}
    assert len(hashes) == 3


def test_content_tells_files_apart_and_stamps_notice_a_change(
    tmp_path: Path, spoilt: Office
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("x")
    b.write_text("x")
    assert content_of(a) != content_of(b)  # by their names
    assert digest_of([a, b]) != digest_of([b, a])
    inputs = inputs_of(spoilt.parameters, spoilt.data, Choice("p"))
    before = stamps(inputs)
    assert stamps(inputs) == before and len(before) == len(inputs.paths) == 7
    inputs.records.touch()
    assert stamps(inputs) != before


def test_the_plan_is_that_of_the_execution(made: Office) -> None:
    public_plan = plan(*made, Choice("p"))
    assert public_plan.complete
    assert public_plan.plan.hash == prepared(inputs_of(*made, Choice("p"))).plan.hash
    plan_figures = figures(public_plan)
    assert json.loads(json.dumps(plan_figures)) == plan_figures
    assert plan_figures["guarantee"]["rho"] == pytest.approx(4.944)
    assert sum(row["groups"] for row in plan_figures["levels"]) == 593
    assert "Groups      593 in 19 levels" in census_text(plan_figures)


def test_no_record_is_needed(spoilt: Office) -> None:
    before = figures(plan(*spoilt, Choice("p")))
    (spoilt.data / "person-records.txt").unlink()
    assert figures(plan(*spoilt, Choice("p"))) == before


def test_a_public_file_changes_the_hash(made: Office, spoilt: Office) -> None:
    spoilt.spoil("race-and-ethnicity-codes.txt", lambda lines: [lines[0], *reversed(lines[1:])])
    hashes = {plan(*office, Choice("p")).plan.hash for office in (made, spoilt)}
    assert len(hashes) == 2


def test_households_before_their_totals_are_there(made: Office) -> None:
    public_plan = plan(*made, Choice("h"))
    plan_figures = figures(public_plan)
    assert (
        not public_plan.complete
        and plan_figures["plan_hash"] is None
        and plan_figures["unit"].startswith("one house")
    )
    assert "Plan        none yet" in census_text(
        plan_figures
    ) and "before pop-group-totals" in census_text(plan_figures)


def test_what_is_wrong_with_a_plan_is_a_fault_of_its_files(spoilt: Office) -> None:
    """Budgets of rho are no budgets of epsilon: the noise would be beyond the sampler's tables."""
    budgets = [name for name in fields_of("p") if name.startswith("privacy_budget_p_level")]
    cases: dict[str, dict[str, Any]] = {
        "right": {}, "rho as epsilon": {"privacy_defn": "puredp", _BUDGET: 1e-3},
        "no budget": dict.fromkeys(budgets, 0.0), "and no reader": {"reader": "cef"},
    }  # fmt: skip
    texts = {}
    for name, fields in cases.items():
        spoilt.configure(**fields)
        texts[name] = _lines(faults(*spoilt, Choice("p")))
    check(Path(__file__).with_name("faults_plan.txt"), of_cases(texts))


def test_groups_without_a_block_are_named(spoilt: Office) -> None:
    table = spoilt.load("p").files.iterations.to_pylist()
    code = next(row["CODE"] for row in table if not (row["DETAILED_ONLY"] or row["COARSE_ONLY"]))
    rows = [f"1|USA|{code}|12", f"01999|COUNTY|{code}|3", f"72999|PR-COUNTY|{code}|3"]
    notes = []
    for totals in (rows[:1], rows):
        lines = ["REGION_ID|REGION_TYPE|ITERATION_CODE|COUNT", *totals]
        (spoilt.data / "pop-group-totals.txt").write_text("\n".join(lines) + "\n")
        plan_figures = figures(plan(*spoilt, Choice("h")))
        notes.append([note for note in plan_figures["notes"] if "without a block" in note])
    assert notes[0] == [] and len(notes[1]) == 1 and notes[1][0].startswith("2 groups")
