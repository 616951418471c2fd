"""The margins beside the tables: row by row, and wide enough for what is published."""

from collections import defaultdict
from pathlib import Path

from scipy import stats

from tests.pipelines.tabulation.office import Office
from tests.pipelines.tabulation.oracle import Oracle, published

Key = tuple[str, ...]


def true_counts(made: Office) -> dict[Key, int]:
    """Exact figures of every row that t1 or t2 may have."""
    oracle = Oracle(made, "p", ["01", "02", "72"])
    counts: dict[Key, int] = defaultdict(int)
    counts |= {key: row[0] for key, row in oracle.totals().items()}
    for bins in (4, 9, 23):
        counts |= oracle.ages(bins)
    return counts


def errors_by_kind(
    runs: tuple[Path, Path], truth: dict[Key, int]
) -> dict[str, list[tuple[int, int]]]:
    """(error, margin) of each figure by its kind: totals, sexes and cells of groups with detail.

    Totals below the state are left out: some are suppressed, by their noise.
    """
    out: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for run in runs:
        for folder in ("t1", "t2"):
            counts, margins = published(run / folder), published(run / "margins" / folder)
            assert list(counts) == list(margins)
            detailed = {key[:3] for key in published(run / "t2")}
            for key, count in counts.items():
                kind = "sex" if "*" in key else "cell"
                if folder == "t1":
                    if key[:3] not in detailed and key[1] not in ("USA", "STATE", "PR-STATE"):
                        continue
                    kind = "sum" if key[:3] in detailed else "total"
                out[kind].append((abs(count - truth[key]), margins[key]))
    return out


def misses_too_often(figures: list[tuple[int, int]]) -> bool:
    """Whether more than 5% are beyond their margin, with all but no doubt."""
    beyond = sum(error > margin for error, margin in figures)
    return bool(stats.binom.sf(beyond - 1, len(figures), 0.05) < 1e-6)


def test_margins_cover_what_is_published(lively: Office, runs: tuple[Path, Path]) -> None:
    by_kind = errors_by_kind(runs, true_counts(lively))
    assert by_kind.keys() == {"total", "sum", "sex", "cell"}
    assert all(len(figures) > 60 for figures in by_kind.values())
    assert not any(map(misses_too_often, by_kind.values()))
    # The margin of one cell is too narrow for a sum of cells.
    narrow = min(margin for _, margin in by_kind["cell"])
    assert misses_too_often([(error, narrow) for error, _ in by_kind["sum"]])
    assert misses_too_often([(error, narrow) for error, _ in by_kind["sex"]])


def test_each_kind_has_the_margin_of_the_plan(lively: Office, runs: tuple[Path, Path]) -> None:
    from dpstream.pipelines.tabulation.config import Choice
    from dpstream.pipelines.tabulation.public_plan import figures, plan

    iterations = lively.load().files.iterations.to_pylist()
    level_of = {row["CODE"]: row["LEVEL"] for row in iterations}
    stated: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for level in figures(plan(*lively, Choice("p")))["levels"]:
        for row in level["figures"]:
            kind = row["figure"] if row["table"] == "t2" else "total"
            stated[level["label"], row["table"], kind].add(row["margin"])
    written: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for folder in ("t1", "t2"):
        for key, margin in published(runs[0] / "margins" / folder).items():
            kind = "total" if folder == "t1" else "sex" if "*" in key else "sex by age"
            written[f"({key[1]}, {level_of[key[2]]})", folder, kind].add(margin)
    assert len(written) > 30
    assert all(margins <= stated[kind] for kind, margins in written.items())


def test_the_header_names_the_margin(runs: tuple[Path, Path]) -> None:
    head = (runs[0] / "margins" / "t1" / "usa-1-000.csv").read_text().splitlines()[0]
    assert head == "REGION_ID|REGION_TYPE|ITERATION_CODE|MARGIN_95"
    head = (runs[0] / "margins" / "t2" / "usa-1-000.csv").read_text().splitlines()[0]
    assert head == "REGION_ID|REGION_TYPE|ITERATION_CODE|AGESTART|AGEEND|SEX|MARGIN_95"
