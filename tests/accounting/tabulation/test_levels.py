"""Names of levels as parameter files have them, and what each takes."""

from dpstream.accounting.tabulation.levels import PR_LEVELS, US_LEVELS, Level


def test_levels_in_public_order() -> None:
    assert [level.name for level in US_LEVELS] == [
        f"level_{n}_{region}"
        for region in ("usa", "state", "county", "tract", "place", "aiannh")
        for n in (1, 2)
    ]
    assert [level.label for level in PR_LEVELS] == [
        f"({region}, {n})"
        for region in ("PR-STATE", "PR-COUNTY", "PR-TRACT", "PR-PLACE")
        for n in (1, 2)
    ]
    assert Level(2, "PR-STATE").name == "level_2_pr_state"


def test_nation_and_states_are_detailed() -> None:
    detailed = {level.region_type for level in US_LEVELS + PR_LEVELS if level.detailed}
    assert detailed == {"USA", "STATE", "PR-STATE"}


def test_a_level_is_of_puerto_rico_or_not() -> None:
    assert all(level.puerto_rico for level in PR_LEVELS)
    assert not any(level.puerto_rico for level in US_LEVELS)
