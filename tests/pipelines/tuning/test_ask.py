"""What a tuning asks and costs, checked without reading a record."""

from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.pipelines.project.project import Project, load_project
from dpstream.pipelines.tuning.ask import Request, _scale, ask
from tests.projects import write_project


def write(folder: Path) -> Project:
    """A project with a job over a week, without an account."""
    return load_project(write_project(folder))


@pytest.mark.parametrize(
    ("given", "kind", "field"),
    [({}, UsageError, "--first"), ({"first": "2h"}, UsageError, "--epsilon"),
     ({"first": "2h", "epsilon": 1.0}, PolicyError, "account"),
     ({"proxy": "/x/*.csv", "epsilon": 1.0}, UsageError, "--proxy"),
     ({"proxy": "/x/*.csv", "first": "8d"}, UsageError, "--first"),
     ({"proxy": "/x/*.csv", "quantile": 0.5, "cover": 0.5}, UsageError, "--cover"),
     ({"proxy": "/x/*.csv", "scale": 0.0}, UsageError, "--scale")],
)  # fmt: skip
def test_what_is_refused(
    given: dict[str, Any], kind: type[DpstreamError], field: str, tmp_path: Path
) -> None:
    project = write(tmp_path)
    with pytest.raises(kind) as error:
        ask(Request(project, "daily", "new", **given))
    assert error.value.field == field


def test_other_data_costs_nothing_and_the_digest_is_the_questions(tmp_path: Path) -> None:
    project = write(tmp_path)
    before = project.path.read_bytes()
    request = Request(project, "daily", "new", proxy="/x/*.csv")
    question, description = ask(request), ask(request).describe()
    assert (description["how"], description["epsilon"], description["histograms"]) == (
        "proxy",
        None,
        [],
    )
    assert question.digest == ask(request).digest and len(question.digest) == 32
    assert question.digest != ask(request._replace(quantile=0.5)).digest
    assert question.digest == ask(request._replace(new="other")).digest
    assert project.path.read_bytes() == before


def test_a_factor_is_exact() -> None:
    from fractions import Fraction

    assert (_scale(None, Fraction(7, 3)), _scale(0.1, Fraction(1))) == ("7/3", "1/10")
