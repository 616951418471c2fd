"""The account and the secret of a data set, and where their errors are."""

from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.project.data_sets import account_of, secret_of
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
    assert secret_of(project(secret="file:s"), "d").key == "file:/shop/s"
    assert secret_of(project(secret="env:SECRET"), "d").key == "env:SECRET"
    test_secret = "0f" * 32
    assert secret_of(project(insecure_test_secret=test_secret), "d").insecure_test_key is not None


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
