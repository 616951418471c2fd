"""How many equal questions a limit allows, by our filters and by other libraries' accountants:
``python -m tests.bench.limits``.

The filters are valid for an analyst who chooses each question by the answers before it.  The
privacy loss distributions of dp-accounting (PipelineDP's accountant) and OpenDP's zCDP are valid
for questions that are fixed beforehand.  Plain questions have Laplace noise of an epsilon, Gaussian
questions have Gaussian noise of a mu.
"""

import functools
import json
import math

import opendp.prelude as opendp
from dp_accounting.pld import privacy_loss_distribution as pld

from dpstream.accounting.composition import Limit, Total, default_parts, largest_count
from tests.accounting.adversary import Charge, gauss, plain

LIMITS = [(1.0, 1e-6), (4.0, 1e-6), (8.0, 1e-6)]
QUESTIONS = {
    "epsilon 0.1": plain(0.1), "epsilon 0.5": plain(0.5), "epsilon 1": plain(1.0),
    "mu 0.05": gauss(0.05), "mu 0.1": gauss(0.1), "mu 0.3": gauss(0.3),
}  # fmt: skip
_INTERVAL = 1e-3


@functools.cache
def _distribution(charge: Charge) -> pld.PrivacyLossDistribution:
    if charge.mu is None:
        return pld.from_laplace_mechanism(
            1 / charge.epsilon, value_discretization_interval=_INTERVAL
        )
    return pld.from_gaussian_mechanism(1 / charge.mu, value_discretization_interval=_INTERVAL)


def by_distributions(charge: Charge, epsilon: float, delta: float) -> int:
    """By composed privacy loss distributions."""

    def fits(times: int) -> bool:
        composed = _distribution(charge).self_compose(times)
        return bool(composed.get_delta_for_epsilon(epsilon) <= delta)

    return largest_count(fits)


def by_opendp(charge: Charge, epsilon: float, delta: float) -> int:
    """By the sum of epsilons, or of rho converted as OpenDP converts it, whichever allows more."""
    opendp.enable_features("contrib")
    space = opendp.atom_domain(T=float, nan=False), opendp.absolute_distance(T=float)

    def fits(times: int) -> bool:
        if charge.mu is None and times * charge.epsilon <= epsilon * (1 + 1e-12):
            return True
        size = charge.epsilon if charge.mu is None else charge.mu
        # zCDP adds up: one Gaussian of the sum's rho is the same.
        noise = opendp.m.make_gaussian(*space, scale=1 / (size * math.sqrt(times)))
        pair = opendp.c.make_fix_delta(opendp.c.make_zCDP_to_approxDP(noise), delta).map(1.0)
        return bool(pair[0] <= epsilon)

    return largest_count(fits)


def table() -> list[dict[str, object]]:
    """A row for each limit and question."""
    rows = []
    for epsilon, delta in LIMITS:
        limit = Limit(epsilon, delta, default_parts(epsilon, delta))
        nothing = Total(order=limit.parts.order)
        for name, charge in QUESTIONS.items():
            rows.append(
                {
                    "limit": f"({epsilon:g}, {delta:g})",
                    "question": name,
                    "dpstream": limit.further_charges(nothing, charge),
                    "pipelinedp": by_distributions(charge, epsilon, delta),
                    "opendp": by_opendp(charge, epsilon, delta),
                }
            )
    return rows


if __name__ == "__main__":
    for row in table():
        print(json.dumps(row))
