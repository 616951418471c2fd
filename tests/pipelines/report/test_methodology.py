"""The methodology in plain language: its texts, and its numbers against simulated attackers."""

from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.guarantee import describe
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.job_section import PublicationSection
from dpstream.pipelines.report.methodology import methodology, named_rightly
from tests.golden import pinned
from tests.reports import edit

WEEKS = (
    ('covers = "lifetime"', 'covers = "7 days"'), ('window = "1d"', 'window = "7d"'),
    ('"6h"', '"1d"'), ('end = "2024-01-02', 'end = "2024-02-26'),
)  # fmt: skip
PUBLICATION = PublicationSection(
    title="Rides by station and week", publisher="An office", licence="CC-BY-4.0",
    labels={"user": "rider", "records": "Rides", "total": "Minutes"}, withhold="sd > 30%",
)  # fmt: skip
PLAIN = PublicationSection(title="daily")


def text_of(job: Job, publication: PublicationSection = PLAIN, sound: bool = True) -> str:
    budget = msgspec.structs.replace(allocate(job.plan), has_guarantee=sound)
    parts = methodology(job.plan, describe(job.plan, budget), publication)
    return "".join(f"{heading}\n" + "".join(f"  {text}\n" for text in texts)
                   for heading, texts in parts)  # fmt: skip


def test_texts(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """One budget for all time and raw names; weeks with labels; public rows without an end."""
    texts = {"lifetime": text_of(make_job()), "unsound": text_of(make_job(), sound=False)}
    job = edit(make_job(), *WEEKS)
    texts["weeks"] = text_of(job, PUBLICATION)
    (tmp_path / "keys.csv").write_text("key\na\nb\n")
    job = edit(
        job, ("sink =", 'public_keys = "keys.csv"\nper_key_bound = 2\nsink ='),
        ('end = "2024-02-26T00:00:00Z"\n', ""), ('path = "in/*.csv"', 'folder = "in"'),
    )  # fmt: skip
    texts["without end"] = text_of(job)
    pinned.check(Path(__file__).with_name("methodology.txt"), pinned.of_cases(texts))


@pytest.mark.parametrize("mu", [0.2, 1.0, 2.5])
def test_an_attacker_names_as_many_as_stated(mu: float) -> None:
    """The best test of Gaussian noise comes to within one of 100, and never beyond."""
    rng = np.random.default_rng(7)
    threshold = NormalDist().inv_cdf(0.99)
    share = 100 * (rng.normal(mu, 1.0, 2_000_000) > threshold).mean()
    stated = named_rightly(40.0, 1e-9, mu)
    assert share <= stated < share + 1.1
    assert named_rightly(40.0, 1e-9, 0.9 * mu) < share + 0.1 or mu < 0.5


@pytest.mark.parametrize(("epsilon", "stated"), [(0.1, 2), (1.0, 3), (2.0, 8), (5.0, 100)])
def test_an_attacker_of_plain_epsilon(epsilon: float, stated: int) -> None:
    """Randomised responses reach the bound: of e^epsilon 1 of 100, until nearly all are named."""
    assert named_rightly(epsilon, 0.0, None) == stated
    assert named_rightly(epsilon, 0.5, None) >= min(100, stated + 50)
