"""Runs whose budget a test has changed: what a step reads as committed is replaced."""

from collections.abc import Callable
from typing import Any

from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.budget.calibration import Calibrated, calibrated
from dpstream.accounting.plan.plan import Plan


def budgeted(change: Callable[[Any], Budget]) -> Callable[[Plan, str], Calibrated]:
    """In place of ``calibrated``: the budget that ``change`` gives a plan."""
    return lambda plan, text: Calibrated(calibrated(plan, text).plan, change(plan))


def budgets(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same for what replaces ``allocate`` by ``make(allocate)``."""
    return lambda _: budgeted(make(allocate))
