"""``dpstream census`` as it is typed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.secret import new_secret
from tests.pipelines.cli.called import printed
from tests.pipelines.tabulation.office import SIZE, Office, office, project


def _run(*words: object) -> Result:
    return CliRunner().invoke(cli, ["census", *map(str, words)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Office:
    """An office that nobody changes, with a key beside it."""
    folder = tmp_path_factory.mktemp("office")
    new_secret(folder / "noise.secret")
    return office(folder, SIZE)


def of(folder: Path, made: Office, **given: Any) -> tuple[str, Path]:
    """The option that names a project file of an office, with the secret beside it."""
    secret = f"file:{made.parameters.parent / 'noise.secret'}"
    return "--project", project(folder, made, **({"secret": secret} | given))


def test_faults(made: Office, tmp_path: Path) -> None:
    right = _run("plan", "--faults", *of(tmp_path, made))
    assert (right.exit_code, right.stdout) == (0, "No fault.\n")
    listed = _run("plan", "--faults", *of(tmp_path, made), "--json")
    assert printed(listed.stdout) == {"faults": []}
    own = Office(tmp_path / "p", tmp_path / "d")
    for folder, copy in zip(made, own, strict=True):
        shutil.copytree(folder, copy)
    own.configure(reader="cef", max_race_codes=0)
    own.spoil("race-and-ethnicity-codes.txt", lambda lines: [*lines, lines[1]])
    secret = f"file:{made.data.parent / 'noise.secret'}"
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


def test_plan(made: Office, tmp_path: Path) -> None:
    given = of(tmp_path, made)
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


def test_execute_persons_and_then_households(made: Office, tmp_path: Path) -> None:
    given = of(tmp_path, made, limit=(30.0, 1e-9))
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

    homes = Office(made.parameters, tmp_path / "data")
    shutil.copytree(made.data, homes.data)
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


def test_a_moved_project_asks_the_same_question(made: Office, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "elsewhere" / "new"
    for folder in made:
        shutil.copytree(folder, old / folder.name)
    places = {folder.name: folder.name for folder in made}
    _, path = of(old, made, limit=(30.0, 1e-9), **places)
    first = printed(_run("execute", "--project", path, "--out", old / "out", "--json").stdout)
    shutil.move(old, new)
    command = "execute", "--project", new / path.name, "--out", new / "out", "--json"
    again = printed(_run(*command).stdout)
    assert (again["charged"], again["run_id"]) == (False, first["run_id"])

    (new / made.data.name).rename(new / "others")
    text = (new / path.name).read_text()
    (new / path.name).write_text(text.replace(f'data = "{made.data.name}"', 'data = "others"'))
    refused = _run(*command)
    assert refused.exit_code == 2 and "is not of this answer" in refused.stderr
    assert "a new charge" in refused.stderr


def test_exact_counts_are_announced(made: Office, tmp_path: Path) -> None:
    own = Office(tmp_path / "p", made.data)
    shutil.copytree(made.parameters, own.parameters)
    own.configure(privacy_budget_p_level_1_usa=float("inf"))
    given = of(tmp_path, own, secret=f"file:{made.data.parent / 'noise.secret'}")
    plan = printed(_run("plan", *given, "--json").stdout)
    assert plan["warnings"] and plan["guarantee"]["epsilon"] is None
    done = _run("execute", *given, "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    execution = printed(done.stdout)
    assert execution["epsilon"] is None and execution["warnings"] == plan["warnings"]
    (tmp_path / "out").rename(tmp_path / "first")
    again = _run("execute", *given, "--out", tmp_path / "out")
    assert again.exit_code == 0 and execution["warnings"][0] in again.stderr


def test_without_an_account_and_with_bad_records(made: Office, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(made.data, data)
    path = data / "person-records.txt"
    path.write_text(path.read_text() + "200|1|True|01|001|000100|1000" + "|01" * 10 + "\n")
    out, where = tmp_path / "out", ("--dead-letter", tmp_path / "letters")
    given = (*of(tmp_path, Office(made.parameters, data)), "--out", out)
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
    made: Office, tmp_path: Path, given: dict[str, Any], words: tuple[str, ...], field: str
) -> None:
    options = of(tmp_path, made, **given)
    before = sorted(tmp_path.iterdir())
    done = _run("execute", *options, "--out", tmp_path / "out", *words, "--json")
    assert done.exit_code in (2, 3), done.output
    assert field in printed(done.stderr.splitlines()[-1])["field"]
    assert sorted(tmp_path.iterdir()) == before
