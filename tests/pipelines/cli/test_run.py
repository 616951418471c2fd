"""``dpstream run``: its examples, early refusals, private counts on stderr."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.cli.run import _print_cut, _print_operator, _warn, released_in_words
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.operate.summary import Cause, Records, Released, Summary
from dpstream.state import open as stores
from tests.growing import arrive, place
from tests.pipelines.cli.called import call, examples_of, refused
from tests.reports import edit


def test_examples() -> None:
    assert len(examples_of("run")) == 5


def test_refused_before_anything_is_read(make_job: Callable[..., Job], tmp_path: Path) -> None:
    assert "--speed" in refused("run", make_job().path, "--speed", "fast")
    assert "--runner" in refused("run", make_job().path, "--runner", "NoSuchRunner")
    assert not (tmp_path / "releases").exists()
    refused("run", tmp_path / "none.toml")


def test_counts_are_for_the_operator_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    _print_operator({"operator_dead_letters": 1234, "operator_records": 5, "public": 9}, Path("d"))
    out, err = capsys.readouterr()
    assert out == ""
    assert "dead letters 1,234, records 5" in err and "9" not in err and "in d" in err
    _print_operator({}, Path("d"))
    assert "nothing new" in capsys.readouterr().err


def test_what_contributions_cut_is_said_if_it_is_much(
    make_job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job()
    _print_cut(job, {"operator_pairs_admitted": 81, "operator_pairs_rejected": 19})
    _print_cut(job, {})
    assert capsys.readouterr() == ("", "")
    cut = {"operator_pairs_admitted": 30, "operator_pairs_rejected": 70}
    _print_cut(job, cut)
    out, err = capsys.readouterr()
    assert out == "" and "left 70% of the records out. `dpstream choose`" in err
    _print_cut(edit(job, ('end = "2024-01-02T', 'end = "2024-01-05T')), cut)
    assert "out, most of it in later windows" in (err := capsys.readouterr().err)
    assert "privacy.period" in err


SD = "the sd of a final value is"


@pytest.mark.parametrize(
    ("released", "words"),
    [
        (
            Released(7, 2, 28, 1_191, 137, 0.384, 0.12),
            "1,191 rows of 137 keys in 7 windows (2 of them empty);"
            f" {SD} 12% of it in the middle, 38.4% at most.",
        ),
        (
            Released(1, 0, 1, 1, 1, 12.0, 12.0),
            f"1 row of 1 key in 1 window; {SD} over 1,000% of it in the middle, "
            "over 1,000% at most.",
        ),
        (Released(2, 2, 2, 0, 0, None), "0 rows of 0 keys in 2 windows (2 of them empty)."),
    ],
)
def test_what_was_released_in_words(released: Released, words: str) -> None:
    assert released_in_words(released) == f"Released {words}"


@pytest.mark.parametrize("rows", [0, 9])
@pytest.mark.parametrize("dead", [0, 40])
def test_warnings(rows: int, dead: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Loud where nothing was released, or all records are dead letters; else silent."""
    cause = Cause("WHY", "HOW") if dead or not rows else None
    released = Released(1, 0, 1, rows, rows, None)
    summary = Summary(released, Records(40, dead, dead / 40, cause))
    _warn(summary, fail_if_empty=False)
    said = capsys.readouterr().err
    assert (said == "") is (cause is None)
    assert ("NOTHING WAS RELEASED" in said) is (rows == 0)
    assert ("every record went" in said.lower()) is (dead > 0)
    if rows == 0:
        with pytest.raises(RunError, match=r"WHY\. Fix: HOW"):
            _warn(summary, fail_if_empty=True)
    else:
        _warn(summary, fail_if_empty=True)


def test_a_pass_in_json_and_in_words(tmp_path: Path) -> None:
    """The private figures stand below ``operator_only`` alone."""
    folder = place(tmp_path, kind="csv")
    arrive(folder, 1)
    with open(folder / "in" / "day-0.csv", "a") as file:
        file.write("nobody,p1,2024-01-01 00:00:00Z,1\n")
    told = call("run", folder / "job.toml", "--through", "2024-01-02", "--json")
    stores.close_all()
    found = json.loads(told.stdout)
    assert found["through"] == "2024-01-02T00:00:00Z" and found["summary"]["released"]["rows"] > 10
    records = found["summary"]["operator_only"]
    assert (records["read"], records["dead"]) == (1_501, 1) and records["cause"] is None
    assert records["dead_share"] == pytest.approx(1 / 1_501)
    arrive(folder, 2)
    shown = call("run", folder / "job.toml", "--through", "2024-01-03", "--quiet")
    stores.close_all()
    assert "released through 2024-01-03T00:00:00Z; files may join" in shown.output
    assert "position and reason, 0.0333% of the records" in shown.output
    engine = refused("run", folder / "job.toml", "--through", "end", "--runner", "PrismRunner")
    assert "reads no files that grow" in engine or "--prism_location" in engine
