"""What a sabotaged variant is, and the mistakes that both tables of them make."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import msgspec

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


class Sabotage(NamedTuple):
    """A patch, the plan and kind of neighbours that show it, and the rule it must breach."""

    patch: Patch
    plan: str
    kind: str
    rule: str


def replaced(
    owner: Any, name: str, make: Callable[[Any], Any], plan: str, kind: str, rule: str
) -> Sabotage:
    """A patch with one function replaced by ``make(function)``, shown by (plan, kind, rule)."""

    @contextlib.contextmanager
    def patch() -> Iterator[None]:
        with mock.patch.object(owner, name, make(getattr(owner, name))):
            yield

    return Sabotage(patch, plan, kind, rule)


def half_scale(real: Any) -> Any:
    """Samplers of half the sd."""
    return lambda noise, *rest: real(msgspec.structs.replace(noise, sigma=noise.sigma / 2), *rest)


def with_tau(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """A budget whose thresholds are ``change(plan, budget)``."""

    def make(real: Any) -> Any:
        def allocate(plan: Any) -> Any:
            budget = real(plan)
            return msgspec.structs.replace(budget, tau=change(plan, budget))

        return allocate

    return make
