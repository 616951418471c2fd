"""Finding and decoding ``dpstream.toml``; an environment changes places and no promise.

Writing the project file: its rights and links stay, and what another program wrote too.

The unit, account and secret of a data set, and where their errors are.
"""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.project.project import (
    account_of,
    find,
    flush_project,
    load_project,
    secret_of,
    unit_of,
)
from dpstream.pipelines.project.project import write_project as write_file
from tests import projects
from tests.golden.refusals import Refused
from tests.projects import write_project

PROD = """
[env.prod]
data_set.shop.secret = "env:SHOP_SECRET"
job.daily.store = "spanner://pro/inst/daily"
table.visits.path = "gs/*.parquet"
"""
ACCOUNT = 'account = { id = "7f3a0c5d9e1b2846", path = "a.db" }'


def test_the_file_is_that_of_the_folder_or_of_a_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    inner = tmp_path / "repository" / "reports" / "weekly"
    inner.mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir()
    outside = write_project(tmp_path)
    monkeypatch.chdir(inner)
    assert find(inner) is None  # beyond the root of the repository nothing is looked for
    refused(load_project)
    path = write_project(tmp_path / "repository")
    assert load_project().path == path == find(inner)
    assert load_project(tmp_path).path == outside == load_project(outside).path


def test_an_environment_and_settings_change_places(tmp_path: Path) -> None:
    path = write_project(tmp_path, more=PROD)
    project = load_project(path, "prod", ["job.daily.threads=3", "job.daily.store=other.db"])
    name, job = project.job()
    assert (name, job.store, job.threads) == ("daily", "other.db", 3)
    assert project.table("visits", "").path == "gs/*.parquet"
    assert project.written == load_project(path).sections
    assert project.written.table["visits"].path == "visits/*.parquet"


@pytest.mark.parametrize(
    ("environment", "setting"),
    [
        ("job.daily.contributions = 80", "job.daily.contributions=80"),
        ("job.daily.budget.epsilon = 9", "job.daily.budget.epsilon=9"),
        ('job.daily.window = "2 days"', "job.daily.window=2 days"),
        ("table.visits.public = true", "table.visits.public=true"),
        ('table.visits.unit_column = "page"', "table.visits.unit_column=page"),
        ('data_set.shop.account.id = "0000000000000000"', "data_set.shop.account.id=00"),
    ],
)
def test_what_a_plan_promises_is_no_place(
    tmp_path: Path, environment: str, setting: str, refused: Refused
) -> None:
    path = write_project(tmp_path)
    refused(load_project, path, settings=[setting])
    path = write_project(tmp_path, more=f"[env.prod]\n{environment}\n")
    # also where it is not chosen
    refused(load_project, path)


@pytest.mark.parametrize("field", ['"job.daily.store"', 'job."daily.store"'])
def test_quotes_make_no_place_of_a_name(tmp_path: Path, field: str, refused: Refused) -> None:
    path = write_project(tmp_path, more=f'[env.prod]\n{field} = "x.db"\n')
    refused(load_project, path, "prod")


def test_a_trial_changes_any_field(tmp_path: Path, refused: Refused) -> None:
    path = write_project(tmp_path)
    project = load_project(path, tries=["job.daily.contributions=80", "job.daily.window=12 hours"])
    assert project.sections == project.written
    assert (project.job()[1].contributions, project.job()[1].window) == (80, "12 hours")
    for name in ('"length of stay"', '"ward.beds"', "length of stay"):  # as TOML, or without quotes
        given = f'job.daily.aggregate.{name}={{ kind = "count" }}'
        _, job = load_project(path, tries=[given]).job()
        assert name.strip('"') in job.aggregate and len(job.aggregate) > 1
    for nothing in ("=2", "#=2", "job=2", "job.daily"):
        refused(load_project, path, tries=[nothing])


@pytest.mark.parametrize("setting", ["store=x", "job.daily.store", "job.weekly.store=x", ""])
def test_a_setting_names_a_field_that_there_is(
    tmp_path: Path, setting: str, refused: Refused
) -> None:
    refused(lambda: load_project(write_project(tmp_path), settings=[setting]))


def test_records_never_decide_when_something_is_published(tmp_path: Path, refused: Refused) -> None:
    path = write_project(tmp_path, ("contributions = 8", "contributions = 8\ntrigger_count = 3"))
    refused(load_project, path)


def test_a_name_that_is_not_there_is_answered_with_those_that_are(
    tmp_path: Path, refused: Refused
) -> None:
    project = load_project(write_project(tmp_path))
    for ask in (
        lambda: project.job("dayly"),
        lambda: project.table("visit", "job.daily.table"),
        lambda: project.data_set("shops", "table.visits.data_set"),
    ):
        refused(ask)
    refused(project.workload)


def test_several_jobs_are_told_apart_by_name(tmp_path: Path, refused: Refused) -> None:
    text = write_project(tmp_path).read_text()
    job = text[text.index("[job.daily]") :]
    path = write_project(tmp_path, more="\n" + job.replace("daily", "weekly"))
    project = load_project(path)
    assert project.job("weekly")[0] == "weekly"
    refused(project.job)


