"""Questions to the service: names, and errors without its texts (more in test_source)."""

import pytest
from google.api_core import exceptions

from dpstream.accounting.errors import DpstreamError, RunError, UsageError
from dpstream.pipelines.connectors.pubsub import client as module
from dpstream.pipelines.connectors.pubsub.client import (
    ACK_MESSAGES,
    _answer_of,
    acknowledge,
    described,
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
        _answer_of(ask)
    assert words in str(error.value) and "SECRET" not in str(error.value)
    assert error.value.__context__ is None and error.value.__cause__ is None
    assert _answer_of(lambda: 3) == 3


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
