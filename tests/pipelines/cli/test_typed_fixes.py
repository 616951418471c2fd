"""Commands and options that a fix names, typed as printed: they do what the fix promises."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpstream.state import open as stores
from tests import accounts
from tests.golden.pinned import check, of_cases
from tests.pipelines.cli import called as sessions
from tests.pipelines.cli.called import call
from tests.pipelines.cli.mistakes import PROJECT, Hour, visits, with_account
from tests.pipelines.cli.test_init import ROLES, ROWS
from tests.pipelines.cli.test_plans_and_charges import census
from tests.pipelines.sql.asking import dp
from tests.pipelines.tables.test_registration import shop_files
from tests.pipelines.tabulation.office import office, project

GOLDEN = Path(__file__).parents[2] / "golden"
PAGES = json.dumps(
    {
        "domain": [{"name": "page", "values": ["p0", "p1"]}],
        "queries": [{"factors": {"page": "identity"}}],
    }
)


@pytest.fixture
def hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hour]:
    monkeypatch.chdir(tmp_path)  # where a user stands: the fixes name files of this folder
    yield Hour(tmp_path)
    stores.close_all()


def commands_of(text: str) -> list[list[str]]:
    """The commands between backticks of the fixes of a message, as words behind ``dpstream``."""
    fixes = " ".join(re.findall(r"Fix: .*", text))
    return [shlex.split(line) for line in re.findall(r"`dpstream ([^`]*)`", fixes)]


WORDS = (
    *("run -x", "run -x=3", "run daily --x=3", "run daily word", "run --streaming word"),
    *("run --direct_num_workers=many", "run --operater-report F", "run --job-name=x"),
    *("workload answer pages.json -x", "workload answer pages.json word", "run --runer Prism"),
)


def test_what_is_no_flag_is_refused_before_a_charge(hour: Hour) -> None:
    Path("pages.json").write_text(PAGES)
    files = {*hour.folder.rglob("*")}
    texts = {words: call(*shlex.split(words)).output for words in WORDS}
    check(GOLDEN / "flags.txt", of_cases(texts))
    assert {*hour.folder.rglob("*")} == files


def test_numbers_that_are_written_with_commas(hour: Hour) -> None:
    visits().to_pandas().to_csv("visits.csv", sep=";", decimal=",", index=False)
    hour.edit('path = "visits.parquet"', 'path = "visits.csv"\ncsv = { delimiter = ";" }')
    signs = re.findall(r"csv = \{ (decimal = .*?) \}", call("check").output)
    hour.edit('delimiter = ";"', f'delimiter = ";", {signs[0]}')
    assert call("check").exit_code == 0


def test_zones_of_times_and_of_windows_that_differ(hour: Hour) -> None:
    hour.edit('time_column = "at"', 'time_column = { column = "at", zone = "Europe/Berlin" }')
    hour.edit('T00:00:00Z"\nwindow', "T00:00:00Z\"\ncalendar = 'UTC'\nwindow")
    differ = json.loads(call("plan", "--json").stdout)["warnings"]
    hour.edit("Europe/Berlin", "UTC")
    assert len(differ) == len(json.loads(call("plan", "--json").stdout)["warnings"]) + 1


@pytest.mark.parametrize(("covers", "months"), [("1 quarter", 3), ("2 quarters", 6)])
def test_a_quarter_of_an_account_begins_with_one(hour: Hour, covers: str, months: int) -> None:
    given = ("account", "create", "q.db", "--data-set", "v", "--unit", "user", "--time", "at")
    limit = ("--start", "2024-02-01", "--epsilon", "1", "--delta", "1e-6", "--covers")
    hour.message = call(*given, *limit, f"{covers} in UTC").output
    typed = hour.fix_part(r"(?<=--covers ').*(?=')")
    assert typed.startswith(f"{months} months") and call(*given, *limit, typed).exit_code == 0


def test_a_column_that_no_object_has(hour: Hour) -> None:
    Path("visits.jsonl").write_text('{"User": "u1"}\n')
    hour.edit("visits.parquet", "visits.jsonl")
    text = call("check").output
    assert "the column's name" in text and not re.search(r"\b1 \w+s\b", text)


def test_a_job_that_released_nothing(hour: Hour) -> None:
    hour.edit("epsilon = 6.0", "epsilon = 0.01")
    assert hour.run() == 0 and "NOTHING WAS RELEASED" in hour.message
    typed = commands_of(hour.message)
    assert [words[0] for words in typed] == ["plan", "check"]
    outputs = [call(*words) for words in typed]
    assert [result.exit_code for result in outputs] == [0, 0]
    assert "Fix: take longer windows" in outputs[1].output
    hour.edit("epsilon = 0.01", "epsilon = 6.0")  # the larger epsilon that check names
    checked = json.loads(call("check", "--json").stdout)["operator_only"]
    assert checked["most_units_up_to_needed"] == checked["units_needed"]
    assert hour.run() != 0
    assert commands_of(hour.message) == [["run", "daily", "--fresh"]]
    again = call(*commands_of(hour.message)[0], "--quiet")
    assert again.exit_code == 0 and "NOTHING WAS RELEASED" not in again.output


@pytest.mark.parametrize("question", ["sql", "explain", "choose", "workload"])
def test_a_limit_that_holds_for_all_periods_of_a_unit(
    question: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question about the whole table counts all of them; only its command raises the limit."""
    monkeypatch.chdir(tmp_path)
    Path("visits.csv").write_text(ROWS)
    weekly = ("--start", "2024-01-01", "--end", "2024-12-30", "--window", "week", "--covers", "28d")
    assert call("init", "visits.csv", *ROLES, *weekly, "--epsilon", "1").exit_code == 0
    assert call("run", "visits", "--quiet").exit_code == 0
    text = dp("COUNT(*) AS n", "FROM visits", "epsilon = 0.9, delta = 1e-9")
    words = {
        "sql": ("sql", text),
        "explain": ("sql", text, "--explain"),
        "choose": ("choose", "visits", "--first", "7d", "--epsilon", "1.5", "--dry-run"),
        "workload": (
            *("workload", "answer", "pages.json", "--out", "answers", "--dry-run"),
            *("--set", "job.visits.store=cells.store.db", "--set", "job.visits.sink.path=cells"),
        ),
    }[question]
    if question == "workload":
        Path("pages.json").write_text(PAGES)
        project = Path("dpstream.toml")
        project.write_text(project.read_text().replace('covers = "28d"', 'covers = "lifetime"'))
    before = call("account", "show", "--json").stdout
    refusal = call(*words)
    assert refusal.exit_code == 3 and "account.limit" in refusal.output, refusal.output
    assert before == call("account", "show", "--json").stdout, "nothing is raised unasked"
    [fix] = commands_of(" ".join(refusal.output.split()))
    assert fix[:3] == ["account", "limit", "visits"], fix
    assert call(*fix).exit_code == 0
    after = call(*words)
    assert after.exit_code == 0, after.output


