"""Tables are the same bytes in this process and on every runner."""

import os
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.tabulation import execute as module
from dpstream.pipelines.tabulation.execute import Execution
from dpstream.pipelines.tabulation.private import pieces
from tests.fixed import fixed_run_ids
from tests.pipelines.tabulation.executing import charges, content, executed, ledger_of, left_over
from tests.pipelines.tabulation.office import Office
from tests.runners.engines import need_flink

DIRECT = Runner("DirectRunner")


def same(runner: Runner, made: Office, folder: Path) -> None:
    """An execution here, and one of the same run id on a runner."""
    here, there = (
        drawn(made, folder / name, folder / f"{name} account", runner=where)
        for name, where in (("here", None), ("there", runner))
    )
    assert here.manifest == there.manifest
    assert content(folder / "here") == content(folder / "there")
    assert left_over(folder) == []


def drawn(made: Office, out: Path, account: Path, **more: Any) -> Execution:
    """An execution in an account of its own, under the first of the fixed run ids."""
    with fixed_run_ids():
        done = executed(made, out, ledger=ledger_of(account), **more)
    assert done.drawn and done.charged and len(charges(account)) == 1
    return done


def test_the_direct_runner_gives_the_same_bytes(
    made: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def many(path: Path) -> Any:
        return pieces(path, 3_000)

    monkeypatch.setattr(module, "pieces", many)
    assert len(many(made.path("person-records.txt"))) > 5
    same(DIRECT, made, tmp_path)


@pytest.mark.slow
def test_prism_gives_the_same_bytes(made: Office, tmp_path: Path) -> None:
    same(Runner("PrismRunner"), made, tmp_path)


@pytest.mark.slow
def test_flink_gives_the_same_bytes(made: Office, tmp_path: Path) -> None:
    need_flink()
    same(Runner("FlinkRunner", parallelism=2), made, tmp_path)


def test_workers_set_records_aside_or_refuse_the_file(spoilt: Office, tmp_path: Path) -> None:
    def sex(lines: list[str]) -> None:
        lines[5] = lines[5].replace("|1|", "|3|", 1).replace("|2|", "|3|", 1)
        lines[6] += "|"

    spoilt.spoil("person-records.txt", sex)
    place = ledger_of(tmp_path)
    with pytest.raises(PolicyError, match="depends on the data"):
        executed(spoilt, tmp_path / "out", ledger=place, runner=DIRECT, strict=True)
    assert not (tmp_path / "out").exists() and not (tmp_path / "dead_letter").exists()
    drawn(spoilt, tmp_path / "out", tmp_path / "one", runner=DIRECT)
    drawn(spoilt, tmp_path / "again", tmp_path / "two")
    letters = [
        [path.read_bytes() for path in sorted((tmp_path / "dead_letter" / name).iterdir())]
        for name in ("out", "again")
    ]
    assert letters[0] == letters[1] and len(letters[0]) == 1
    assert content(tmp_path / "out") == content(tmp_path / "again")


def test_runners_whose_workers_share_no_folder_are_refused_before_the_charge(
    made: Office, tmp_path: Path
) -> None:
    for name in ("DataflowRunner", "NoRunner"):
        with pytest.raises(UsageError, match="--runner"):
            executed(made, tmp_path / "out", ledger=ledger_of(tmp_path), runner=Runner(name))
    assert os.listdir(tmp_path) == ["ledger.db"] and charges(tmp_path) == []
