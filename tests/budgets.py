"""Runs whose budget or design a test has changed: what a step reads, or a plan resolves to."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec

from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.budget.calibration import Calibrated, calibrated
from dpstream.accounting.plan.design import design_of
from dpstream.accounting.plan.plan import Plan


def budgeted(change: Callable[[Any], Budget]) -> Callable[[Plan, str], Calibrated]:
    """In place of ``calibrated``: the budget that ``change`` gives a plan."""
    return lambda plan, text: Calibrated(calibrated(plan, text).plan, change(plan))


def budgets(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same for what replaces ``allocate`` by ``make(allocate)``."""
    return lambda _: budgeted(make(allocate))


def redesigned(**changes: Any) -> Any:
    """A patch of every plan's design, also of plans that were resolved before."""
    made = property(lambda plan: msgspec.structs.replace(design_of(plan), **changes))
    return mock.patch.object(Plan, "design", made)
