"""When keys are tested: at public triggers of a window, few of them and growing apart.

Fewer tests need less selection noise and a smaller union; with ``skip`` what one test published
costs later pairs nothing (mechanism.md section 9).  Values keep their own triggers.
"""

import functools
import itertools
from typing import TYPE_CHECKING

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import job_field

if TYPE_CHECKING:
    from dpstream.accounting.plan.privacy import Privacy

#: Tests of a window where published keys are skipped, and the job does not say how many.  The 5th
#: of 16 falls just before T/10 (25/256 of T), the 4th of 15 at 7% of T: a tenth more keys by then
#: for 1% fewer at the end.
DEFAULT_TESTS = 16
#: The same where the statistic is combined: the 3rd of 10 falls just before T/10.
COMBINED_TESTS = 10
#: What shares are cut by, far above the float error of their sum.
_CUT = 1e-12


def growing(triggers: int, tests: int) -> tuple[int, ...]:
    """The distinct values of ceil(T (j/n)^2), j = 1 .. n, the last of them T."""
    square = tests * tests
    return tuple(sorted({-(-triggers * j * j // square) for j in range(1, tests + 1)}))


def schedule_of(privacy: "Privacy", triggers: int, skips: bool) -> tuple[int, ...] | None:
    """Triggers at which keys are tested, ``None`` where they are ``select_every`` apart.

    Args:
        skips: pairs on published keys take no selection weight.
    """
    given = privacy.tests
    if given is None and not skips:
        return None
    if given is None or isinstance(given, int):
        usual = COMBINED_TESTS if privacy.combine else DEFAULT_TESTS
        return growing(triggers, min(given or usual, triggers))
    return given


@functools.lru_cache(maxsize=64)
def triggers_of_tests(triggers: int, select_every: int, schedule: tuple[int, ...] | None) -> Int64:
    """(tests,) window triggers of the tests, rising; read-only."""
    if schedule is None:
        steps = np.arange(1, -(-triggers // select_every) + 1, dtype=np.int64)
        at = np.minimum(steps * select_every, triggers)
    else:
        at = np.array(schedule, np.int64)
    at.setflags(write=False)
    return at


def shares_of_tests(tests: int) -> Float64:
    """(tests,) parts of the thresholds' delta, of sum at most 1: half of it at the last test, where
    most keys are selected."""
    if tests == 1:
        return np.ones(1)
    return np.append(np.full(tests - 1, (0.5 - _CUT) / (tests - 1)), 0.5)


def check_tests(privacy: "Privacy", triggers: int) -> None:
    """Refuse a list of tests that does not rise, or does not end at the last trigger."""
    given = privacy.tests
    if privacy.select_every is not None and (given is not None or privacy.skip):
        name = "skip" if given is None else "tests"
        raise UsageError(
            job_field(name), "says when keys are tested, and so does select_every", "keep one"
        )
    if given is None:
        return
    if isinstance(given, int):
        if given < 1:
            raise UsageError("mechanism.tests", "must be 1 or more", f"write {DEFAULT_TESTS}")
        return
    rises = all(a < b for a, b in itertools.pairwise(given))
    if not given or given[0] < 1 or not rises or given[-1] != triggers:
        mended = [*sorted({t for t in given if 0 < t < triggers}), triggers]
        raise UsageError(
            "mechanism.tests",
            "must be a list of triggers that rises from 1 or more to the last trigger of a "
            f"window, which is {triggers}",
            f"write {DEFAULT_TESTS}, for that many tests, or the list {mended}",
        )
