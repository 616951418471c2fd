"""What a first job's budget can cover, and the figures of each choice."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field
from dpstream.pipelines.drafting.columns import DataFile
from dpstream.pipelines.drafting.covering import (
    Population,
    checker,
    choices,
    table,
    with_covers,
)
from dpstream.pipelines.drafting.draft import Answers
from dpstream.pipelines.jobs.windows import windows
from tests.pipelines.drafting import begun


def answers(tmp_path: Path, months: int = 260) -> Answers:
    start = datetime(2000, 1, 3, tzinfo=UTC)
    end = datetime(2000 + months // 12, 1 + months % 12, 1, tzinfo=UTC)
    file = tmp_path / "visits.csv"
    file.touch()
    return Answers(
        DataFile(str(file), file, "csv", None), Field("user"), (Field("page"),), "at", (),
        windows(start, end, "month"), None, 4.0, 1e-8, 10,
    )  # fmt: skip


def test_choices(tmp_path: Path) -> None:
    assert choices(answers(tmp_path)) == ["window", "112d", "lifetime"]
    assert choices(answers(tmp_path, 3)) == ["window", "lifetime"]
    assert with_covers(answers(tmp_path), "lifetime").period is None
    assert with_covers(answers(tmp_path), "Window").period == "28d"


def test_figures_of_each_choice(tmp_path: Path) -> None:
    """Everything costs a unit 4 and publishes nothing in the middle; a window the reverse."""
    replies = answers(tmp_path)
    head, *rows = table(replies, begun(tmp_path), choices(replies), Population())
    cells = {row.split()[0]: row.replace(",", "").split()[1:] for row in rows}
    assert len(head.split("  ")) > 4 and list(cells) == ["window", "112d", "lifetime"]
    assert cells["lifetime"][1] == "none" and cells["lifetime"][-1] == "4"
    assert cells["window"][0] == cells["window"][1] != "none"
    cut, always = ([float(row[i].rstrip("%")) for row in cells.values()] for i in (-2, -1))
    assert cut == sorted(cut) and always == sorted(always, reverse=True)


def test_a_period_is_whole_windows(tmp_path: Path) -> None:
    read = checker(answers(tmp_path), begun(tmp_path))
    assert read(" Lifetime ") == "lifetime" and read("56d") == "56d"
    with pytest.raises(UsageError) as error:
        read("30d")
    assert error.value.field == "--covers"


def test_another_word_is_answered_with_those_that_a_budget_covers(tmp_path: Path) -> None:
    read = checker(answers(tmp_path), begun(tmp_path))
    with pytest.raises(UsageError) as error:
        read("everything")
    assert error.value.field == "--covers" and "lifetime" in error.value.fix
