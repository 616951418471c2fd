"""Layouts of the private files."""

from dpstream.pipelines.tabulation.layouts import LAYOUTS, Rule


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
