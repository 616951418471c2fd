"""The unit, account and secret of a data set, and where their errors are."""

from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.project.data_sets import account_of, secret_of, unit_of
from tests import projects

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


def test_a_data_set_without_an_account_is_refused() -> None:
    sections = {"data_set": {"d": {"unit": {"name": "user"}}}}
    with pytest.raises(UsageError) as caught:
        account_of(projects.of_sections(Path("/shop"), sections), "d")
    assert caught.value.field == "data_set.d.account"
    assert "dpstream account create" in caught.value.fix


def test_an_account_that_is_not_made_yet() -> None:
    """It has no id; who makes it names it by the path."""
    with pytest.raises(UsageError, match="is required") as caught:
        account_of(project(account={"path": "l.db"}), "d")
    assert caught.value.field == "data_set.d.account.id"
    assert "dpstream account create" in caught.value.fix
    of_records = records({"path": "l.db"})
    with pytest.raises(UsageError, match="is required") as caught:
        account_of(of_records, "d")
    assert "`dpstream session init rides`" in caught.value.fix
    place = account_of(of_records, "d", to_make=True)
    assert (place.path, place.id) == ("/shop/l.db", "")
    assert account_of(records(), "d", to_make=True).path == "/shop/d.account.db"


def records(account: dict[str, str] | None = None) -> Any:
    """A data set whose records have budgets of their own."""
    dimension = {"epsilon": {"type": "budget", "most": 1.0}}
    tables = {"visits": {"path": "a.csv"}, "rides": {"path": "r.csv", "dimension": dimension}}
    section = {} if account is None else {"account": account}
    return projects.of_sections(Path("/shop"), {"data_set": {"d": section}, "table": tables})


def test_a_data_set_without_a_unit_is_for_sessions() -> None:
    assert unit_of(project(), "d", "a job").name == "customer"
    with pytest.raises(UsageError, match="is required by a job") as caught:
        unit_of(records(), "d", "a job")
    assert caught.value.field == "data_set.d.unit"
    assert "`dpstream session ask rides`" in caught.value.fix
    empty = projects.of_sections(Path("/shop"), {"data_set": {"d": {}}})
    with pytest.raises(UsageError, match="is required by a job") as caught:
        unit_of(empty, "d", "a job")
    assert "add unit = " in caught.value.fix
