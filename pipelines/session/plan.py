"""The plan of a question: its errors, what it would charge, which points lack budget.

A plan spends nothing and reads no record.
"""

from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.regions.boxes import volumes
from dpstream.accounting.regions.space import Space
from dpstream.accounting.regions.spent import Decision, charge
from dpstream.accounting.sessions.aggregates import Question
from dpstream.accounting.sessions.calibration import Expected, expected
from dpstream.accounting.strength import weaknesses_of_budget
from dpstream.pipelines.ask.acceptance import Acceptance
from dpstream.pipelines.formats.receipt import header_of
from dpstream.pipelines.session import sentences
from dpstream.pipelines.session.ask import SessionRequest, check, free_run, order_of, within_of
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.union import Union, assembled
from dpstream.pipelines.sql.receipt import Header
from dpstream.state.ledger.orders import Planned, enough_of, refusal_of
from dpstream.state.ledger.regions import stated_cost

#: Boxes without enough budget that are named.
_BOXES = 8


class Plan(NamedTuple):
    """The plan of a question, before it is asked.

    Attributes:
        question: the question.
        decision: the account's decision.
        errors: of each figure; none if the question would be refused.
        left: what is left of the allotment that would pay, in millionths; ``None``: points pay.
        regions: number of regions of the account now.
        after: number of regions after the charge.
        waste: charged points for each point that is asked, by snapping and ``cover``.
        acceptance: whether it would be answered now, and what its entry would state.
        answered: when it was answered already, so that it is free; empty if it was not.
        union: a count or sum from answers of disjoint parts, free; ``None``: there is none, or
            it was not searched for.
        searched: whether ``union`` was searched for.
        enough: the condition on initial budgets under which a refused question would be
            accepted; empty if there is none.
        rounding: a line for each column whose values are rounded down.
    """

    question: Question
    decision: Decision
    errors: list[Expected]
    left: int | None
    regions: int
    after: int
    waste: float
    acceptance: Acceptance
    answered: str
    union: Union | None
    searched: bool
    enough: str
    rounding: list[str]


def plan(open_table: OpenTable, request: SessionRequest, union: bool = False) -> Plan:
    """Return the plan of a question.

    Args:
        union: also search for answers of disjoint parts, which decodes every answer that read
            some of the points.

    Raises:
        DpstreamError: the question has no meaning, or the secret or table is missing.
    """
    check(open_table, request)
    question = request.question
    (decision, read), left, refusal = _decided(open_table, request)
    spent = open_table.account.spent(question.kind)
    errors, after, waste = list[Expected](), len(spent.amounts), 1.0
    if decision.accepted:
        errors = expected(open_table.space, question, read)
    if len(decision.charged):
        after = len(charge(spent, decision.charged, question.amount).amounts)
        waste = float(volumes(decision.charged).sum() / max(volumes(read).sum(), 1.0))
    accepted = _acceptance(open_table, request, refusal)
    return Plan(
        question,
        decision,
        errors,
        left,
        len(spent.amounts),
        after,
        waste,
        accepted,
        _answered(open_table, accepted.run_id),
        _union(open_table, request, read) if union else None,
        union,
        enough_of(open_table.space, question.kind, decision),
        sentences.rounding_of(open_table.space, question),
    )


def _decided(
    open_table: OpenTable, request: SessionRequest
) -> tuple[Planned, int | None, DpstreamError | None]:
    """Return what would be charged and read, what is left of the allotment that pays, and the
    refusal.  An allotment's draw charges no point.
    """
    question = request.question
    if not request.allotment:
        planned = open_table.account.plan(order_of(open_table, request))
        return planned, None, refusal_of(open_table.space, question.kind, planned.decision)
    read, left, refusal = open_table.space.everything[:0], None, None
    try:
        _, read, left = open_table.account.plan_draw(
            request.allotment, question.kind, question.amount, within_of(open_table, request)
        )
    except DpstreamError as error:
        refusal = error
    none = read[:0]
    decision = Decision(refusal is None, read, none, none, np.zeros(0, np.int64), left or 0)
    return Planned(decision, read), left, refusal


def _acceptance(
    open_table: OpenTable, request: SessionRequest, refusal: DpstreamError | None
) -> Acceptance:
    """Decide as `Register.begin` does: what was charged before continues, whatever is left."""
    question, run_id = request.question, free_run(open_table, request)
    if run_id is not None:
        return Acceptance(None, None, run_id, None)
    epsilon, delta, _ = stated_cost(question.kind, question.amount)
    charged = refusal is None and not request.allotment
    return Acceptance(refusal, (epsilon, delta) if charged else None, None, None)


def _answered(open_table: OpenTable, run_id: str | None) -> str:
    """Return when the run that continues was answered."""
    committed = None if run_id is None else open_table.answers.read(run_id)
    return "" if committed is None else header_of(committed.receipt, Header).answered


def _union(open_table: OpenTable, request: SessionRequest, read: Int64) -> Union | None:
    """Return the one figure of one cell, put together from other answers."""
    [figure, *more] = request.question.aggregates
    if more or request.question.cells.axes or figure.what not in ("count", "sum"):
        return None
    try:
        boxes = read if len(read) else request.selection.boxes(open_table.account)
        return assembled(open_table, boxes, figure)
    except DpstreamError:
        return None


def decision_as_builtins(space: Space, decision: Decision) -> dict[str, Any]:
    """Return a decision as values for JSON; of the boxes that lack budget the first eight."""
    rows = zip(decision.lacking[:_BOXES], decision.left[:_BOXES].tolist(), strict=True)
    return {
        "accepted": decision.accepted,
        "charged": sentences.boxes(space, decision.charged),
        "charged_boxes": len(decision.charged),
        "lacking": [
            {"where": sentences.box(space, box), "left": left / MICRO} for box, left in rows
        ],
        "lacking_boxes": len(decision.lacking),
        "largest": decision.largest / MICRO,
    }


def as_builtins(space: Space, plan: Plan) -> dict[str, Any]:
    """Return a plan as values for JSON, with its decision."""
    return {
        **decision_as_builtins(space, plan.decision),
        "question": sentences.question(plan.question),
        "kind": plan.question.kind,
        "amount": plan.question.amount / MICRO,
        "cells": plan.question.cells.count,
        "errors": [
            {
                "figure": error.name,
                "of": error.what,
                "sd": float(np.max(error.sd)),
                "within": error.most,
            }
            for error in plan.errors
        ],
        "allotment_left": None if plan.left is None else plan.left / MICRO,
        "regions": plan.regions,
        "regions_after": plan.after,
        "charged_points_per_asked": plan.waste,
        "acceptance": plan.acceptance.as_dict(),
        "answered": plan.answered,
        "union": None if plan.union is None else plan.union._asdict(),
        "union_searched": plan.searched,
        "enough": plan.enough,
        "warnings": weaknesses_of_budget(plan.question.kind, plan.question.amount / MICRO),
        "notes": plan.rounding,
    }
