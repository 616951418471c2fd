"""A study's runs: each asked once; data is made once and named by what makes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import UsageError
from tests.bench.paper.studies import Study, corpus, synthetic

Source = Callable[[Study, Callable[[str], None]], tuple[Path, Callable[[], None]]]


def study(folder: Path, **more: Any) -> Study:
    usual: dict[str, Any] = {"folder": folder, "users": 30, "modes": ("sticky",)}
    return Study(**(usual | more))


def test_each_setting_is_run_once(tmp_path: Path) -> None:
    small_study = study(tmp_path, modes=("tree", "sticky", "tree"), triggers=(10, 100, 10),
                  contributions=(3, 4, 3), baselines=("baseline1", "baseline1"))  # fmt: skip
    contest = small_study.contest(tmp_path / "x.parquet", "int")
    order = [(s.triggers, s.mode.name, s.contributions) for s in contest.settings]
    assert order == [(t, m, c) for t in (10, 100) for m in ("tree", "sticky") for c in (3, 4)]
    assert (list(contest.baselines), contest.contributions) == (["baseline1"], 3)


def test_nothing_to_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        study(tmp_path, modes=(), baselines=()).contest(tmp_path, "int")
    assert error.value.field == "--modes"


@pytest.mark.parametrize("source", [synthetic, corpus])
def test_data_is_made_once(source: Source, tmp_path: Path) -> None:
    messages: list[str] = []
    path, make = source(study(tmp_path, keys=50), messages.append)
    assert not path.exists()
    make()
    before = path.stat().st_mtime_ns
    make()
    assert path.stat().st_mtime_ns == before and len(messages) == 1
    assert source(study(tmp_path, keys=50, seed=1), messages.append)[0] != path
