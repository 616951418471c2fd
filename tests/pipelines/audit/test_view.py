"""An audit in words and as a picture: what refutes is named."""

from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.errors import RunError
from dpstream.accounting.evidence.bounds import Claim, ProvenBound, Scores
from dpstream.pipelines.audit.audit import Alone, Ask, AuditResult, Family
from dpstream.pipelines.audit.view import draw, picture, text

CLAIM = Claim(1.0, 1e-9, 0.5, 1e-10, 5e-10, 1e-12)


def result(mu: float, at_least: float = 0.0) -> AuditResult:
    rng = np.random.default_rng(1)
    bound = ProvenBound(mu, 0.3, 0.2, 0.4, 0.5, 0, 1.0, (500, 400))
    scores = Scores(rng.standard_normal(500), rng.standard_normal(400) + mu)
    families = [Family("values", "own words", 0.45, bound, scores, 1000)]
    return AuditResult("h", CLAIM, families, Alone(3, 2000, at_least, 1), 1.5, Ask())


def test_a_consistent_audit() -> None:
    rendered = text(result(0.25))
    assert "Verdict     consistent" in rendered and "confidence 99%" in rendered
    assert (
        "mu >= 0.25" in rendered
        and "own words" in rendered
        and "3 of 2,000 keys of 1 unit(s)" in rendered
    )


@pytest.mark.parametrize(("mu", "at_least", "who"), [(0.6, 0.0, "values"), (0.1, 0.1, "alone")])
def test_what_refutes_is_named(mu: float, at_least: float, who: str) -> None:
    audit = result(mu, at_least)
    assert audit.refuted and f"REFUTED by {who}:" in text(audit)
    assert picture(audit).axes[0].get_title(loc="left").startswith("REFUTED")


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    draw(result(0.25), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    for path in (tmp_path / "none" / "x.png", tmp_path / "x.exe"):
        with pytest.raises(RunError) as error:
            draw(result(0.25), path)
        assert error.value.field == "--picture"
