"""What is given up with ``--abandon``: its units have nothing left, and what is left goes on."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.dp_transforms.skipping import exhausted
from dpstream.state import open as stores
from dpstream.state.sqlite.store import SqliteStore
from tests import accounts
from tests.pipelines.operate.test_state_admin import (
    DAYS,
    TEXT,
    done,
    files,
    job,
    run,
    stop_after,
    write_input,
)

__all__ = ["job"]


@pytest.mark.parametrize(("skip", "count"), [("false", 9), ("true", exhausted(9))])
def test_abandoned_units_are_exhausted(job: Path, tmp_path: Path, skip: str, count: int) -> None:
    """Where the run skips, its counter of weights is used up like C."""
    text = TEXT.replace("shards = 2", f"shards = 2\nmechanism.skip = {skip}")
    accounts.write(job, text)
    stop_after(job, 1)
    done("backup", job, "--out", tmp_path / "b")
    accounts.write(job, text.replace("epsilon = 22.0", "epsilon = 300.0"))
    done(
        "restore",
        "pages",
        job,
        tmp_path / "b",
        "--replace",
        "--abandon",
        "--now",
        "2024-01-01T00:00:00Z",
    )
    store = SqliteStore(tmp_path / "state" / "s.db", pa.schema([pa.field("page", pa.string())]), 1)
    for shard in (0, 1):
        units = store.unit_shard(shard)
        assert units.table.size > 10
        assert set(units.counts[: units.table.size].tolist()) == {count}
        # BOUND had decided the whole input (up to a test, where it waits), so all that is given up.
        assert units.decided == units.forgotten
        assert (units.decided == 4 * DAYS) is (skip == "false")
    store.close()


@pytest.mark.parametrize("commits", [2, 5, 9])
def test_what_skips_goes_on_when_a_window_is_given_up_in_its_midst(
    job: Path, tmp_path: Path, commits: int
) -> None:
    """At any test of a window: what is left has one value, and a restart repeats it."""
    skip = "mechanism = { skip = true, tests = [1, 3, 4], weights = { offset = 1, power = 2 } }"
    accounts.write(
        job,
        TEXT.replace("shards = 2", f"shards = 2\n{skip}").replace(
            "epsilon = 22.0", "epsilon = 300.0"
        ),
    )
    late = (f"{user},p{user % 3},2024-01-0{day}T05:00:00Z" for user in range(90, 160)
            for day in (3, 4))  # fmt: skip
    write_input(tmp_path, "\n".join(late) + "\n")
    stop_after(job, commits)
    out = tmp_path / "out"
    before = files(out) if out.exists() else {}
    done("backup", job, "--out", tmp_path / "b")
    now = "2024-01-02T09:00:00Z"
    done("restore", "pages", job, tmp_path / "b", "--replace", "--abandon", "--now", now)
    run(job)
    stores.close_all()
    after = files(out)
    assert {name: after[name] for name in before} == before
    new = {Path(name).parent.name for name in set(after) - set(before)}
    assert new == {"window-000002", "window-000003"} and len(set(after) - set(before)) == 8
    # New users are counted, with weights of their own: keys are selected in the new epoch.
    last = pq.read_table(out / "window-000003", partitioning=None)
    assert set(last.column("page").to_pylist()) == {"p0", "p1", "p2"}
    # What was committed before the loss and had not come to the sink is published now.
    assert run(job).resumed
    stores.close_all()
    all_files = files(out)
    assert {name: all_files[name] for name in after} == after
    done("releases", job, "--out", tmp_path / "again")
    assert files(tmp_path / "again") == all_files
