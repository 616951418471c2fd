"""What a job's section must have, and where an error says that it is."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.project.project import load_project
from tests.projects import write_project


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("epsilon = 4", "epsilom = 4", "job.daily.budget.epsilom"),
        ("contributions = 8", "", "job.daily.contributions"),
        ("contributions = 8", 'contributions = "8"', "job.daily.contributions"),
        ('kind = "count"', 'kind = "cont"', "job.daily.aggregate.views.kind"),
        ("[0, 120]", "[0, 120, 3]", "job.daily.aggregate.seconds.bounds"),
        ('kind = "parquet"', 'kind = "ftp"', "job.daily.sink.kind"),
    ],
)
def test_an_error_names_its_field(tmp_path: Path, old: str, new: str, field: str) -> None:
    with pytest.raises(UsageError) as error:
        load_project(write_project(tmp_path, (old, new))).job()
    assert error.value.field == field
