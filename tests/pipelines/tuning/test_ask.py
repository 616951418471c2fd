"""What a tuning asks and costs, checked without reading a record."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.tuning.ask import Request, _scale, ask


@pytest.mark.parametrize(
    ("given", "kind", "field"),
    [({}, UsageError, "--first"), ({"first": "2h"}, UsageError, "--epsilon"),
     ({"first": "2h", "epsilon": 1.0}, PolicyError, "account"),
     ({"proxy": "/x/*.csv", "epsilon": 1.0}, UsageError, "--proxy"),
     ({"proxy": "/x/*.csv", "first": "2d"}, UsageError, "--first"),
     ({"proxy": "/x/*.csv", "quantile": 0.5, "cover": 0.5}, UsageError, "--cover"),
     ({"proxy": "/x/*.csv", "scale": 0.0}, UsageError, "--scale")],
)  # fmt: skip
def test_what_is_refused(
    given: dict[str, object], kind: type[DpstreamError], field: str, make_job: Callable[..., Job]
) -> None:
    path = make_job().path
    with pytest.raises(kind) as error:
        ask(Request(path, path.with_name("out.toml"), **given))
    assert error.value.field == field


def test_other_data_costs_nothing_and_the_digest_is_the_questions(
    make_job: Callable[..., Job],
) -> None:
    path = make_job().path
    request = Request(path, path.with_name("out.toml"), proxy="/x/*.csv")
    question, description = ask(request), ask(request).describe()
    assert (description["how"], description["epsilon"], description["histograms"]) == (
        "proxy",
        None,
        [],
    )
    assert question.digest == ask(request).digest and len(question.digest) == 32
    assert question.digest != ask(request._replace(quantile=0.5)).digest
    assert not Path(request.out).exists()


def test_a_factor_is_exact() -> None:
    from fractions import Fraction

    assert (_scale(None, Fraction(7, 3)), _scale(0.1, Fraction(1))) == ("7/3", "1/10")
