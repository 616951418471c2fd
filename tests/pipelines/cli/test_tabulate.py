"""``dpstream tabulate`` as it is typed."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.noise_key import new_key
from tests import accounts
from tests.pipelines.tabulation.office import SIZE, Office, office

LEDGER = ("--data-set", "persons", "--account-id", accounts.ID)


def _run(*words: object) -> Result:
    return CliRunner().invoke(cli, ["tabulate", *map(str, words)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Office:
    """An office that nobody changes, with a key beside it."""
    folder = tmp_path_factory.mktemp("office")
    new_key(folder / "noise.key")
    return office(folder, SIZE)


def key_of(made: Office) -> tuple[str, Path]:
    return "--key-file", made.data.parent / "noise.key"


def test_generate(made: Office, tmp_path: Path) -> None:
    own = Office(tmp_path / "p", tmp_path / "d")
    done = _run("generate", *own, "--persons", 300, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"]["person-records.txt"] == 300
    for folder, other in zip(own, made, strict=True):
        for path in other.iterdir():
            assert (folder / path.name).read_bytes() == path.read_bytes()
    again = _run("generate", *own, "--persons", 300)
    assert again.exit_code == 2 and "exists" in again.stderr
    outcome = _run("generate", *own, "--states", "01", "--tracts", 2, "--seed", 1, "--overwrite")
    assert outcome.exit_code == 0 and "10,000  person-records.txt" in outcome.stdout
    assert _run("generate", *own, "--states", "1").exit_code == 2


def test_validate(made: Office, tmp_path: Path) -> None:
    right = _run("validate", *made)
    assert (right.exit_code, right.stdout) == (0, "No fault.\n")
    assert json.loads(_run("validate", *made, "--json").stdout) == {"faults": []}
    own = Office(tmp_path / "p", tmp_path / "d")
    for folder, copy in zip(made, own, strict=True):
        shutil.copytree(folder, copy)
    own.configure(reader="cef", max_race_codes=0)
    own.spoil("race-and-ethnicity-codes.txt", lambda lines: [*lines, lines[1]])
    wrong = _run("validate", *own)
    assert wrong.exit_code == 2 and wrong.stdout.count("\n") == 4
    assert "config.json, reader: is not csv" in wrong.stdout
    assert "race-and-ethnicity-codes.txt, row 29, RACE_ETH_CODE: is there before" in wrong.stdout
    listed = _run("validate", *own, "--json")
    faults = json.loads(listed.stdout)["faults"]
    assert listed.exit_code == 2 and len(faults) == 3
    assert set(faults[0]) == {"file", "row", "column", "rule", "fix"}
    assert _run("validate", *own, "--program", "h", "--estimates", "combined").exit_code == 2
    refused = _run("execute", *own, tmp_path / "out", *key_of(made))
    assert refused.exit_code == 2 and "(3 faults)" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_plan(made: Office) -> None:
    outcome = _run("plan", *made, "--scale", 331_000_000)
    assert outcome.exit_code == 0, outcome.output
    assert "Groups      593 in 19 levels" in outcome.stdout and "331,000,000" in outcome.stdout
    figures = json.loads(_run("plan", *made, "--json", "--noise", "rounded").stdout)
    assert figures["noise"] == "rounded gauss" and figures["guarantee"]["mu"] < 3.2
    strict = json.loads(_run("plan", *made, "--json", "--delta", 1e-15).stdout)
    assert strict["guarantee"]["epsilon"] > 25.4 and strict["guarantee"]["delta"] == 1e-15
    assert _run("plan", *made, "--delta", 2).exit_code == 2
    assert _run("plan", *made, "--program", "h", "--estimates", "combined").exit_code == 2


def test_execute_persons_and_then_households(made: Office, tmp_path: Path) -> None:
    accounts.create(tmp_path / "ledger.db", "persons", (30.0, 1e-9), "person")
    other = "0" * 16
    accounts.create(tmp_path / "homes.db", "households", (60.0, 1e-9), "household", id_=other)
    ledger = ("--ledger", tmp_path / "ledger.db", *LEDGER)
    command = ("execute", *made, tmp_path / "out", *key_of(made), *ledger)
    done = _run(*command)
    assert done.exit_code == 0, done.output
    assert "Charged (25.3629, 1e-10) of every record" in done.stderr
    first = sorted((tmp_path / "out" / "t1").iterdir())
    assert first and first[0].read_text().startswith("REGION_ID|REGION_TYPE|ITERATION_CODE|COUNT")
    again = json.loads(_run(*command, "--json").stdout)
    assert (again["charged"], again["drawn"]) == (False, False)
    more = _run("execute", *made, tmp_path / "second", *key_of(made), *ledger, "--fresh")
    assert more.exit_code == 3 and not (tmp_path / "second").exists()

    data = tmp_path / "data"
    shutil.copytree(made.data, data)
    shutil.copytree(tmp_path / "out" / "t1", data / "pop-group-totals.txt")
    assert _run("validate", made.parameters, data, "--program", "h").exit_code == 0
    homes = ("--program", "h", "--ledger", tmp_path / "ledger.db", *LEDGER)
    unlike = _run("execute", made.parameters, data, tmp_path / "h", *key_of(made), *homes)
    assert unlike.exit_code == 3  # a household is no person: they have an account of their own
    swap = {
        "persons": "households",
        accounts.ID: other,
        tmp_path / "ledger.db": tmp_path / "homes.db",
    }
    own = [swap.get(word, word) for word in homes]
    done = _run("execute", made.parameters, data, tmp_path / "h", *key_of(made), *own, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["charged"] is True
    written = sorted(path.name for path in (tmp_path / "h").iterdir())
    assert written == ["manifest.json", "margins", "t3", "t4"]


def test_exact_counts_are_announced(made: Office, tmp_path: Path) -> None:
    own = Office(tmp_path / "p", made.data)
    shutil.copytree(made.parameters, own.parameters)
    own.configure(privacy_budget_p_level_1_usa=float("inf"))
    plan = json.loads(_run("plan", *own, "--json").stdout)
    assert plan["warnings"] and plan["guarantee"]["epsilon"] is None
    done = _run("execute", *own, tmp_path / "out", *key_of(made), "--json")
    assert done.exit_code == 0, done.output
    execution = json.loads(done.stdout)
    assert execution["epsilon"] is None and execution["warnings"] == plan["warnings"]
    (tmp_path / "out").rename(tmp_path / "first")
    again = _run("execute", *own, tmp_path / "out", *key_of(made))
    assert again.exit_code == 0 and execution["warnings"][0] in again.stderr


def test_report(made: Office, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _run("execute", *made, out, *key_of(made)).exit_code == 0
    done = _run("report", *made, tmp_path / "report", "--run", out)
    assert done.exit_code == 0, done.output
    assert "NOT private" in done.stderr and "open report.html" in done.stdout
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names >= {"error_report.csv", "multi_run_error_report.csv", "report.html"}
    figures = json.loads(_run("report", *made, tmp_path / "r", "--run", out, "--json").stdout)
    assert figures["stamp"].startswith("PUBLIC DATA ONLY")
    other = _run("report", *made, tmp_path / "x", "--run", out, "--noise", "rounded")
    assert other.exit_code == 2 and not (tmp_path / "x").exists()


def test_without_a_ledger_and_with_bad_records(made: Office, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(made.data, data)
    path = data / "person-records.txt"
    path.write_text(path.read_text() + "200|1|True|01|001|000100|1000" + "|01" * 10 + "\n")
    out, where = tmp_path / "out", ("--dead-letter", tmp_path / "letters")
    strict = _run("execute", made.parameters, data, out, *key_of(made), "--strict")
    assert strict.exit_code == 3 and "depends on the data" in strict.stderr
    assert not out.exists()
    done = _run("execute", made.parameters, data, out, *key_of(made), *where, "--operator")
    assert done.exit_code == 0, done.output
    assert "no --ledger" in done.stderr and "Costs (25.3629, 1e-10)" in done.stderr
    assert str(tmp_path / "letters") in done.stderr and "letters" not in done.stdout
    [letters] = (tmp_path / "letters").iterdir()
    assert letters.suffix == ".parquet"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ((), "--key-file"),
        (("--key-file", "a", "--key", "env:B"), "--key-file"),
        (("--key", "elsewhere:B"), "secret"),
        (("--key", "env:B", "--ledger", "l.db"), "--data-set"),
        (("--key", "env:B", "--limit-delta", "1e-9"), "--limit-epsilon"),
        (("--key", "env:B", "--ledger", "l.db", "--data-set", "d"), "--account-id"),
        (("--key", "env:B", "--ledger", "l.db", "--data-set", "", "--account-id", accounts.ID),
         "data_set"),
        (("--key", "env:B", "--ledger", "l.db", "--data-set", "d", "--account-id", "7"),
         "account.id"),
        (("--key", "env:B", "--ledger", "l.db", "--data-set", "d", "--account-id", accounts.ID,
          "--limit-epsilon", "1"), "--limit-epsilon"),
        (("--key", "env:B", "--parallelism", "4"), "--runner"),
        (("--key", "env:B", "--runner", "SparkRunner"), "--runner"),
        (("--key", "env:NO_SUCH_KEY"), "secret"),
    ],
)  # fmt: skip
def test_options_that_are_wrong(
    made: Office, tmp_path: Path, words: tuple[str, ...], field: str
) -> None:
    done = _run("execute", *made, tmp_path / "out", *words, "--json")
    assert done.exit_code in (2, 3), done.output
    assert field in json.loads(done.stderr.splitlines()[-1])["field"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["", "validate", "plan", "execute", "report", "generate"])
def test_help(command: str) -> None:
    done = _run(*command.split(), "--help")
    assert done.exit_code == 0 and ("Examples" in done.stdout) == bool(command)
