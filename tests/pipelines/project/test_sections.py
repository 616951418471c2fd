"""What a section must have, and where an error says that it is."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.project.project import load_project
from tests.projects import write_project


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("version = 1", "", "version"),
        ("version = 1", "version = 2", "version"),
        ("[job.daily]", "[jobs.daily]", "jobs"),
        ('unit_column = "user"', 'unit_colum = "user"', "table.visits.unit_colum"),
        ('"customer" }', '"customer", type = "integer" }', "data_set.shop.unit.type"),
    ],
)
def test_an_error_names_its_field(tmp_path: Path, old: str, new: str, field: str) -> None:
    with pytest.raises(UsageError) as error:
        load_project(write_project(tmp_path, (old, new)))
    assert error.value.field == field
