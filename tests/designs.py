"""Runs whose plan is resolved otherwise: what a test has changed in the design is in force."""

from typing import Any
from unittest import mock

import msgspec

from dpstream.accounting.plan.design import design_of
from dpstream.accounting.plan.plan import Plan


def redesigned(**changes: Any) -> Any:
    """A patch of every plan's design, also of plans that were resolved before."""
    made = property(lambda plan: msgspec.structs.replace(design_of(plan), **changes))
    return mock.patch.object(Plan, "design", made)
