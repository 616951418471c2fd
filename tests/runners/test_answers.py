"""`dpstream workload answer` on other runners: the bytes of the direct one, once and over time."""

import contextlib
from pathlib import Path

import pytest

from dpstream.accounting.strategies.cells.auto import auto
from dpstream.pipelines.workload.execute import Order, execute
from tests import accounts
from tests.fixed_runs import fix_run_id
from tests.pipelines.workload.survey import survey, workload
from tests.runners.engines import need_flink
from tests.runners.flink import LOCAL
from tests.runners.prism import binary

pytestmark = pytest.mark.slow
WORKLOAD = workload()
STRATEGY = auto(WORKLOAD).strategy


def answered(folder: Path, over_time: bool, runner: str, flags: list[str]) -> dict[str, bytes]:
    """Every file of the answer, and of the job's own sink."""
    fix_run_id(folder)  # the same noise everywhere
    job = survey(folder)
    order = Order(
        WORKLOAD, job, STRATEGY, folder / "out", over_time, runner=runner, beam_args=flags
    )
    execute(order)
    with contextlib.closing(accounts.opened(folder / "ledger.db", "people")) as ledger:
        assert [charge.kind for charge in ledger.entries()] == ["workload"]
    files = [*(folder / "out").iterdir(), *folder.glob("releases*/**/*.parquet")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, bytes]]:
    return {
        over_time: answered(tmp_path_factory.mktemp("direct"), over_time, "DirectRunner", [])
        for over_time in (False, True)
    }


def check(files: dict[str, bytes], expected: dict[str, bytes], over_time: bool) -> None:
    assert files == expected
    assert {"out/answers.parquet", "out/estimate.npz", "out/release.json"} <= files.keys()
    assert len(files) == 3 + (8 if over_time else 1)


@pytest.mark.parametrize("over_time", [False, True])
def test_prism(over_time: bool, expected: dict[bool, dict[str, bytes]], tmp_path: Path) -> None:
    flags = [f"--prism_location={binary()}"]
    files = answered(tmp_path, over_time, "PrismRunner", flags)
    check(files, expected[over_time], over_time)


@pytest.mark.parametrize("over_time", [False, True])
def test_flink(over_time: bool, expected: dict[bool, dict[str, bytes]], tmp_path: Path) -> None:
    need_flink()
    check(answered(tmp_path, over_time, "FlinkRunner", LOCAL), expected[over_time], over_time)