OLD, NEW = "version = 1\n", "version = 1\n# more\n"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o664, 0o666])
def test_the_mode_stays_whatever_the_umask(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "dpstream.toml"
    path.write_text(OLD)
    path.chmod(mode)
    mask = os.umask(0o077)
    try:
        write_file(path, NEW, OLD.encode())
    finally:
        os.umask(mask)
    assert path.read_text() == NEW and stat.S_IMODE(path.stat().st_mode) == mode
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_link_to_the_file_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "real.toml", tmp_path / "project" / "dpstream.toml"
    real.write_text(OLD)
    link.parent.mkdir()
    link.symlink_to(real)
    write_file(link, NEW, OLD.encode())
    assert link.is_symlink() and real.read_text() == NEW


def test_a_byte_order_mark_stays(tmp_path: Path) -> None:
    """Whether the text that is written has it or not."""
    path, mark = tmp_path / "dpstream.toml", b"\xef\xbb\xbf"
    for text in (NEW, "\ufeff" + NEW):
        path.write_bytes(mark + OLD.encode())
        write_file(path, text, path.read_bytes())
        assert path.read_bytes() == mark + NEW.encode()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("contributions = 8", 'contributions = 8\nstore = "a\\u0000b"'),
        ('key = ["page"]', 'key = ["pa\\u0000ge"]'),
        ('"visits/*.parquet"', '"visits\\u0000"'),
        ("aggregate.views", 'aggregate."vi\\u0000ews"'),
        ("insecure_test_secret =", 'secret = "file:\\u0000"\n#'),
    ],
)
def test_a_nul_is_refused_wherever_it_stands(
    old: str, new: str, tmp_path: Path, refused: Refused
) -> None:
    path = write_project(tmp_path, (old, new))
    refused(load_project, path)
    path.write_text(path.read_text().replace("\\u0000", ""))
    load_project(path)


def test_a_nul_in_a_setting_or_in_the_name_of_the_file(tmp_path: Path, refused: Refused) -> None:
    path = write_project(tmp_path)
    refused(load_project, path, settings=['job.daily.store="a\\u0000b"'])
    for call in (load_project, load_job):
        refused(call, "a\0b")


def test_what_another_program_wrote_meanwhile_stays(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "dpstream.toml"
    for before in (b"", b"version = 1\n# another\n"):
        path.write_text(OLD)
        refused(write_file, path, NEW, before)
        assert path.read_text() == OLD
    path.unlink()
    write_file(path, NEW, b"")
    assert path.read_text() == NEW


def test_a_file_that_is_gone_cannot_be_flushed(tmp_path: Path, refused: Refused) -> None:
    refused(flush_project, tmp_path / "dpstream.toml")


ID = "0acc0acc0acc0acc"


def project(**section: Any) -> Any:
    return projects.of_tables(Path("/shop"), ("customer", "int"), {}, **section)


def test_places_start_from_the_folder_of_the_file() -> None:
    account = account_of(project(account={"path": "a/l.db", "id": ID}), "d")
    assert (account.path, account.data_set, account.id) == ("/shop/a/l.db", "d", ID)
    assert (account.unit, account.file) == ("customer", "/shop/dpstream.toml")
    database = {"path": "spanner://p/i/d", "id": ID}
    assert account_of(project(account=database), "d").path == "spanner://p/i/d"
    assert secret_of(project(secret="file:s"), "d").reference == "file:/shop/s"
    assert secret_of(project(secret="env:SECRET"), "d").reference == "env:SECRET"
    test_secret = "0f" * 32
    assert (
        secret_of(project(insecure_test_secret=test_secret), "d").insecure_test_secret is not None
    )


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"account": {"path": "", "id": ID}}, "data_set.d.account.path"),
        ({"account": {"path": "s3://b/l.db", "id": ID}}, "data_set.d.account.path"),
        ({"account": {"path": "l.db", "id": "ID"}}, "data_set.d.account.id"),
        ({"secret": "file:s3://b/s"}, "data_set.d.secret"),
        ({"secret": "env:A", "insecure_test_secret": "0f" * 32}, "data_set.d.secret"),
    ],
)
def test_errors_name_the_field_of_the_project_file(section: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        account_of(project(**section), "d")
        secret_of(project(**section), "d")
    assert caught.value.field == field


def test_a_data_set_without_an_account_is_refused(refused: Refused) -> None:
    sections = {"data_set": {"d": {"unit": {"name": "user"}}}}
    refused(lambda: account_of(projects.of_sections(Path("/shop"), sections), "d"))


def test_an_account_that_is_not_made_yet(refused: Refused) -> None:
    """It has no id; who makes it names it by the path."""
    refused(lambda: account_of(project(account={"path": "l.db"}), "d"))
    of_records = records({"path": "l.db"})
    refused(account_of, of_records, "d")
    place = account_of(of_records, "d", to_make=True)
    assert (place.path, place.id) == ("/shop/l.db", "")
    assert account_of(records(), "d", to_make=True).path == "/shop/d.account.db"


def records(account: dict[str, str] | None = None) -> Any:
    """A data set whose records have budgets of their own."""
    dimension = {"epsilon": {"type": "budget", "most": 1.0}}
    tables = {"visits": {"path": "a.csv"}, "rides": {"path": "r.csv", "dimension": dimension}}
    section = {} if account is None else {"account": account}
    return projects.of_sections(Path("/shop"), {"data_set": {"d": section}, "table": tables})


def test_a_data_set_without_a_unit_is_for_sessions(refused: Refused) -> None:
    assert unit_of(project(), "d", "a job").name == "customer"
    refused(lambda: unit_of(records(), "d", "a job"))
    empty = projects.of_sections(Path("/shop"), {"data_set": {"d": {}}})
    refused(unit_of, empty, "d", "a job")
