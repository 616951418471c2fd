"""The plan of census tables as text."""

from dpstream.accounting.tabulation.describe import describe
from dpstream.pipelines.render.census_plan import census_text
from tests.accounting.tabulation.examples import persons, planned


def test_every_margin_is_in_the_table_of_its_level() -> None:
    """A row for each level; a cell for each kind of figure, ``-`` where a level has none."""
    public = describe(planned(persons()))
    lines = census_text(public).splitlines()
    assert lines[0].startswith("Plan        ") and lines[1].startswith("Guarantee   ")
    kinds = {(f["table"], f["figure"], f["detail"]) for r in public["levels"] for f in r["figures"]}
    for level in public["levels"]:
        [line] = [line for line in lines if line.startswith(f"{level['label']:<14}")]
        cells = line.split()[-len(kinds) :]
        margins = [f"{figure['margin']:,}" for figure in level["figures"]]
        assert sorted(cells) == sorted([*margins, *["-"] * (len(kinds) - len(margins))])
