"""The configuration: resolved parameters, and every fault of a field."""

import json
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.tabulation.parameters import PR_LEVELS, US_LEVELS, Level
from dpstream.pipelines.tabulation.config import Choice, fields_of, read_config, states_of
from dpstream.pipelines.tabulation.text import Faults
from tests.pipelines.tabulation.office import Office


def faults_of(office: Office, choice: Choice = Choice("p")) -> list[tuple[str, str]]:  # noqa: B008
    faults = Faults("config.json")
    resolved = read_config(office.parameters / "config.json", choice, faults)
    assert (resolved is None) == bool(faults.faults)
    return [(fault.column, fault.rule) for fault in faults.faults]


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


@pytest.mark.parametrize(
    ("fields", "column", "rule"),
    [
        ({"max_race_codes": 0}, "max_race_codes", "is not 1 to 8"),
        ({"max_race_codes": 9}, "max_race_codes", "is not 1 to 8"),
        ({"max_race_codes": 1.5}, "max_race_codes", "is not a whole number"),
        ({"max_race_codes": True}, "max_race_codes", "is not a whole number"),
        ({"privacy_defn": "dp"}, "privacy_defn", "is not zcdp or puredp"),
        ({"reader": "cef"}, "reader", "is not csv: files are read as texts, nothing else is"),
        ({"run_us": False, "run_pr": False}, "run_us", "and run_pr are both false"),
        ({"run_us": "yes"}, "run_us", "is not true or false"),
        ({"allow_negative_counts": None}, "allow_negative_counts", "is required"),
        ({_BUDGET: None}, _BUDGET, "is required"),
        ({_BUDGET: -0.1}, _BUDGET, "is not a number of 0 or more"),
        ({_BUDGET: float("nan")}, _BUDGET, "is not a number of 0 or more"),
        ({_BUDGET: -float("inf")}, _BUDGET, "is not a number of 0 or more"),
        ({_BUDGET: "nan"}, _BUDGET, "is not a number of 0 or more"),
        ({_BUDGET: "-1"}, _BUDGET, "is not a number of 0 or more"),
        ({_BUDGET: 10**400}, _BUDGET, "is not a number"),
        ({_BUDGET: 1e9}, _BUDGET, "exceeds 1,000, which protects nobody"),
        ({_BUDGET: "much"}, _BUDGET, "is not a number, or the text of one"),
        ({_BUDGET: True}, _BUDGET, "is not a number, or the text of one"),
        (
            {"privacy_budget_p_stage_1_fraction": "1/0"},
            "privacy_budget_p_stage_1_fraction",
            "is not a number, or the text of one",
        ),
        (
            {"privacy_budget_p_stage_1_fraction": "2/2"},
            "privacy_budget_p_stage_1_fraction",
            "between",
        ),
        ({"privacy_budget_p_stage_1_fraction": 1}, "privacy_budget_p_stage_1_fraction", "between"),
        ({"privacy_budget_p_stage_1_fraction": 0}, "privacy_budget_p_stage_1_fraction", "between"),
        ({"zero_suppression_chance": 1.0}, "zero_suppression_chance", "is not at least 0"),
        ({_STATES: []}, _STATES, "is empty or missing"),
        ({_STATES: None}, _STATES, "is empty or missing"),
        ({_STATES: ["01", "01"]}, _STATES, "has a state twice"),
        ({_STATES: ["72"]}, _STATES, "has what is no FIPS code of a state"),
        ({_STATES: ["1"]}, _STATES, "has what is no FIPS code of a state"),
        ({_STATES: [1]}, _STATES, "is not a list of texts"),
        ({_STATES: "01"}, _STATES, "is not a list of texts"),
        ({_T: {}}, f"{_T} (PR-PLACE, 2)", "is missing"),
        ({_T: []}, _T, "is not an object of lists of numbers"),
        (
            {"zero_suppression_chance": None, "zero_supression_chance": 0.5},
            "",
            "has a field that is not known",
        ),
    ],
)
def test_faults_of_a_field(spoilt: Office, fields: dict[str, Any], column: str, rule: str) -> None:
    spoilt.configure(**fields)
    assert any(c == column and rule in r for c, r in faults_of(spoilt))


