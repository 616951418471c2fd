"""Sabotaged variants of skip, found in neighbours' streams on the outputs of one of them."""

from typing import Any

from dpstream.dp_transforms import step
from tests.audit.sabotage import Sabotage, replaced
from tests.audit.sabotaged_ranked import (
    tau_without,
    tested_at_every_trigger,
)
from tests.budgets import budgets
from tests.dp_transforms.test_every_path import (
    of_one_shard,
    recomputed_by_stamp,
    refund,
    reset_by_window,
)


def _noise_of_the_selection_stream(real: Any) -> Any:
    """The count of units has the noise of the selection stream, as it may without skip."""
    return lambda stepper, window, role, noise, tested=False: real(
        stepper, window, "selection" if role == "units" else role, noise, tested
    )


SKIPPING_SABOTAGED = {
    "an index comes back": Sabotage(refund, "skip", "ordinary", "index"),
    "weights anew in each window": Sabotage(reset_by_window, "skip", "ordinary", "index"),
    "late pairs take the index of their event": Sabotage(
        recomputed_by_stamp, "skip_units", "late", "index"
    ),
    "published by one key shard": Sabotage(of_one_shard, "skip", "ordinary", "index"),
    "units that continue the selection stream": replaced(
        step.Stepper, "_stream", _noise_of_the_selection_stream, "skip_units", "ordinary", "noise"
    ),
    "tested where no test is public": Sabotage(
        tested_at_every_trigger, "skip_combined", "ordinary", "selection"
    ),
    "threshold of skipped pairs without alone": replaced(
        step, "calibrated", budgets(tau_without("all")), "skip_combined", "ordinary", "threshold"
    ),
}  # fmt: skip