def aggregate_of(fix: str) -> str:
    """The line of a published column that a fix shows."""
    return re.findall(r"aggregate\.\w+ = \{[^}]*\}", fix)[0]


def test_more_cores_are_used_by_threads(hour: Hour) -> None:
    for flag in ("--direct_num_workers=2", "--direct_running_mode=multi_processing"):
        assert hour.run(flag) == 2
        threads = hour.fix_part(r"threads = \d+ in \[job\.NAME\]").partition(" in ")[0]
        if flag.startswith("--direct_num"):
            hour.edit("contributions = 4\n", f"contributions = 4\n{threads}\n")
    assert hour.run() == 0


def test_a_job_without_columns(hour: Hour) -> None:
    columns = PROJECT.partition('key = ["page"]\n')[2].partition("start =")[0]
    hour.edit(columns, "aggregate = {}\n")
    assert hour.run() == 2
    hour.edit("aggregate = {}\n", aggregate_of(hour.fix) + "\n")
    assert hour.run() == 0


def test_a_workload_of_a_job_with_two_columns(hour: Hour) -> None:
    Path("pages.json").write_text(PAGES)
    words = ("workload", "answer", "pages.json", "--out", "answers", "--dry-run", "--json")
    refusal = call(*words)
    assert refusal.exit_code == 2
    fix = aggregate_of(json.loads(refusal.stderr.splitlines()[-1])["fix"])
    columns = PROJECT.partition('key = ["page"]\n')[2].partition("start =")[0]
    hour.edit(columns, fix + "\n")
    assert call(*words).exit_code == 0


