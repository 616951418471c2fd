"""The dry run of a question about a table in memory: `dpstream.plan`.

The plan uses the names and types of columns, the account and the secret, never a row.  So it is the
same for all tables with these columns.  It writes nothing.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dpstream.accounting.errors import DpstreamError, required
from dpstream.accounting.query.families import outlook
from dpstream.accounting.strength import check_delta, weaknesses
from dpstream.pipelines.ask.acceptance import (
    Acceptance,
    request_for,
    requests_acceptance,
    room_of,
)
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.frames.project_file import DataSetAccount, checked_account
from dpstream.pipelines.frames.question import Arguments, question_of
from dpstream.pipelines.frames.table import without_rows
from dpstream.pipelines.render.question_plan import question_text
from dpstream.state.ledger.open import read_history

if TYPE_CHECKING:
    from dpstream.state.ledger.events import Charge

#: Of a charge that is never made.
_NO_RUN = "0" * 32


class QuestionPlan(NamedTuple):
    """The cost of a question, whether it would be answered, and how exactly; public.

    Attributes:
        acceptance: whether the question would be answered now; several properties below read it.
        cost: ``epsilon``, ``delta``, ``mu`` and ``threshold_delta`` of one answer; ``None`` where
            the arguments make no question.
        left: what the account would have left after the answer: ``epsilon`` of pure noise, or
            ``mu`` of Gaussian noise; ``None`` without an account, or if the question is refused.
        columns: for each column of the answer its ``name``, ``kind``, whether bounds are
            ``automatic``, which were ``assumed`` then, with fewer than about how many units that
            have a value the figure is missing (``null_below``; ``None``: with no number), and
            ``parts``, each with ``sd`` of its noise and ``within``, the half-width of its 95%
            interval.  If ``times`` is not ``None``, multiply both by what the question will choose:
            ``low`` and ``high`` of the bounds, ``rows`` of a unit in a key, ``keys`` of a unit.  A
            mean has two parts, its sum and its count.
        thresholds: how keys are selected, for the fewest and for the most keys of a unit where
            their number is chosen; empty where all keys are public, or there is no key.
            ``groups``: the keys of a unit that count; ``tau``: the threshold in units; the number
            of units with which a key has a 50% chance of being published, if each unit has that
            key alone (``even_chance_one_group``) or as many keys as count
            (``even_chance_all_groups``).
        warnings: about what the guarantee, or the account's limit, promises.
        families: for each family of noise that the question can use: ``mechanism``, whether it is
            ``taken``, its ``columns`` as above, its ``cost``, and how many more such ``questions``
            the account's limit allows (``None`` without an account).
    """

    acceptance: Acceptance
    cost: dict[str, Any] | None
    left: dict[str, float] | None
    columns: list[dict[str, Any]]
    thresholds: list[dict[str, float]]
    warnings: list[str]
    families: Sequence[dict[str, Any]] = ()

    @property
    def accepted(self) -> bool:
        """Return whether the question would be answered."""
        return self.acceptance.refusal is None

    @property
    def refusal(self) -> DpstreamError | None:
        """The error that the question would raise before it reads a row; ``None`` if accepted."""
        return self.acceptance.refusal

    @property
    def charge(self) -> tuple[float, float] | None:
        """(epsilon, delta) that would be charged; ``None`` if the question is refused or free."""
        return self.acceptance.cost

    @property
    def answered(self) -> bool:
        """Return whether the question was answered before: the same answer is given again at no
        charge.
        """
        return self.acceptance.answered

    @property
    def account(self) -> dict[str, Any] | None:
        """The account's state, as in `ask.acceptance.Acceptance`: ``data_set``, ``charges`` so far,
        ``limit``, the share of it that is ``used`` now and ``with_this`` answer, the ``filter``
        that accepts it, and how many ``more`` like it; ``None`` if there is no account, or it
        cannot be read.
        """
        return self.acceptance.account

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as values for JSON."""
        return {**self._asdict(), "acceptance": self.acceptance.as_dict()}

    def __repr__(self) -> str:
        """Describe acceptance, account, cost, thresholds and noise, in this order."""
        return question_text(self.as_dict())


def planned(
    data: Any,
    arguments: Callable[[], Arguments],
    account: DataSetAccount | None,
    how: Asking,
    allow_large_delta: bool,
) -> QuestionPlan:
    """Return the plan of a question; see `frames.one_shot` for its arguments."""
    try:
        question, _ = question_of(without_rows(data), arguments())
    except DpstreamError as error:
        return QuestionPlan(Acceptance(error, None, None, None), None, None, [], [], [])
    plan, room = question.gridded.plan, None
    charge = question.charge(_NO_RUN, question.identity(question.unit))
    acceptance = Acceptance(None, (charge.epsilon, charge.delta), None, None)
    try:
        check_delta(plan.delta, allow_large_delta, switch="allow_large_delta=True")
        account = checked_account(account, how)
        if account is not None:
            identity = question.identity(account.place.unit_in(question.unit))
            with contextlib.suppress(DpstreamError):  # which is the refusal below
                room = room_of(read_history(account.place), identity)
            question, parts = question.taking(question.families.taken(room)), question.request
            charge = question.charge(_NO_RUN, identity)
            request = request_for(charge, lambda: parts, account.secret, how.as_of)
            acceptance = requests_acceptance(account.place, [request], how.fresh)
            if acceptance.cost is None and acceptance.run_id is not None:  # charged before
                charge = required(
                    read_history(account.place).find(acceptance.run_id), "it is charged"
                )
                question = question.taking(question.families.of(charge.mu))
    except DpstreamError as error:
        acceptance = Acceptance(error, None, None, None)
    cost = {key: getattr(charge, key) for key in ("epsilon", "delta", "mu", "threshold_delta")}
    columns, thresholds = outlook(question.gridded)
    families = question.families.described(question.gridded, room)
    groups = [columns, *(family["columns"] for family in families)]
    for column in (column for each in groups for column in each):
        if column["kind"] == "count":  # it has a default bound instead, see `answer`
            column["null_below"] = None
        for part in column["parts"]:
            part["times"] = part["times"] and part["times"].replace("groups", "keys")
    return QuestionPlan(
        acceptance,
        cost,
        None if account is None else _left(acceptance, charge, account),
        columns,
        thresholds,
        [*weaknesses(plan.epsilon, plan.delta), *acceptance.warnings],
        families,
    )


def _left(
    acceptance: Acceptance, charge: "Charge", account: DataSetAccount
) -> dict[str, float] | None:
    if acceptance.refusal is not None:
        return None
    history = read_history(account.place)
    spent = history.spent
    for more in [] if acceptance.cost is None else [charge]:
        spent = spent.plus(more)
    return history.filters.left(spent.fullest(history.filters).total)
