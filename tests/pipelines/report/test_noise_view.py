"""Noise by trigger: pictures that say their numbers, and a short table."""

from dpstream.pipelines.report.view import chart_of_lines, noise

FIGURES = {
    "streams": [
        {"name": "selection", "sd": [1.0, 2.0, 3.0]},
        {"name": "count", "sd": [4.0, 5.0, 6.0]},
    ],
    "tau": [7.0, 8.0, 9.0],
}


def test_pictures_say_their_numbers() -> None:
    chart = chart_of_lines("n", "Title", "up", [("sd", [2.0, 3.0])])
    assert chart["legend"] == [("s0", "sd")]
    assert "sd from 2 at the first to 3 at the last" in chart["text"]


def test_selection_and_values_apart() -> None:
    selection, values = noise(FIGURES)
    assert [name for _, name in selection["legend"]] == [
        "threshold tau", "sd of the selection's noise",
    ]  # fmt: skip
    assert [name for _, name in values["legend"]] == ["sd of count"]
    public = {**FIGURES, "tau": None}
    [only] = noise(public)
    assert [name for _, name in only["legend"]] == ["sd of selection", "sd of count"]