def test_a_stream_joins_public_tables_by_their_keys(hour: Hour) -> None:
    """A table of text says its columns, in the section that the fix names."""
    hour.csv()
    Path("pages.csv").write_text("page,section\npage 0,a\npage 1,b\npage 2,b\n")
    select = "SELECT v.page, v.amount FROM visits AS v JOIN {} AS p ON v.page = p.page"
    Path("rows.sql").write_text(select.format("visits"))
    hour.edit('key = ["page"]\n', 'key = ["page"]\nquery = "rows.sql"\n')
    for name, columns in (("visits", 'page = "STRING", amount = "FLOAT64"'), ("", "")):
        assert hour.run() == (2 if name else 3), hour.message
        if name:
            section = hour.fix_part(r"\[[\w.]+\]")
            hour.edit(f"{section}\n", f"{section}\ncolumns = {{ {columns} }}\n")
    public = hour.fix_part("public = true")
    assert hour.fix_part("key_columns")
    table = f'[table.pages]\npath = "pages.csv"\n{public}\nkey_columns = ["page"]\n[job.daily]\n'
    hour.edit("[job.daily]\n", table)
    Path("rows.sql").write_text(select.format("pages"))
    assert hour.run() == 2
    section = hour.fix_part(r"\[[\w.]+\]")
    hour.edit(f"{section}\n", f'{section}\ncolumns = {{ page = "STRING" }}\n')
    assert hour.run() == 0, hour.message


@pytest.mark.parametrize("field", ["store", "dead_letter", "path"])
def test_places_below_a_folder_that_is_not_there(hour: Hour, field: str, tmp_path: Path) -> None:
    """Nothing is made there, and nothing is charged, until the folder is."""
    place = tmp_path.parent / f"{tmp_path.name}-elsewhere" / "x"
    if field == "path":
        hour.edit('path = "releases"', f'path = "{place}"')
    else:
        path = place / "daily.db" if field == "store" else place
        hour.edit("contributions = 4", f'contributions = 4\n{field} = "{path}"')
    assert hour.run() == 2 and not place.parent.exists()
    assert not Path("daily.store.db").exists() and not Path("releases").exists()
    subprocess.run(shlex.split(hour.fix_part(r"mkdir -p [^`]*")), check=True)
    assert hour.run() == 0 and place.exists()


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize(
    ("old", "new"),
    [('column = "amount"', 'column = "amout"'), ('unit_column = "user"', 'unit_column = "usr"'),
     ('key = ["page"]', 'key = ["pages"]')],
)  # fmt: skip
def test_a_plan_of_a_column_that_is_not_there(hour: Hour, kind: str, old: str, new: str) -> None:
    """Refused as the run would be, by the first file's columns; no record is read."""
    if kind == "csv":
        hour.csv()
        table = Path("visits.csv").read_bytes()
        Path("visits.csv").write_bytes(table.partition(b"\n")[0] + b"\nno, record\n")
    hour.edit(old, new)
    refusal = json.loads(call("plan", "daily", "--json").stdout)["acceptance"]["refusal"]
    assert hour.run() == 2 and refusal["field"] in hour.message
    column = re.search(r"amount|user|page", old)
    assert column is not None and refusal["field"] == f"column '{new.split(chr(34))[1]}'"
    if kind == "parquet":
        assert column[0] in re.split("[, ]+", refusal["rule"].rpartition(": ")[2])
        hour.edit(new, new.replace(new.split('"')[1], column[0]))
        assert call("plan", "daily").exit_code == 0


def test_a_tuning_of_a_column_that_is_not_there(hour: Hour) -> None:
    accounts.write(Path("dpstream.toml"), with_account(50.0))
    words = ("choose", "daily", "--first", "1d", "--epsilon", "0.5", "--dry-run")
    assert call(*words).exit_code == 0
    hour.edit('key = ["page"]', 'key = ["pages"]')
    refusal = call(*words)
    assert refusal.exit_code == 2 and "column 'pages'" in refusal.output


def test_a_plan_without_files(hour: Hour) -> None:
    """Refused as the run would be."""
    Path("visits.parquet").rename("moved.parquet")
    refusal = json.loads(call("plan", "daily", "--json").stdout)["acceptance"]["refusal"]
    assert hour.run() == 2 and refusal["rule"] in hour.message
    hour.edit("visits.parquet", "moved.parquet")
    assert call("plan", "daily").exit_code == 0


def test_an_empty_file_is_no_account(hour: Hour) -> None:
    Path("shop.db").touch()
    empty = call("account", "show", "shop.db")
    assert empty.exit_code == 2 and "TOML" not in empty.output and "version" not in empty.output
    [words] = commands_of(" ".join(empty.output.split()))
    typed = {"FILE": "shop.db", "NAME": "user", "E": "1", "D": "1e-6"}
    assert call(*(typed.get(word, word) for word in words)).exit_code == 0
    assert call("account", "show", "shop.db").exit_code == 0


