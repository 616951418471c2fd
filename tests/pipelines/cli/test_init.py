"""``dpstream init``: a job that plans as it stands, a secret, the next command; no value shown."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.job import load_job
from tests.pipelines.cli.called import call, printed, refused
from tests.pipelines.drafting import FLAGS, SECRET, commits


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the current folder."""
    monkeypatch.chdir(tmp_path)
    return commits(Path("commits.parquet"))


def test_a_job_that_plans_as_it_stands(data: Path) -> None:
    value = ("--value", "lines", "--bounds", "-5", "100", "--key", "sha")
    outcome = call("init", data, *FLAGS, *value)
    assert outcome.exit_code == 0 and SECRET not in outcome.output
    following = shlex.split(outcome.output.splitlines()[-1].removeprefix("Next"))
    assert following == ["dpstream", "check", "commits"]
    assert call(*following[1:], "--json").exit_code in (0, 2)  # it reads the records
    planned = call("plan", "commits", "--json")
    assert planned.exit_code == 0, planned.output
    assert Path("commits.secret").stat().st_mode & 0o777 == 0o600
    text = Path("dpstream.toml").read_text()
    assert SECRET not in text and "bounds = [-5, 100]" in text


def covered(job: str = "commits") -> object:
    return tomllib.loads(Path("dpstream.toml").read_text())["job"][job]["budget"]["covers"]


def test_what_the_budget_covers(data: Path) -> None:
    """Nobody chose: each window, which is noted; or as the flag says."""
    days = (*FLAGS, "--window", "day", "--json", "--data-set", "commits")
    chosen = json.loads(call("init", data, *days).stdout)
    assert (chosen["covers"], covered()) == ("1d", "window") and "--covers" in chosen["notes"][0]
    for i, (covers, length) in enumerate(
        {"window": "1d", "lifetime": "lifetime", "28d": "28d"}.items()
    ):
        done = json.loads(call("init", data, *days, "--covers", covers, "--job", f"j{i}").stdout)
        assert (done["covers"], covered(f"j{i}")) == (length, covers)
        planned = call("plan", f"j{i}", "--json")
        assert planned.exit_code == (3 if covers == "lifetime" else 0)
        if planned.exit_code:  # the account is per day: a person's day can be a part of more
            fix = json.loads(planned.stdout)["acceptance"]["refusal"]["fix"]
            raised = re.search(r"`dpstream (account limit [^`]*)`", fix)
            assert raised is not None and call(*raised[1].split()).exit_code == 0
            assert call("plan", f"j{i}").exit_code == 0
    assert "--covers" in refused("init", data, *days, "--covers", "36h", "--job", "no")
    long = ("--window", "100000d", "--data-set", "commits", "--job", "long", "--json")
    one = json.loads(call("init", data, *FLAGS, *long).stdout)
    assert (one["covers"], covered("long")) == ("lifetime", "lifetime")


def test_for_machines_and_twice(data: Path) -> None:
    """A second job of the file is added, in the same data set or in a new one."""
    first = json.loads(call("init", data, *FLAGS, "--json").stdout)
    assert first["job"] == "commits" and first["secret_made"] and not first["values_read"]
    again = ("init", data, *FLAGS, "--json")
    before = Path("dpstream.toml").read_text()
    fix = json.loads(refused(*again))
    assert fix["field"] == "--job" and "--job commits2" in fix["fix"]
    other = data.with_name(f"other{data.suffix}")
    other.write_bytes(data.read_bytes())
    error = json.loads(refused("init", other, "--job", "b", *FLAGS, "--json"))
    assert error["field"] == "--data-set"
    assert "add --data-set commits for the same people" in error["fix"]
    assert Path("dpstream.toml").read_text() == before
    second = json.loads(call(*again, "--job", "b").stdout)  # the same file and unit
    assert second["next"] == "dpstream check b" and second["account"] is None
    assert second["table"] == "commits" and not second["secret_made"]
    others = (*again, "--job", "c", "--data-set", "others")
    error = json.loads(refused(*others))  # a second budget of the same people, by a slip perhaps
    assert error["field"] == "--data-set" and "--data-set commits" in error["fix"]
    third = json.loads(call(*others, "--new-account").stdout)
    assert third["secret_made"] and third["account"]["id"] != first["account"]["id"]
    assert third["table"] == "commits2"
    text = Path("dpstream.toml").read_text()
    assert text.startswith(before) and all(call("plan", job).exit_code == 0 for job in "bc")
    assert json.loads(refused(*again, "--job", "d", "--data-set", "commits", "--secret", "x"))[
        "field"] == "--secret"  # fmt: skip


ROWS = "user,page,at,seconds,Note,in words,with.dots,twice,Twice\n" + "".join(
    f"u{i},p{i % 2},2024-01-01T0{i % 9}:00:00Z,{i % 60}.5,x,z,y,1,2\n" for i in range(600)
)
ROLES = ("--unit", "user", "--key", "page", "--time", "at")
VISITS = (
    *(*ROLES, "--value", "seconds", "--bounds", "0"),
    *("60", "--start", "2024-01-01", "--end", "2024-01-03", "--window", "day", "--epsilon", "9"),
)
TYPES = {"user": "STRING", "page": "STRING", "at": "TIMESTAMP", "seconds": "FLOAT64"}
QUESTION = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 8, max_groups_contributed = 2, "
    "delta = 1e-9) page, COUNT(*) AS n, AVG(seconds, contribution_bounds_per_row => (0, 60)) AS s "
    "FROM web_visits WHERE at < TIMESTAMP '2024-01-02 00:00:00+00' GROUP BY page"
)


