"""``dpstream workload answer`` as it is typed."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.pipelines.cli.called import call, examples_of, refused
from tests.pipelines.workload.survey import DOMAIN, survey, workload, write

ANSWER = ("workload", "answer")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a release."""
    folder = tmp_path_factory.mktemp("survey")
    survey(folder, 500)
    done = call(*ANSWER, folder / "asked.json", "--project", folder, "--out", folder / "out",
                "--cache", folder / "cache", "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["answers"] == workload().queries and report["insecure"] and not report["resumed"]
    return folder


def test_again_it_costs_nothing(made: Path) -> None:
    done = call(*ANSWER, made / "asked.json", "--project", made, "--out", made / "out",
                "--cache", made / "cache")  # fmt: skip
    assert done.exit_code == 0 and "INSECURE" in done.stderr
    outcome = call("account", "show", "--project", made)
    assert outcome.stdout.count("workload") == 1


@pytest.mark.parametrize("first", ["once", "over time"])
def test_answers_once_and_over_time_of_one_job_have_their_own_places(
    first: str, tmp_path: Path
) -> None:
    """In any order; each is charged once, and continues as if the other were not there."""
    survey(tmp_path, 300)
    given = (tmp_path / "asked.json", "--project", tmp_path, "--cache", tmp_path / "cache")
    commands = {
        "once": (*ANSWER, *given, "--mechanism", "gaussian", "--out", tmp_path / "once", "--json"),
        "over time": (*ANSWER, *given, "--over-time", "--out", tmp_path / "often", "--json"),
    }
    order = sorted(commands, key=lambda name: name != first)
    done = {name: call(*commands[name]) for name in order}
    assert [result.exit_code for result in done.values()] == [0, 0], done
    runs = {name: json.loads(result.stdout)["run_id"] for name, result in done.items()}
    assert len(set(runs.values())) == 2
    for name in order:
        again = json.loads(call(*commands[name]).stdout)
        assert again.get("resumed", True) and not again.get("charged")
        assert again["run_id"] == runs[name]
    assert call("account", "show", "--project", tmp_path).stdout.count("workload") == 2
    for place, other in (("people.store.db", "people.store-over-time.db"),
                         ("releases", "releases-over-time"),
                         ("dead_letter/people", "dead_letter/people-over-time")):  # fmt: skip
        assert (tmp_path / place).exists() and (tmp_path / other).exists()


def test_a_workload_leaves_the_run_of_its_job_alone(tmp_path: Path) -> None:
    """Nothing is charged before the refusal; the options that it names are enough, each time."""
    survey(tmp_path, 300)
    project = ("--project", tmp_path)
    stream = ("run", "people", *project, "--quiet", "--json")
    ran = json.loads(call(*stream).stdout)
    given = (*project, "--cache", tmp_path / "cache", "--mechanism", "gaussian")
    total = write(tmp_path / "total.json", [{"factors": {}}])
    for number, file in enumerate((tmp_path / "asked.json", total), 2):
        words = (*ANSWER, file, *given, "--out", tmp_path / f"out{number}")
        before = call("account", "show", *project).stdout
        message = " ".join(refused(*words, code=3).split())
        assert "of a job, and this is a workload" in message and "--fresh" not in message
        assert call("account", "show", *project).stdout == before
        options = message.partition(" and add ")[2].partition(" to this command")[0].split()
        assert options[1] == f"job.people.store=people-{number}.store.db"
        assert call(*words, *options).exit_code == 0
        assert json.loads(call(*words, *options, "--json").stdout)["resumed"]
        theirs: tuple[str | Path, ...] = ("plan", "people", *project, *options)
        decision = json.loads(call(*theirs, "--json").stdout)["acceptance"]["refusal"]
        assert "of a workload, and this is a job" in decision["rule"]
        assert "--fresh" not in decision["fix"]
        own = decision["fix"].partition(" and add ")[2].partition(" to this command")[0].split()
        assert call(*theirs, *own).exit_code == 0
        assert not (tmp_path / f"people-{number}" / "run.json").samefile(
            tmp_path / "releases" / "run.json"
        )
    assert json.loads(call(*stream).stdout)["run_id"] == ran["run_id"]
    assert json.loads(call(*stream).stdout)["resumed"]


def test_a_section_names_the_workload_and_its_job(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    with open(tmp_path / "dpstream.toml", "a") as file:
        file.write('[workload.ages]\nfile = "asked.json"\njob = "people"\n')
    done = call(*ANSWER, "ages", "--project", tmp_path, "--out", tmp_path / "out", "--cache",
                tmp_path / "cache", "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["answers"] == workload().queries
    again = call(*ANSWER, tmp_path / "asked.json", "--job", "people", "--project", tmp_path,
                 "--out", tmp_path / "out", "--cache", tmp_path / "cache", "--json")  # fmt: skip
    assert json.loads(again.stdout)["resumed"]
    assert "no workload 'age'" in refused(*ANSWER, "age", "--project", tmp_path, "--dry-run")


def test_another_workload_from_the_release(made: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "o.json", [{"factors": {}}, {"factors": {"sex": "identity"}}])
    outcome = call(*ANSWER, file, "--from", made / "out", "--covariance", tmp_path / "c.npy")
    assert outcome.exit_code == 0, outcome.output
    lines = [line.split(",") for line in outcome.stdout.splitlines()]
    assert len(lines) == 4 and lines[1][1:3] == ['"all"', '"all"']
    total, *parts = [float(line[3]) for line in lines[1:]]
    assert total == pytest.approx(sum(parts))
    sds = [float(line[4]) for line in lines[1:]]
    assert np.allclose(np.diag(np.load(tmp_path / "c.npy")), np.square(sds))
    to_file = call(*ANSWER, file, "--from", made / "out", "--out", tmp_path / "o.parquet")
    assert "nothing was charged" in to_file.stdout and (tmp_path / "o.parquet").exists()
    as_json = call(*ANSWER, file, "--from", made / "out", "--nonnegative", "--json")
    assert json.loads(as_json.stdout)["charged"] is False


def test_pure_and_tables(made: Path) -> None:
    ranges = write(made / "r.json", [{"factors": {"age": "range", "sex": "identity"}}])
    once = (*ANSWER, ranges, "--project", made, "--mechanism=geometric", "--out", made / "pure",
            "--cache", made / "cache")  # fmt: skip
    assert "--mechanism" in refused(*once, "--strategy", "haar")
    pure = call(*once, "--json")
    assert pure.exit_code == 0, pure.output
    report = json.loads(pure.stdout)
    assert (report["epsilon"], report["delta"], report["mu"], report["charged"]) == (
        6.0,
        0.0,
        None,
        True,
    )
    tables = write(made / "t.json", [{"ways": 2}, {"ways": 1}])
    given = (*ANSWER, tables, "--project", made, "--tables", "--cache", made / "cache")
    done = call(*given, "--out", made / "tables")
    assert done.exit_code == 0 and "strategy residual" in done.stdout, done.output
    outcome = call(*ANSWER, ranges, "--from", made / "tables")
    assert len(outcome.stdout.splitlines()) == 31
    refused(*given, "--out", made / "x", "--over-time")
    refused(*ANSWER, tables, "--from", made / "tables", "--covariance", made / "c.npy")


def test_what_is_drawn_once_takes_no_runner_and_no_triggers(made: Path) -> None:
    """Also where all cells are too many, so that tables are chosen without an option."""
    wide = [{"name": "age", "edges": list(range(5_001))}, DOMAIN[1]]
    tables = write(made / "w.json", [{"ways": 1}], domain=wide)
    given = (*ANSWER, tables, "--project", made, "--cache", made / "cache")
    before = call("account", "show", "--project", made).stdout
    for flags in (("--over-time",), ("--runner", "PrismRunner"), ("--no_such_flag=1",)):
        assert flags[0].replace("--no_such_flag=1", "--runner") in refused(
            *given, "--out", made / "w", *flags
        )
    assert call("account", "show", "--project", made).stdout == before
    assert not (made / "w").exists()


def test_refused(made: Path, tmp_path: Path) -> None:
    queries, project = made / "asked.json", ("--project", made)
    turned = write(tmp_path / "t.json", domain=[DOMAIN[0], {"name": "sex", "values": ["m", "f"]}])
    assert "release's" in refused(*ANSWER, turned, "--from", made / "out")
    assert "--job" in refused(*ANSWER, queries, "--job", "people", "--from", made / "out")
    assert "no job 'nobody'" in refused(
        *ANSWER, queries, *project, "--job", "nobody", "--out", tmp_path / "o"
    )
    assert "WORKLOAD|FILE" in refused(*ANSWER)
    assert "--out" in refused(*ANSWER, queries, *project)
    assert "--covariance" in refused(*ANSWER, queries, *project, "--out", tmp_path / "o",
                                     "--covariance", tmp_path / "c.npy")  # fmt: skip
    assert "--over-time" in refused(*ANSWER, queries, "--from", made / "out", "--over-time")
    assert "ends with" in refused(*ANSWER, queries, "--from", made / "out", "--out",
                                  tmp_path / "o.txt")  # fmt: skip
    assert "npy" in refused(*ANSWER, queries, "--from", made / "out", "--covariance",
                            tmp_path / "c.txt")  # fmt: skip
    assert "--from" in refused(*ANSWER, queries, "--from", tmp_path)
    assert len(examples_of(*ANSWER)) == 4


def _fixed(words: tuple[str | Path, ...], message: str) -> tuple[str | Path, ...]:
    """The command with the options that a message says to type."""
    _, _, fix = " ".join(message.split()).partition("Fix: ")
    if fix.startswith("leave out "):
        flag = fix.removeprefix("leave out ").split(",")[0]
        return tuple(word for word in words if word != flag)
    typed = fix.removeprefix("type ").split(", or ")[0].split()
    typed_words = list(words)
    if typed[0] in typed_words:
        at = typed_words.index(typed[0])
        typed_words[at : at + len(typed)] = []
    return (*typed_words, *typed)


@pytest.mark.parametrize("over_time", [(), ("--over-time",)], ids=["once", "over time"])
def test_again_in_the_stored_format_or_with_the_flag_that_is_named(
    tmp_path: Path, over_time: tuple[str, ...]
) -> None:
    survey(tmp_path, 300, epsilon=0.05)  # so that some estimates are below 0
    given: tuple[str | Path, ...] = (
             *ANSWER, tmp_path / "asked.json", "--project", tmp_path, "--cache", tmp_path / "cache",
             *over_time, "--out", tmp_path / "out", "--quiet")  # fmt: skip
    first = call(*given, "--format", "csv", "--nonnegative")
    assert first.exit_code == 0, first.output
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert "answers.csv" in before
    assert call(*given, "--nonnegative").exit_code == 0  # no word of a format: as it is
    options: tuple[tuple[str, ...], ...] = (("--nonnegative", "--format", "parquet"), ())
    for more in options:
        words = (*given, *more)
        done = call(*_fixed(words, refused(*words)))
        assert done.exit_code == 0, done.output
    other = (*given[:-3], "--out", tmp_path / "linear", "--quiet")
    assert call(*other).exit_code == 0 and (tmp_path / "linear" / "answers.parquet").exists()
    words = (*other, "--nonnegative")
    assert call(*_fixed(words, refused(*words))).exit_code == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert call("account", "show", "--project", tmp_path).stdout.count("workload") == 1


def test_answers_of_another_workload_are_not_called_damaged(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    given = ("--project", tmp_path, "--cache", tmp_path / "cache", "--mechanism", "geometric",
             "--quiet", "--out", tmp_path / "out")  # fmt: skip
    one = write(tmp_path / "one.json", [{"factors": {"age": "identity", "sex": "identity"}}])
    assert call(*ANSWER, one, *given).exit_code == 0
    message = refused(*ANSWER, tmp_path / "asked.json", *given)
    assert "damaged" not in message
