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


def test_the_load_comes_last() -> None:
    public = describe(planned(persons()))
    scale = {
        "units": 10**6, "groups": 12, "cpu_seconds": 7_200.0, "memory_gib": 1.5,
        "shuffled_gib": 0.5, "totals_gib": 0.1,
    }  # fmt: skip
    text = census_text(public | {"scale": scale})
    assert text.startswith(census_text(public))
    assert text.splitlines()[-4:] == [
        "Scale       1,000,000 records, 12 groups with noise",
        "Processor   2.0 h of one core; on a runner its cores share it",
        "Memory      1.5 GiB in one process; on a runner 0.5 GiB are shuffled",
        "Output      0.1 GiB of totals if all are kept; more with detail",
    ]
    seconds = census_text(public | {"scale": scale | {"cpu_seconds": 7_199.0}})
    assert "Processor   7,199 s of one core" in seconds