def test_a_plan_of_a_changed_job(hour: Hour) -> None:
    assert hour.run() == 0
    hour.edit("contributions = 4", "contributions = 5")
    [words] = commands_of(call("plan").output)
    assert words == ["run", "daily", "--fresh"] and call(*words, "--quiet").exit_code == 0


def test_a_budget_that_covers_too_much(hour: Hour) -> None:
    draft = ["init", "visits.parquet", "--unit", "user", "--key", "page", "--time", "at",
             "--start", "2024-01-01", "--end", "2024-12-30", "--window", "week", "--epsilon", "1",
             "--data-set", "year", "--new-account", "--covers", "lifetime"]  # fmt: skip
    hour.edit('path = "visits.parquet"', 'data_set = "v"\npath = "visits.parquet"')
    taken = call(*draft, "--job", "daily")
    fix = re.search(r"add (--job \S+), or edit", taken.output)
    assert taken.exit_code == 2 and fix is not None
    assert call(*draft, *fix[1].split()).exit_code == 0
    more = ("plan", fix[1].split()[1], "--units", "1000", "--records", "3000")
    covers = re.search(r'budget\.covers = "window"', call(*more).output)
    assert covers is not None
    hour.edit('covers = "lifetime" }  #', 'covers = "window" }  #')
    assert "most windows will have few units" not in call(*more).output


def test_a_strategy_that_needs_too_large_a_matrix(tmp_path: Path) -> None:
    file = tmp_path / "w.json"
    domain = [{"name": "a", "size": 100}, {"name": "b", "size": 100}]
    queries = [{"factors": {"a": "range", "b": "prefix"}}, {"factors": {"a": "prefix"}}]
    file.write_text(json.dumps({"domain": domain, "queries": queries}))
    plan = ("workload", "plan", file, "--mu", "1", "--cache", tmp_path / "cache")
    refused = call(*plan, "--strategy", "eigen")
    assert refused.exit_code == 2 and "choose another --strategy" in refused.output
    assert call(*plan, "--strategy", "identity").exit_code == 0


def test_tables_without_a_secret(tmp_path: Path) -> None:
    of = census(tmp_path)
    assert call(*of.ask).exit_code == 0
    file = tmp_path / "persons.toml"
    text = file.read_text()
    file.write_text(text.replace('secret = "file:noise.secret"\n', ""))
    refused = call(*of.plan)
    assert refused.exit_code == 2 and "secret" in refused.output
    file.write_text(text)
    assert call(*of.plan).exit_code == 0


def test_a_sink_of_another_kind(hour: Hour) -> None:
    assert hour.run() == 0
    hour.edit('kind = "parquet"', 'kind = "jsonl"')
    assert hour.run() == 3
    [words] = commands_of(hour.message)
    folder = hour.folder / "again"
    typed = [{"JOB": "daily", "FOLDER": folder.name}.get(word, word) for word in words]
    assert call(*typed).exit_code == 0 and any(folder.rglob("*.jsonl"))


def test_a_release_that_the_sink_lost(hour: Hour) -> None:
    assert hour.run() == 0
    releases = hour.folder / "releases"
    lost = min(
        path for path in releases.rglob("window-*/*.parquet") if not path.name.startswith(".")
    )
    before = lost.read_bytes()
    lost.unlink()
    expire = ("state", "expire", "daily", "--releases-before", "2024-01-02T00:00:00Z")
    refused = call(*expire)
    [words] = commands_of(refused.output)
    assert refused.exit_code == 3
    assert call(*("daily" if word == "JOB" else word for word in words)).exit_code == 0
    assert lost.read_bytes() == before and call(*expire).exit_code == 0


def test_a_key_that_was_not_checked(tmp_path: Path) -> None:
    project, form = (
        ("--project", str(shop_files(tmp_path))),
        "COUNT(*, contribution_bounds_per_group => (0, 5)) AS n",
    )
    asking = ("sql", *project, dp(f"item, {form}", "FROM orders GROUP BY item"))
    refused = call(*asking)
    [words] = commands_of(refused.output)
    assert refused.exit_code == 3
    assert call(*words, *project).exit_code == 0
    assert call(*asking).exit_code == 0


def test_tables_with_several_faults(tmp_path: Path) -> None:
    made = office(tmp_path)
    config = json.loads((made.parameters / "config.json").read_text())
    (made.parameters / "config.json").write_text(json.dumps(dict.fromkeys(config, "x")))
    given = ("--project", project(tmp_path, made))
    refused = call("census", "plan", *given)
    [words] = commands_of(refused.output)
    listed = call(*words, *given)
    assert refused.exit_code == listed.exit_code == 2
    counted = re.search(r"([0-9]+) faults", refused.output)
    assert counted is not None and len(listed.output.splitlines()) == int(counted[1]) + 1


