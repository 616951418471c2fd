"""Pub/Sub's client as the source uses it: a subscription's settings, seek, acknowledgements.

What the service says about an error never leaves: its texts may quote names or requests.
"""

import functools
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from google.api_core import exceptions
from google.cloud.pubsub_v1 import SubscriberClient

from dpstream.accounting.errors import DpstreamError, RunError, UsageError
from dpstream.pipelines.connectors.google_client import retry
from dpstream.state.connecting import reach

#: Messages of one acknowledgement.
ACK_MESSAGES = 1_000
#: Seconds that a question may take.
START_SECONDS = 15.0
#: An acknowledgement waits until the runner has stored the bundle.
LEAST_ACK_DEADLINE = 60
_NAME = re.compile(r"projects/[^/]+/subscriptions/[^/]+")
_CREATE = (
    "create one with `gcloud pubsub subscriptions create NAME --topic=TOPIC --ack-deadline=60 "
    "--retain-acked-messages --message-retention-duration=7d`"
)


@functools.lru_cache(maxsize=1)
def client() -> Any:
    """This process's client (of the emulator where PUBSUB_EMULATOR_HOST is set)."""
    return SubscriberClient()


class Subscription(NamedTuple):
    """A subscription: its topic, and the seconds after which a message that nobody acknowledged
    comes again."""

    topic: str
    ack_deadline: int


def described(subscription: str) -> Subscription:
    """A subscription that can be used.

    Raises:
        UsageError: no such subscription, or its settings lose messages.
        RunError: it cannot be reached.
    """
    if not _NAME.fullmatch(subscription):
        raise UsageError(
            "table.subscription", "is no full name", "write projects/PROJECT/subscriptions/NAME"
        )
    reach(client().transport.grpc_channel, "table.subscription", "Pub/Sub")
    description = _answer_of(
        lambda: client().get_subscription(subscription=subscription, **_patience())
    )
    if (
        description.push_config.push_endpoint
        or description.bigquery_config.table
        or (description.cloud_storage_config.bucket)
    ):
        raise _unusable("is delivered elsewhere, not pulled", _CREATE)
    if description.topic == "_deleted-topic_":
        raise _unusable("belongs to a topic that was deleted", _CREATE)
    if not description.retain_acked_messages and not description.topic_message_retention_duration:
        raise _unusable(
            "forgets acknowledged messages, which a restart reads again",
            "`gcloud pubsub subscriptions update NAME --retain-acked-messages "
            "--message-retention-duration=7d`",
        )
    if description.ack_deadline_seconds < LEAST_ACK_DEADLINE:
        raise _unusable(
            f"has an acknowledgement deadline below {LEAST_ACK_DEADLINE} s",
            "`gcloud pubsub subscriptions update NAME --ack-deadline=60`",
        )
    return Subscription(str(description.topic), int(description.ack_deadline_seconds))


def seek(subscription: str, begin: int) -> None:
    """Deliver again all messages that were published from ``begin`` (micros) on.

    Raises:
        RunError: it cannot be reached.
    """
    at = datetime.fromtimestamp(begin / 1_000_000, UTC)
    request = {"subscription": subscription, "time": at}
    _answer_of(lambda: client().seek(request=request, **_patience()))


def acknowledge(subscription: str, ack_ids: Sequence[str]) -> None:
    """The runner has stored these messages; what cannot be told comes again, and counts once."""
    for start in range(0, len(ack_ids), ACK_MESSAGES):
        chunk = list(ack_ids[start : start + ACK_MESSAGES])
        with suppress(exceptions.GoogleAPICallError, exceptions.RetryError):
            client().acknowledge(subscription=subscription, ack_ids=chunk, **_patience())


def _patience() -> dict[str, Any]:
    return {"timeout": START_SECONDS, "retry": retry(START_SECONDS)}


def _unusable(rule: str, fix: str) -> UsageError:
    return UsageError("table.subscription", rule, fix)


def _answer_of(ask: Any) -> Any:
    """An answer of the service; its errors' texts never leave."""
    refused: DpstreamError
    try:
        return ask()
    except exceptions.NotFound:
        refused = _unusable("does not exist", _CREATE)
    except (exceptions.PermissionDenied, exceptions.Unauthenticated):
        refused = RunError("table.subscription", "may not be read", "grant roles/pubsub.editor")
    except exceptions.GoogleAPIError as error:
        kind = type(error).__name__
        refused = RunError(
            "table.subscription", f"cannot be reached ({kind})", "check network and credentials"
        )
    raise refused
