"""What a job's section must have, and where an error says that it is."""

from pathlib import Path

import pytest

from dpstream.pipelines.project.project import load_project
from tests.golden.refusals import Refused
from tests.projects import write_project


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("epsilon = 4", "epsilom = 4"),
        ("contributions = 8", ""),
        ("contributions = 8", 'contributions = "8"'),
        ('kind = "count"', 'kind = "cont"'),
        ("[0, 120]", "[0, 120, 3]"),
        ('kind = "parquet"', 'kind = "ftp"'),
    ],
)
def test_an_error_names_its_field(tmp_path: Path, old: str, new: str, refused: Refused) -> None:
    refused(lambda: load_project(write_project(tmp_path, (old, new))).job())
