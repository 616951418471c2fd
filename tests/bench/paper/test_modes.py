"""What ``--modes`` names: known names, more keys, keys alone."""

import pytest

from dpstream.accounting.errors import UsageError
from tests.bench.paper.modes import NAMED, parse_mode


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_name_is_its_settings(name: str) -> None:
    mode = parse_mode(name)
    assert mode.fields == NAMED[name]
    assert (mode.kind == "units") is (name == "fused") and mode.published is (name == "paper")


def test_more_keys_and_keys_alone() -> None:
    mode = parse_mode("sticky,strategy=dense,weights={power=1, offset=2.5},final_flush=true")
    assert mode.fields == {
        "mode": "sticky", "strategy": "dense", "final_flush": True,
        "weights": {"power": 1, "offset": 2.5},
    }  # fmt: skip
    assert parse_mode("per_key_bound=1").fields == {"per_key_bound": 1}
    assert "strategy" not in NAMED["sticky"]
    assert parse_mode("combined,skip=false").fields == NAMED["combined"] | {"skip": False}


@pytest.mark.parametrize("text", ["best", "", "sticky,tree", "sticky,A=1", "epsilon=3", "secret=x"])
def test_what_is_no_mode(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_mode(text)
    assert error.value.field == "--modes"


def test_a_name_of_a_folder() -> None:
    assert parse_mode("sticky,weights={power=1}").slug == "sticky-weights-power-1"