def test_an_answered_statement_on_parquet_does_not_open_it(data: Path) -> None:
    """Its columns are in the project file: a removed or damaged file is not noticed."""
    assert call("init", data, *FLAGS).exit_code == 0
    statement = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 0.1) COUNT(*) AS n FROM commits"
    first = call("sql", statement)
    assert first.exit_code == 0, first.output
    table = data.read_bytes()
    for content in (table[:-9], b"", None):
        data.unlink() if content is None else data.write_bytes(content)
        again = call("sql", statement)
        assert (again.exit_code, again.stdout) == (0, first.stdout), again.output


def columns_of(table: str = "web_visits") -> object:
    project = tomllib.loads(Path("dpstream.toml").read_text())
    return project["table"][table].get("columns")


def test_a_first_question_in_sql_needs_no_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types follow from the flags, never from a row; a name with a hyphen is no SQL."""
    monkeypatch.chdir(tmp_path)
    Path("web-visits.csv").write_text(ROWS)
    done = call("init", "web-visits.csv", *VISITS)
    assert done.exit_code == 0, done.output
    others = dict.fromkeys(("Note", "in words", "with.dots"), "STRING")
    assert columns_of() == TYPES | others
    answer = call("sql", QUESTION, "--json")
    assert answer.exit_code == 0, answer.output
    assert "p0" in answer.stdout and "p1" in answer.stdout
    of_dots = QUESTION.replace(" page, COUNT", " `with.dots` AS page, COUNT").replace("8", "0.5", 1)
    answer = call("sql", of_dots, "--json")
    assert answer.exit_code == 0, answer.output
    assert '"y"' in answer.stdout and "p0" not in answer.stdout


@pytest.mark.parametrize("public", [False, True])
def test_json_lines_have_the_columns_of_flags_or_of_a_public_sample(
    public: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names, *rows = (line.split(",") for line in ROWS.splitlines())
    lines = (json.dumps(dict(zip(names[:5], row[:5], strict=True))) for row in rows)
    Path("web-visits.jsonl").write_text("\n".join(lines) + "\n")
    flags = ["--public-sample"] if public else []
    assert call("init", "web-visits.jsonl", *VISITS, *flags).exit_code == 0
    assert columns_of() == TYPES | ({"Note": "STRING"} if public else {})
    answer = call("sql", QUESTION, "--json")
    assert answer.exit_code == 0 and len(printed(answer.stdout)["rows"]) == 2, answer.output


def test_columns_that_no_statement_can_name(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("init", data, *FLAGS).exit_code == 0
    many = ",".join(f"c{i}" for i in range(1100))
    Path("many.csv").write_text(f"user,page,at,seconds,{many}\n")
    assert call("init", "many.csv", *VISITS, "--new-account").exit_code == 2
    flags = (*VISITS, "--data-set", "many", "--new-account")
    assert call("init", "many.csv", *flags).exit_code == 0 and columns_of("many") == TYPES
    Path("odd.csv").write_text("the:user,the:page,the:time\n")
    odd = ("--unit", "the:user", "--key", "the:page", "--time", "the:time", *VISITS[11:])
    done = call("init", "odd.csv", *odd, "--data-set", "odd", "--new-account")
    assert done.exit_code == 0 and columns_of("odd") is None, done.output


def test_nobody_to_ask(data: Path) -> None:
    message = refused("init", data)
    assert (
        "--unit, --key, --time, --start, --end, --epsilon: are" in message
        and "one of: sha, author, path" in message
    )
    assert not Path("dpstream.toml").exists() and not Path("commits.secret").exists()


def test_a_terminal_is_asked_and_machines_are_not(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "\n".join(("author", "path", "when", "2023-01-01", "2024-01-01", "week", "1", "28d"))
    monkeypatch.setattr("dpstream.pipelines.cli.init.on_terminal", lambda: True)
    assert json.loads(refused("init", data, "--json"))["field"].startswith("--unit, ")
    outcome = CliRunner().invoke(cli, ["init", str(data)], input=f"{typed}\n")
    assert outcome.exit_code == 0 and "of 7d from 2022-12-26" in outcome.output, outcome.output
    assert covered() == "28d"


def test_a_pattern_and_a_public_sample(data: Path) -> None:
    given = (*FLAGS[:6], "--epsilon", "1", "--public-sample", "--value", "lines")
    outcome = call("init", "*.parquet", *given)
    assert outcome.exit_code == 0, outcome.output
    assert "only the first was looked at" in outcome.output and "values were read" in outcome.output
    assert (
        'path = "*.parquet"' in Path("dpstream.toml").read_text() and SECRET not in outcome.output
    )
    assert load_job().plan.timeline.triggers == 2  # what comes later counts in one more release


def test_a_pattern_with_a_day_in_its_names_expects_each_day(data: Path) -> None:
    day = Path("raw/date=2023-01-02")
    day.mkdir(parents=True)
    data.rename(day / "a.parquet")
    assert call("init", "raw/date=*/*.parquet", *FLAGS).exit_code == 0
    job = load_job()
    assert job.plan.timeline.triggers == 1 and job.expectation is not None
    assert job.expectation.text == "raw/date={day}/*.parquet"