@pytest.mark.parametrize(
    ("program", "field", "numbers", "rule"),
    [
        ("p", "thresholds_p", [1, 2], "does not have at least 3 thresholds"),
        ("p", "thresholds_p", [3, 2, 4], "has thresholds that fall"),
        ("p", "thresholds_p", [1, 2, float("nan")], "has what is no number"),
        ("h", "thresholds_h_t3", [1, 2], "does not have at least 3 thresholds"),
        ("h", "thresholds_h_t4", [], "does not have exactly 1 thresholds"),
        ("h", "thresholds_h_t4", [1, 2], "does not have exactly 1 thresholds"),
    ],
)
def test_faults_of_thresholds(
    spoilt: Office, program: Any, field: str, numbers: list[float], rule: str
) -> None:
    path = spoilt.parameters / "config.json"
    own = json.loads(path.read_text())[field]
    spoilt.configure(**{field: own | {"(USA, 1)": numbers}})
    assert (f"{field} (USA, 1)", rule) in faults_of(spoilt, Choice(program))
    misspelt = {"(USA,1)" if label == "(USA, 1)" else label: own[label] for label in own}
    spoilt.configure(**{field: misspelt})
    assert faults_of(spoilt, Choice(program)) == [(f"{field} (USA, 1)", "is missing")]
    spoilt.configure(**{field: own | {"(FARM, 1)": own["(USA, 1)"]}})
    assert faults_of(spoilt, Choice(program)) == []


def test_all_faults_are_listed_at_once(spoilt: Office) -> None:
    spoilt.configure(
        max_race_codes=0, reader="cef", zero_suppression_chance=None, zero_suppression_chanc=0.5,
        **{_BUDGET: -1},
    )  # fmt: skip
    faults = Faults("config.json")
    read_config(spoilt.parameters / "config.json", Choice("p"), faults)
    assert [fault.column for fault in faults.faults] == ["", "max_race_codes", "reader", _BUDGET]
    assert faults.faults[0].fix == "did you mean 'zero_suppression_chance'?"


def test_further_fields_are_not_looked_at(spoilt: Office) -> None:
    spoilt.configure(comment="second try", author=["a", "b"], run_id=7)
    assert faults_of(spoilt) == [] and faults_of(spoilt, Choice("h")) == []


def test_numbers_as_texts(spoilt: Office) -> None:
    """Persons may have them, as in production; households may not."""
    spoilt.configure(**{_BUDGET: "0.25", "privacy_budget_p_stage_1_fraction": "1/10"})
    parameters = spoilt.load().parameters
    assert parameters.budgets["t1t2"][Level(1, "USA")] == 0.25 and parameters.fraction == 0.1
    spoilt.configure(privacy_budget_h_t3_level_1_usa="0.25")
    assert faults_of(spoilt, Choice("h")) == [
        ("privacy_budget_h_t3_level_1_usa", "is not a number")
    ]


@pytest.mark.parametrize("written", ["Infinity", '"inf"', '"Infinity"'])
def test_a_budget_may_be_infinite(spoilt: Office, written: str) -> None:
    path = spoilt.parameters / "config.json"
    text = path.read_text()
    budget = json.loads(text)[_BUDGET]
    path.write_text(text.replace(f'"{_BUDGET}": {budget}', f'"{_BUDGET}": {written}'))
    assert spoilt.load().parameters.budgets["t1t2"][Level(1, "USA")] == float("inf")


def test_an_infinite_threshold_is_never_reached(spoilt: Office) -> None:
    path = spoilt.parameters / "config.json"
    own = json.loads(path.read_text())[_T]
    spoilt.configure(**{_T: own | {"(USA, 1)": [4, 7, float("inf")]}})
    assert faults_of(spoilt) == []
    assert spoilt.load().parameters.thresholds["t1t2"][Level(1, "USA")] == (4.0, 7.0, float("inf"))


def test_fields_of_the_other_program_are_not_looked_at(spoilt: Office) -> None:
    spoilt.configure(thresholds_h_t3=7, privacy_budget_h_t4_level_1_usa="much")
    assert faults_of(spoilt) == []
    assert len(faults_of(spoilt, Choice("h"))) == 2
    assert not set(fields_of("h")) & {"thresholds_p", "zero_suppression_chance"}


def test_rounded_noise_needs_zcdp(spoilt: Office) -> None:
    spoilt.configure(privacy_defn="puredp")
    assert faults_of(spoilt) == []
    [(column, _)] = faults_of(spoilt, Choice("p", "rounded"))
    assert column == "privacy_defn"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (b"{", "is not JSON in UTF-8"),
        (b"\xff{}", "is not JSON in UTF-8"),
        (b"[" * 100_000, "is not JSON in UTF-8"),
        (b"[1]", "is not one JSON object"),
        (b'{"run_us": true, "run_us": false}', "has a field or a threshold twice"),
        (b" " * (1 << 20) + b"{}", "exceeds 1048576 bytes"),
    ],
)
def test_files_that_are_no_configuration(spoilt: Office, text: bytes, rule: str) -> None:
    (spoilt.parameters / "config.json").write_bytes(text)
    assert faults_of(spoilt) == [("", rule)]


def test_no_file_and_a_byte_order_mark(spoilt: Office, tmp_path: Path) -> None:
    path = spoilt.parameters / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert faults_of(spoilt) == []
    path.unlink()
    assert faults_of(spoilt) == [("", "is missing")]
    path.mkdir()
    assert faults_of(spoilt) == [("", "cannot be read: it is a folder")]
