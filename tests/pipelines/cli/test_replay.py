"""``dpstream replay``: its examples, and targets, speeds and options that are none."""

from collections.abc import Callable

import pytest

from dpstream.pipelines.jobs.job import Job
from tests.pipelines.cli.called import examples_of, refused


def test_examples() -> None:
    assert len(examples_of("replay")) == 3


@pytest.mark.parametrize(
    ("args", "field"),
    [(["--to", "nowhere"], "--to"), (["--to", "folder:x", "--speed", "fast"], "--speed"),
     (["--to", "kafka:h:1/t", "--option", "acks"], "--option"), ([], "--to")],
)  # fmt: skip
def test_what_is_refused(args: list[str], field: str, make_job: Callable[..., Job]) -> None:
    assert field in refused("replay", "--project", make_job().path, *args)
