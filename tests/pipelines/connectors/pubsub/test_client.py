"""Questions to the service: names, and errors without its texts (more in test_source).

What pulls say of messages that are still to come; nothing is said before it is known.
"""

from types import SimpleNamespace

import pytest
from google.api_core import exceptions

from dpstream.accounting.errors import DpstreamError, RunError, UsageError
from dpstream.pipelines.connectors.pubsub import client as module
from dpstream.pipelines.connectors.pubsub.client import (
    ACK_MESSAGES,
    HORIZON_SECONDS,
    QUIET_SECONDS,
    Ages,
    acknowledge,
    answer_of,
    described,
    oldest_micros,
    publish_micros,
)


@pytest.mark.parametrize("name", ["s", "projects/p/topics/t", "projects/p/subscriptions/s/x"])
def test_a_subscription_has_its_full_name(name: str) -> None:
    with pytest.raises(UsageError) as error:
        described(name)
    assert error.value.field == "table.subscription"


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [(exceptions.NotFound("SECRET"), UsageError, "does not exist"),
     (exceptions.PermissionDenied("SECRET"), RunError, "may not be read"),
     (exceptions.ServiceUnavailable("SECRET"), RunError, "ServiceUnavailable")],
)  # fmt: skip
def test_errors_by_their_class(raised: Exception, kind: type[DpstreamError], words: str) -> None:
    def ask() -> None:
        raise raised

    with pytest.raises(kind) as error:
        answer_of(ask)
    assert words in str(error.value) and "SECRET" not in str(error.value)
    assert error.value.__context__ is None and error.value.__cause__ is None
    assert answer_of(lambda: 3) == 3


def test_acknowledgements_go_in_parts_and_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Service:
        def acknowledge(self, subscription: str, ack_ids: list[str], **_: object) -> None:
            sizes.append(len(ack_ids))
            if len(sizes) == 1:
                raise exceptions.ServiceUnavailable("away")

    monkeypatch.setattr(module, "client", Service)
    acknowledge("projects/p/subscriptions/s", ["x"] * (ACK_MESSAGES + 1))
    assert sizes == [ACK_MESSAGES, 1]


def test_a_pull_that_waited_says_that_nothing_waits() -> None:
    ages = Ages(0.0)
    assert ages.age(QUIET_SECONDS / 2) is None
    assert ages.age(QUIET_SECONDS) == 0
    ages.came(2.0, 500)
    assert ages.age(2.1) == 500


def test_the_oldest_of_the_horizon_counts() -> None:
    ages, now = Ages(0.0), 0.0
    for now, age in ((0.5, 900), (1.0, 300), (1.4, 500)):
        ages.came(now, age)
    while now < HORIZON_SECONDS:
        now += 0.5
        ages.came(now, 100)
        assert ages.age(now) is None or now > HORIZON_SECONDS
    assert ages.age(now + 0.1) == 900 or now + 0.1 - 0.5 > HORIZON_SECONDS
    ages.came(HORIZON_SECONDS + 5.0, 100)
    assert ages.age(HORIZON_SECONDS + 5.0) == 100


def test_a_fault_and_a_hold_make_it_unknown_again() -> None:
    ages = Ages(0.0, hold=5.0)
    assert ages.age(4.9) is None and ages.age(5.0) == 0
    ages.hold(8.0)
    ages.hold(6.0)
    assert ages.age(7.9) is None
    ages.failed(9.0)
    assert ages.age(9.5) is None and ages.age(9.0 + QUIET_SECONDS) == 0
    ages.gap(20.0)
    assert ages.age(20.0 + QUIET_SECONDS / 2) == 0


def test_when_messages_were_published() -> None:
    at = SimpleNamespace(publish_time=SimpleNamespace(seconds=3, nanos=4_999))
    assert publish_micros(at) == 3_000_004
    future = SimpleNamespace(publish_time=SimpleNamespace(seconds=1 << 40, nanos=0))
    assert oldest_micros([SimpleNamespace(message=future)]) == 0
