"""The strength of a guarantee: what every system warns of, and what it refuses.

Two figures have a plain meaning.  With (epsilon, 0), whoever sees the output may change the odds
that they give to "this unit is in the data" by a factor of at most e^epsilon (Wasserman and Zhou
2010, theorem 2.4).  A mechanism that publishes all records of each unit with chance delta, and
nothing else, is (0, delta)-differentially private: delta bounds that chance and nothing smaller
does.  So an epsilon above `LARGE_EPSILON` or a delta above `LARGE_DELTA` is warned of, and a delta
above `MOST_DELTA` is refused unless whoever asks says that they want it (``allow_large_delta``).
An epsilon is never refused here: a large one is still a bound of the odds.

Guarantees that are stated in other terms (mu of Gaussian noise, rho of zCDP) are judged by their
epsilon at `STATED_DELTA`.
"""

import math

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.figures import human, up
from dpstream.accounting.gaussian import cdp_eps, epsilon_of

LARGE_EPSILON, LARGE_DELTA, MOST_DELTA = 10.0, 1e-4, 1e-2
#: The delta at which a mu or a rho is judged.
STATED_DELTA = 1e-9
_SMALLER = "use a delta far below 1 / number of units, such as 1e-8"
#: Why a delta is refused; without its value, which a statement's error must not repeat.
TOO_LARGE = (
    f"is above {MOST_DELTA:g}: it allows a program to reveal everything about more than one unit "
    f"in {1 / MOST_DELTA:g}"
)
#: Beyond this epsilon e^epsilon is beyond a float's range.
_LARGEST = 700.0


class WeakGuaranteeWarning(UserWarning):
    """Warns that a guarantee promises little; issued by the Python interface."""


def weaknesses(epsilon: float, delta: float, subject: str = "") -> list[str]:
    """Return warnings for whoever relies on (epsilon, delta); empty where it promises enough.

    Args:
        subject: text after each figure: what has this guarantee, or what epsilon follows from.
    """
    out = list[str]()
    if epsilon > LARGE_EPSILON:
        out.append(
            f"epsilon {_figure(epsilon)}{subject} promises little: what is published may change an "
            "attacker's odds that somebody is in the data by a factor of up to "
            f"{_odds(epsilon)}; an epsilon of 1 is strong, one above {LARGE_EPSILON:g} is weak"
        )
    if delta > LARGE_DELTA:
        out.append(f"delta {up(delta)}{subject} promises little: {_reveals(delta)}; {_SMALLER}")
    return out


def limit_weaknesses(limit: tuple[float, float]) -> list[str]:
    """Return the same for an account's limit, which is the guarantee of all its runs together."""
    return weaknesses(*limit, " of the account's limit")


def weaknesses_of_mu(mu: float) -> list[str]:
    """Return the same for a Gaussian-DP parameter."""
    epsilon = epsilon_of(mu, STATED_DELTA)
    return weaknesses(epsilon, STATED_DELTA, _computed_from(f"mu {up(mu, 4)}"))


def weaknesses_of_rho(rho: float) -> list[str]:
    """Return the same for zCDP; ``rho`` may be infinite."""
    epsilon = math.inf if math.isinf(rho) else cdp_eps(rho, STATED_DELTA)
    return weaknesses(epsilon, STATED_DELTA, _computed_from(f"rho {up(rho, 4)}"))


def weaknesses_of_budget(kind: str, amount: float) -> list[str]:
    """Return the same for a session's budget, of kind ``epsilon`` (pure: it has no delta) or
    ``rho``.
    """
    return weaknesses_of_rho(amount) if kind == "rho" else weaknesses(amount, 0.0)


def refuses(delta: float, allow_large_delta: bool) -> bool:
    """Return whether a delta is refused; an invalid one is refused elsewhere."""
    return MOST_DELTA < delta < 1 and not allow_large_delta


def check_delta(
    delta: float, allow_large_delta: bool, field: str = "delta", switch: str = "allow_large_delta"
) -> None:
    """Refuse a delta that lets a large share of units be revealed; before anything is charged.

    Args:
        allow_large_delta: whoever asks says that they want it.
        field: what the caller calls the delta; switch: what sets ``allow_large_delta``.

    Raises:
        PolicyError: the delta is refused.
    """
    if refuses(delta, allow_large_delta):
        raise PolicyError(field, TOO_LARGE, fix_of(switch))


def fix_of(switch: str) -> str:
    """Return the option to type instead."""
    return f"{_SMALLER}, or set {switch}"


def _computed_from(cost: str) -> str:
    return f" (of {cost}, at delta {STATED_DELTA:g})"


def _figure(epsilon: float) -> str:
    return "inf" if math.isinf(epsilon) else up(epsilon, 4)


def _odds(epsilon: float) -> str:
    """e^epsilon to three digits, rounded up."""
    if epsilon > _LARGEST:
        return "infinity" if math.isinf(epsilon) else f"1e{math.ceil(epsilon / math.log(10))}"
    return human(float(up(math.exp(epsilon), 3)))


def _reveals(delta: float) -> str:
    """What a delta allows; one unit in how many is rounded down: the share is never understated."""
    many = math.floor(1 / delta * (1 + 1e-9))
    share = "every second unit or more" if many < 3 else f"one unit in {many:,}"
    return f"it allows a program to reveal everything about {share}"