def shell_of(text: str) -> list[list[str]]:
    """The words of each other command between backticks of a message."""
    lines = [shlex.split(line) for line in re.findall(r"`([^`]*)`", text)]
    return [words for words in lines if words[0] == "rm"]


def truncated(hour: Hour) -> Path:
    """A charged run, and the head file of its account without the end of its log."""
    accounts.write(hour.folder / "dpstream.toml", with_account(30.0))
    assert hour.run() == 0
    [head] = hour.folder.glob("*.head")
    content = head.read_bytes()
    head.write_bytes(content[: 8192 + (len(content) - 8192) // 2])
    return head


def test_a_head_file_that_lost_its_end(hour: Hour) -> None:
    """Nothing of the old run is moved for a run that is refused; the fix lets all go on."""
    head = truncated(hour)
    before = sorted(path.name for path in hour.folder.iterdir())
    for flags in ([], ["--fresh"]):
        assert hour.run(*flags) == 3 and "damaged head file" in hour.message
    assert sorted(path.name for path in hour.folder.iterdir()) == before
    statement = dp("COUNT(*) AS n", "FROM visits", "epsilon = 0.1, delta = 1e-9")
    explain = ("sql", statement, "--explain")
    for words in (explain, ("sql", statement), explain, ("account", "show", "v")):
        looked = call(*words)
        assert looked.exit_code == 0 and looked.output.count("Warning: the log of") == 1, words
    [[remove, name]] = shell_of(looked.output)
    assert remove == "rm" and Path(name) == Path(head.name)
    Path(name).unlink()
    assert hour.run("--fresh") == 0 and "written again" in hour.message
    assert hour.run() == 0 and head.exists()
    assert "Warning: the log of" not in call("account", "show", "v").output


@pytest.mark.parametrize("content", ["", "12ab", "00" * 32])
def test_a_secret_that_is_damaged(hour: Hour, content: str) -> None:
    """Its backup is what goes on with a run; a new secret is only for a new data set."""
    path = hour.folder / "noise.secret"
    path.write_text(content)
    assert hour.run() == 2 and hour.fix.startswith("restore it from its backup; only if")
    [[remove, name]] = shell_of(hour.message)
    [again] = commands_of(hour.message)
    assert remove == "rm" and Path(name).samefile(path) and again == ["secret", "new", name]
    assert call(*again).exit_code != 0, "it never overwrites"
    Path(name).unlink()
    assert hour.run() == 2 and commands_of(hour.message) == [again]
    assert call(*again).exit_code == 0 and hour.run() == 0


def test_a_store_that_is_damaged(hour: Hour) -> None:
    """Without a backup, its file is moved away for a new run, which is charged once."""
    accounts.write(hour.folder / "dpstream.toml", with_account(30.0))
    assert hour.run() == 0
    stores.close_all()
    store = hour.folder / "daily.store.db"
    store.write_bytes(bytes(5_000))
    for flags in ([], ["--fresh"]):
        assert hour.run(*flags) == 3 and "move its file FILE, and each FILE-*" in hour.fix
    for path in hour.folder.glob(f"{store.name}*"):
        path.rename(hour.folder / f"old-{path.name}")
    assert commands_of(hour.message)[-1] == ["run", "JOB", "--fresh"]
    assert hour.run("--fresh") == 0
    assert len(accounts.charges(hour.folder / "ledger.db")) == 2


@pytest.mark.parametrize("pattern", ["*manifest*", "*.parquet"])
def test_a_sessions_folder_that_is_damaged(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again after it was moved away, and what was spent stays spent."""
    monkeypatch.chdir(tmp_path)
    table = sessions.loaded(tmp_path)
    ask = "epsilon = {} | COUNT(*) AS n | epsilon >= 1".format
    sessions.answer_of(table, ask(0.2))
    [folder] = [path for path in tmp_path.iterdir() if path.suffix == ".table"]
    for path in folder.glob(pattern):
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    refusal = sessions.failed(4, sessions.ask_sql(table, ask(0.4)))
    assert "move it away" in refusal and commands_of(refusal) == [["table", "init", "TABLE"]]
    sessions.failed(3, sessions.called("init", *table))
    folder.rename(tmp_path / "away")
    assert sessions.called("init", *table).exit_code == 0
    sessions.answer_of(table, ask(0.4))
    assert "left" in sessions.failed(3, sessions.ask_sql(table, ask(1.5)))
