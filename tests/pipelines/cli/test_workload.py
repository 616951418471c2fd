"""``dpstream workload`` as it is typed.

``dpstream workload answer`` as it is typed.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.secret import new_secret
from tests.pipelines.cli.called import call, printed, refused
from tests.pipelines.tabulation.office import SIZE, Office, office, project
from tests.pipelines.workload.survey import DOMAIN, JOB, survey, workload, write


def test_plan(tmp_path: Path) -> None:
    file, cache = write(tmp_path / "w.json"), ("--cache", tmp_path / "cache")
    done = call("workload", "plan", file, "--epsilon", "1", "--delta", "1e-8", *cache)
    assert done.exit_code == 0, done.output
    assert "Floor" in done.stdout and "gap" in done.stdout and "identity" in done.stdout
    outcome = call("workload", "plan", file, "--mu", "1", *cache, "--json",
                 "--picture", tmp_path / "p.png", "--matrix", tmp_path / "m.svg")  # fmt: skip
    plan = json.loads(outcome.stdout)
    assert (tmp_path / "m.svg").exists()
    assert plan["cached"] and plan["rmse"] >= plan["floor"] and (tmp_path / "p.png").exists()
    named = call("workload", "plan", file, "--mu", "1", *cache, "--strategy", "identity",
                 "--objective", "worst", "--json")  # fmt: skip
    assert json.loads(named.stdout)["strategy"] == "identity"


def test_a_section_has_the_budget_and_bound_of_its_job(tmp_path: Path) -> None:
    survey(tmp_path, 10, text=JOB.replace("contributions = 1", "contributions = 3"))
    with open(tmp_path / "dpstream.toml", "a") as file:
        file.write('[workload.ages]\nfile = "asked.json"\njob = "people"\n')
    cache = ("--cache", tmp_path / "cache", "--json")
    section = ("workload", "plan", "ages", "--project", tmp_path, *cache)
    budget = ("--epsilon", "6", "--delta", "1e-9")
    bare = ("workload", "plan", tmp_path / "asked.json", *cache)
    assert call(*section).exit_code == 0  # the strategy is in the cache then
    of_job, by_hand = call(*section), call(*bare, *budget, "--contributions", "3")
    plan = printed(of_job.stdout)
    accepted = plan.pop("acceptance")
    assert accepted["accepted"] and accepted["charged"] == {"epsilon": 6, "delta": 1e-9}
    without = printed(by_hand.stdout)
    warnings, of_budget = plan.pop("warnings"), without.pop("warnings")
    assert plan == without
    assert warnings[:-1] == of_budget and "the account's limit" in warnings[-1]
    other = ("--mu", "0.5", "--contributions", "1")
    assert printed(call(*section, *other).stdout) == printed(call(*bare, *other).stdout)


def test_a_plan_begins_as_the_dry_run_of_the_answer(tmp_path: Path) -> None:
    survey(tmp_path, 10)
    with open(tmp_path / "dpstream.toml", "a") as file:
        file.write('[workload.ages]\nfile = "asked.json"\njob = "people"\n')
    section = ("ages", "--project", tmp_path, "--cache", tmp_path / "cache")
    dry = call("workload", "answer", *section, "--dry-run")
    plan = call("workload", "plan", *section)
    assert dry.stdout.startswith("Can answer  yes: ") and "\nAccount     " in dry.stdout
    assert plan.stdout.splitlines()[:2] == dry.stdout.splitlines()[:2]

    text = (tmp_path / "dpstream.toml").read_text()
    (tmp_path / "dpstream.toml").write_text(text.replace('key = ["sex"', 'key = ["sx"'))
    plan = call("workload", "plan", *section)
    assert plan.exit_code == 2 and "Can answer  NO. key: names sx; " in plan.stdout
    assert "\nFloor" in plan.stdout


def test_pure(tmp_path: Path) -> None:
    file = write(tmp_path / "w.json", [{"factors": {"age": "range"}}])
    cache = ("--cache", tmp_path / "cache")
    outcome = call(
        "workload", "plan", file, "--epsilon", "1", "--mechanism=geometric", *cache, "--json"
    )
    plan = json.loads(outcome.stdout)
    text = call("workload", "plan", file, "--epsilon", "1", "--mechanism=geometric", *cache).stdout
    assert f"{plan['rmse']:.6g}" in text and f"{plan['floor']:.6g}" in text
    assert plan["floor"] < plan["rmse"]
    [product] = plan["products"]
    assert product["least"] < product["rmse"] < product["most"] and plan["half_width"] > 2.15
    given = ("workload", "plan", file, "--mechanism=geometric")
    assert "--mechanism" in refused(*given, "--mu", "1")
    for more in (("--strategy", "identity"), ("--objective", "worst"), ("--matrix", "m.png")):
        assert "--mechanism" in refused(*given, "--epsilon", "1", *more)


def test_delta_of_zero_is_geometric_noise(tmp_path: Path) -> None:
    ranges, cache = [{"factors": {"age": "range"}}], ("--cache", tmp_path / "cache")
    given = ("workload", "plan", write(tmp_path / "w.json", ranges), "--epsilon", "1", *cache)
    left_out = call(*given).stdout
    flags: tuple[tuple[str, ...], ...] = ((), ("--mechanism=geometric",))
    for more in flags:
        done = call(*given, "--delta", "0", *more)
        assert done.exit_code == 0 and done.stdout == left_out
    assert "--mechanism" in refused(*given, "--delta", "0", "--strategy", "identity")
    flags = (("--mechanism=gaussian",), ("--mechanism=gaussian", "--matrix", "m.png"))
    for more in flags:
        assert "--delta" in refused(*given, "--delta", "0", *more)


def test_refused(tmp_path: Path) -> None:
    file, cache = write(tmp_path / "w.json"), ("--cache", tmp_path / "cache")
    assert "--epsilon" in refused("workload", "plan", file, *cache)
    assert "budget" in refused("workload", "plan", file, "--mu", "0", *cache)
    (tmp_path / "e.json").write_text('{"domain": [], "queries": []}')
    assert "domain" in refused("workload", "plan", tmp_path / "e.json", "--mu", "1")


def test_a_union_without_a_delta_is_refused_and_answered_as_the_fix_says(tmp_path: Path) -> None:
    """In plan by the flag, in an answer by the job; or one product of it."""
    two_way = [{"ways": 2}, {"ways": 1}]
    file, cache = write(tmp_path / "w.json", two_way), ("--cache", tmp_path / "cache")
    given = ("workload", "plan", file, "--epsilon", "1", *cache)
    fixed = call(*given, "--delta", "1e-9")
    assert fixed.exit_code == 0, fixed.output
    for more in (("--delta", "0"), ("--mechanism=geometric",)):
        text = refused(*given, *more)
        assert "2-way" in text and "--delta 1e-9" in text and "budget.delta = 1e-9" in text
    survey(tmp_path, 100)
    project = tmp_path / "dpstream.toml"
    project.write_text(project.read_text().replace("delta = 1e-9", "delta = 0"))
    answer = ("workload", "answer", file, "--project", tmp_path, *cache, "--quiet")
    assert "budget.delta = 1e-9" in refused(*answer, "--out", tmp_path / "out")
    one = write(tmp_path / "one.json", two_way[:1])
    alone = call("workload", "answer", one, *answer[3:], "--out", tmp_path / "one")
    assert alone.exit_code == 0, alone.output
    project.write_text(project.read_text().replace("delta = 0", "delta = 1e-9"))
    done = call(*answer, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output


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
    for flags in (("--over-time",), ("--runner", "PrismRunner"), ("--streaming",)):
        assert flags[0].replace("--streaming", "--runner") in refused(
            *given, "--out", made / "w", *flags
        )
    assert call("account", "show", "--project", made).stdout == before
    assert not (made / "w").exists()


def test_what_an_answer_refuses(made: Path, tmp_path: Path) -> None:
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


# ``dpstream census`` as it is typed.


def _run(*words: object) -> Result:
    return CliRunner().invoke(cli, ["census", *map(str, words)])


@pytest.fixture(scope="module")
def made_census(tmp_path_factory: pytest.TempPathFactory) -> Office:
    """An office that nobody changes, with a key beside it."""
    folder = tmp_path_factory.mktemp("office")
    new_secret(folder / "noise.secret")
    return office(folder, SIZE)


def of(folder: Path, made_census: Office, **given: Any) -> tuple[str, Path]:
    """The option that names a project file of an office, with the secret beside it."""
    secret = f"file:{made_census.parameters.parent / 'noise.secret'}"
    return "--project", project(folder, made_census, **({"secret": secret} | given))


def test_faults(made_census: Office, tmp_path: Path) -> None:
    right = _run("plan", "--faults", *of(tmp_path, made_census))
    assert (right.exit_code, right.stdout) == (0, "No fault.\n")
    listed = _run("plan", "--faults", *of(tmp_path, made_census), "--json")
    assert printed(listed.stdout) == {"faults": []}
    own = Office(tmp_path / "p", tmp_path / "d")
    for folder, copy in zip(made_census, own, strict=True):
        shutil.copytree(folder, copy)
    own.configure(reader="cef", max_race_codes=0)
    own.spoil("race-and-ethnicity-codes.txt", lambda lines: [*lines, lines[1]])
    secret = f"file:{made_census.data.parent / 'noise.secret'}"
    given = of(tmp_path, own, secret=secret)
    wrong = _run("plan", "--faults", *given)
    assert wrong.exit_code == 2 and wrong.stdout.count("\n") == 4
    assert "config.json, reader: is not csv" in wrong.stdout
    assert "race-and-ethnicity-codes.txt, row 29, RACE_ETH_CODE: is there before" in wrong.stdout
    listed = _run("plan", "--faults", *given, "--json")
    faults = printed(listed.stdout)["faults"]
    assert listed.exit_code == 2 and len(faults) == 3
    assert set(faults[0]) == {"file", "row", "column", "rule", "fix"}
    refused = _run("execute", *given, "--out", tmp_path / "out")
    assert refused.exit_code == 2 and "(3 faults)" in refused.stderr
    assert not (tmp_path / "out").exists()
    mixed = of(tmp_path, own, program="h", estimates="combined")
    assert _run("plan", "--faults", *mixed).exit_code == 2


@pytest.mark.parametrize(("program", "unit"), [("p", "person"), ("h", "household")])
@pytest.mark.parametrize("command", ["plan", "execute"])
def test_a_data_set_without_a_unit_is_refused_first(
    command: str, program: str, unit: str, tmp_path: Path
) -> None:
    """Before the secret, the account and any file, none of which is there; the fix works."""
    absent = Office(tmp_path / "parameters", tmp_path / "data")
    _, path = of(tmp_path, absent, program=program)
    line = '\nunit = { name = "person" }'
    assert line in path.read_text()
    path.write_text(path.read_text().replace(line, '\naccount = { path = "persons.account.db" }'))
    outcome = _run(command, "--project", path)
    assert outcome.exit_code == 2
    fix = f'unit = {{ name = "{unit}", type = "string" }}'
    assert outcome.stderr == (
        "usage: data_set.persons.unit: is required by census tables. "
        f"Fix: add {fix} to [data_set.persons].\n"
    )
    path.write_text(
        path.read_text().replace("[data_set.persons]\n", f"[data_set.persons]\n{fix}\n")
    )
    after = _run(command, "--project", path)
    assert after.exit_code == 2 and "data_set.persons.account.id" in after.stderr


def test_plan_of_census(made_census: Office, tmp_path: Path) -> None:
    given = of(tmp_path, made_census)
    outcome = _run("plan", *given)
    assert outcome.exit_code == 0, outcome.output
    assert "Groups      593 in 19 levels" in outcome.stdout
    rounded = ("--try", "census.persons.noise=rounded")
    figures = printed(_run("plan", *given, "--json", *rounded).stdout)
    assert figures["noise"] == "rounded gauss" and figures["guarantee"]["mu"] < 3.2
    strict = printed(_run("plan", *given, "--json", "--delta", 1e-15).stdout)
    assert strict["guarantee"]["epsilon"] > 25.4 and strict["guarantee"]["delta"] == 1e-15
    assert _run("plan", *given, "--delta", 2).exit_code == 2
    both = ("--try", "census.persons.program=h", "--try", "census.persons.estimates=combined")
    assert _run("plan", *given, *both).exit_code == 2


def test_execute_persons_and_then_households(made_census: Office, tmp_path: Path) -> None:
    given = of(tmp_path, made_census, limit=(30.0, 1e-9))
    command = ("execute", *given, "--out", tmp_path / "out")
    done = _run(*command)
    assert done.exit_code == 0, done.output
    assert "Charged (25.3629, 1e-10) of every record" in done.stderr
    first = sorted((tmp_path / "out" / "t1").iterdir())
    assert first and first[0].read_text().startswith("REGION_ID|REGION_TYPE|ITERATION_CODE|COUNT")
    again = printed(_run(*command, "--json").stdout)
    assert (again["charged"], again["drawn"]) == (False, False)
    more = _run("execute", *given, "--out", tmp_path / "second", "--fresh")
    assert more.exit_code == 3 and not (tmp_path / "second").exists()

    homes = Office(made_census.parameters, tmp_path / "data")
    shutil.copytree(made_census.data, homes.data)
    shutil.copytree(tmp_path / "out" / "t1", homes.data / "pop-group-totals.txt")
    assert _run("plan", "--faults", *of(tmp_path, homes, program="h")).exit_code == 0
    # A household is no person: they have an account of their own.
    unlike = of(tmp_path, homes, program="h", limit=(60.0, 1e-9))
    assert _run("execute", *unlike, "--out", tmp_path / "h").exit_code == 3
    own = of(tmp_path, homes, name="households", program="h", limit=(60.0, 1e-9), id_="0" * 16)
    done = _run("execute", *own, "--out", tmp_path / "h", "--json")
    assert done.exit_code == 0, done.output
    assert printed(done.stdout)["charged"] is True
    written = sorted(path.name for path in (tmp_path / "h").iterdir())
    assert written == ["manifest.json", "margins", "t3", "t4"]


def test_a_moved_project_asks_the_same_question(made_census: Office, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "elsewhere" / "new"
    for folder in made_census:
        shutil.copytree(folder, old / folder.name)
    places = {folder.name: folder.name for folder in made_census}
    _, path = of(old, made_census, limit=(30.0, 1e-9), **places)
    first = printed(_run("execute", "--project", path, "--out", old / "out", "--json").stdout)
    shutil.move(old, new)
    command = "execute", "--project", new / path.name, "--out", new / "out", "--json"
    again = printed(_run(*command).stdout)
    assert (again["charged"], again["run_id"]) == (False, first["run_id"])

    (new / made_census.data.name).rename(new / "others")
    text = (new / path.name).read_text()
    (new / path.name).write_text(
        text.replace(f'data = "{made_census.data.name}"', 'data = "others"')
    )
    refused = _run(*command)
    assert refused.exit_code == 2 and "is not of this answer" in refused.stderr
    assert "a new charge" in refused.stderr


def test_exact_counts_are_announced(made_census: Office, tmp_path: Path) -> None:
    own = Office(tmp_path / "p", made_census.data)
    shutil.copytree(made_census.parameters, own.parameters)
    own.configure(privacy_budget_p_level_1_usa=float("inf"))
    given = of(tmp_path, own, secret=f"file:{made_census.data.parent / 'noise.secret'}")
    plan = printed(_run("plan", *given, "--json").stdout)
    assert plan["warnings"] and plan["guarantee"]["epsilon"] is None
    done = _run("execute", *given, "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    execution = printed(done.stdout)
    assert execution["epsilon"] is None and execution["warnings"] == plan["warnings"]
    (tmp_path / "out").rename(tmp_path / "first")
    again = _run("execute", *given, "--out", tmp_path / "out")
    assert again.exit_code == 0 and execution["warnings"][0] in again.stderr


def test_without_an_account_and_with_bad_records(made_census: Office, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(made_census.data, data)
    path = data / "person-records.txt"
    path.write_text(path.read_text() + "200|1|True|01|001|000100|1000" + "|01" * 10 + "\n")
    out, where = tmp_path / "out", ("--dead-letter", tmp_path / "letters")
    given = (*of(tmp_path, Office(made_census.parameters, data)), "--out", out)
    strict = _run("execute", *given, "--strict")
    assert strict.exit_code == 3 and "depends on the data" in strict.stderr
    assert not out.exists()
    done = _run("execute", *given, *where, "--operator")
    assert done.exit_code == 0, done.output
    assert "no account" in done.stderr and "Costs (25.3629, 1e-10)" in done.stderr
    assert str(tmp_path / "letters") in done.stderr and "letters" not in done.stdout
    [letters] = (tmp_path / "letters").iterdir()
    assert letters.suffix == ".parquet"


@pytest.mark.parametrize(
    ("given", "words", "field"),
    [
        ({"secret": None}, (), "secret"),
        ({"secret": "elsewhere:B"}, (), "secret"),
        ({"secret": "env:NO_SUCH_KEY"}, (), "secret"),
        ({"noise": "gauss"}, (), "census.persons.noise"),
        ({"data_set": "homes"}, (), "census.persons.data_set"),
        ({}, ("homes",), "census"),
        ({}, ("--parallelism", "4"), "--runner"),
        ({}, ("--runner", "SparkRunner"), "--runner"),
    ],
)
def test_what_is_wrong_is_named(
    made_census: Office,
    tmp_path: Path,
    given: dict[str, Any],
    words: tuple[str, ...],
    field: str,
) -> None:
    options = of(tmp_path, made_census, **given)
    before = sorted(tmp_path.iterdir())
    done = _run("execute", *options, "--out", tmp_path / "out", *words, "--json")
    assert done.exit_code in (2, 3), done.output
    assert field in printed(done.stderr.splitlines()[-1])["field"]
    assert sorted(tmp_path.iterdir()) == before
