"""Whether an execution would be accepted now, and what it would cost: the rules of `execute`,
without a charge.  Nothing is written, and records are at most hashed.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.tabulation.plan import TablePlan
from dpstream.dp_transforms.noise.key_source import KeySource
from dpstream.pipelines.connectors.dead_letters import check_dead_letters
from dpstream.pipelines.jobs.tables import LedgerConfig
from dpstream.pipelines.operate.acceptance import Acceptance, Request, of_requests
from dpstream.pipelines.tabulation.book import InLedger
from dpstream.pipelines.tabulation.dead_letters import dead_letter_folder
from dpstream.pipelines.tabulation.draft import left_over, standing
from dpstream.pipelines.tabulation.execute import charge_of, check_draft, request_of, stands
from dpstream.pipelines.tabulation.inputs import Inputs
from dpstream.state.ledger.answers import Register
from dpstream.state.ledger.open import open_ledger
from dpstream.state.run_ids import new_run_id


def acceptance(
    inputs: Inputs, plan: TablePlan, key: KeySource | None, place: LedgerConfig | None, fresh: bool,
    out: Path | None = None,
) -> Acceptance:  # fmt: skip
    """Whether an execution would be charged now, and what it would cost.

    Records are hashed only where the ledger holds a charge of the same plan, or OUT one.

    Args:
        key: where the noise key is; ``None``: what was executed before is not told apart.
        out: the folder that would be made; ``None``: a new one.
    """
    charge = charge_of(plan)(new_run_id())

    def fingerprint() -> str:
        if key is None:
            raise UsageError(
                "--key-file", "is required where these tables were charged before: it tells whether"
                " they were of the same records", "give the noise key, as for `execute`",
            )  # fmt: skip
        with key.ring() as keys:
            return request_of(inputs, plan, keys)

    run_id, refusal = None, None
    try:
        if out is not None:
            run_id = _check_out(out, place, plan, fingerprint, fresh)
    except DpstreamError as error:
        refusal = error
    if place is None:
        cost = (charge.epsilon, charge.delta) if run_id is None else None
        accepted = Acceptance(None, cost, run_id, None)
    else:
        accepted = of_requests(place, [Request(charge, fingerprint)], fresh)
    return accepted if refusal is None else accepted._replace(refusal=refusal, cost=None)


def _check_out(
    out: Path, place: LedgerConfig | None, plan: TablePlan, fingerprint: Callable[[], str],
    fresh: bool,
) -> str | None:  # fmt: skip
    """The run id of what OUT or its draft holds of this execution; ``None``: nothing.

    Raises:
        DpstreamError: `execute` would refuse OUT.
    """
    check_dead_letters(dead_letter_folder(out), "--dead-letter")
    begun, kept = left_over(out)
    made = standing(out)
    if made is None:
        if begun is not None or kept is not None:
            check_draft(begun, kept, fingerprint(), fresh)
        return None if begun is None or fresh else begun.run_id
    request, known = fingerprint(), None
    if place is not None:
        with contextlib.closing(open_ledger(place.path, place.data_set, looking=True)) as ledger:
            book = InLedger(Register(ledger, "table"), charge_of(plan), place.limit.pair)
            known = book.known(request)
    stands(out, made, request, fresh, place is not None, known)
    return made.run_id
