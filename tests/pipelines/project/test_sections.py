"""What a section must have, and where an error says that it is."""

from pathlib import Path

import pytest

from dpstream.pipelines.project.project import load_project
from tests.golden.refusals import Refused
from tests.projects import write_project


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("version = 1", ""),
        ("version = 1", "version = 2"),
        ("[job.daily]", "[jobs.daily]"),
        ('unit_column = "user"', 'unit_colum = "user"'),
        ('"customer" }', '"customer", type = "integer" }'),
    ],
)
def test_an_error_names_its_field(tmp_path: Path, old: str, new: str, refused: Refused) -> None:
    refused(lambda: load_project(write_project(tmp_path, (old, new))))
