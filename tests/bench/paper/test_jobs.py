"""Job files of experiments: each in a folder of its own with a fresh key; all can be loaded."""

from pathlib import Path

from dpstream.pipelines.jobs.job import load_job
from tests.bench.paper.jobs import Frame, Setting, pattern_of, write_job
from tests.bench.paper.modes import parse_mode


def test_a_written_job_says_what_was_set(tmp_path: Path) -> None:
    frame = Frame(tmp_path / "data [1].parquet", "int", tmp_path / "runs", 2.0, 1e-9, 8)
    setting = Setting(parse_mode("rounds"), 10, 3)
    one, other = (write_job(frame, setting) for _ in range(2))
    assert one.parent != other.parent
    keys = [(path.parent / "noise.secret").read_bytes() for path in (one, other)]
    assert keys[0] != keys[1]
    plan, job = load_job(one).plan, load_job(one)
    assert (plan.privacy.mode, plan.privacy.contributions, plan.privacy.epsilon) == (
        "rounds",
        3,
        2.0,
    )
    assert plan.timeline.triggers == 10 and job.state.shards == 8
    assert [a.kind for a in plan.aggregates] == ["count"]
    fused = load_job(write_job(frame, Setting(parse_mode("fused"), 10, 3)))
    assert [a.kind for a in fused.plan.aggregates] == ["units"]


def test_names_of_data_are_no_patterns(tmp_path: Path) -> None:
    folder = tmp_path / "a[b]"
    folder.mkdir()
    (folder / "x.parquet").write_bytes(b"")
    assert [p.name for p in Path("/").glob(pattern_of(folder)[1:])] == ["x.parquet"]
    assert [p.name for p in Path("/").glob(pattern_of(folder / "x.parquet")[1:])] == ["x.parquet"]
