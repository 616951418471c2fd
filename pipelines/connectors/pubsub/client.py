"""Pub/Sub's client as the source uses it: settings, seek, pulls and acknowledgements.

What the service says about an error never leaves: its texts may quote names or requests.

**Pulls** of one reader say something of the messages that are still to come (`Ages`).  A pull waits
at the service until there is something; it is a call in the background whose answer the reader
picks up, so that bundles stay short and no answer is thrown away by a timeout: messages of a lost
answer come again only after the acknowledgement deadline.
"""

import functools
import re
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import grpc
from google.api_core import exceptions
from google.api_core.gapic_v1.routing_header import to_grpc_metadata
from google.cloud.pubsub_v1 import SubscriberClient
from google.pubsub_v1.types import PullRequest, PullResponse

from dpstream.accounting.errors import DpstreamError, RunError, UsageError
from dpstream.state.connecting import PASSING, reach, retry

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
    """Return this process's client (of the emulator where PUBSUB_EMULATOR_HOST is set)."""
    return SubscriberClient()


def described(subscription: str) -> tuple[str, int]:
    """Return the topic of a usable subscription, and its deadline of acknowledgement in seconds.

    Raises:
        UsageError: no such subscription, or its settings lose messages.
        RunError: it cannot be reached.
    """
    if not _NAME.fullmatch(subscription):
        raise UsageError(
            "table.subscription", "is no full name", "write projects/PROJECT/subscriptions/NAME"
        )
    reach(client().transport.grpc_channel, "table.subscription", "Pub/Sub")
    description = answer_of(
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
    return str(description.topic), int(description.ack_deadline_seconds)


def seek(subscription: str, begin: int) -> None:
    """Deliver again all messages that were published from ``begin`` (micros) on.

    Raises:
        RunError: it cannot be reached.
    """
    at = datetime.fromtimestamp(begin / 1_000_000, UTC)
    request = {"subscription": subscription, "time": at}
    answer_of(lambda: client().seek(request=request, **_patience()))


def acknowledge(subscription: str, ack_ids: Sequence[str]) -> None:
    """Acknowledge messages that the runner has stored; a lost one comes again, and counts once."""
    for start in range(0, len(ack_ids), ACK_MESSAGES):
        chunk = list(ack_ids[start : start + ACK_MESSAGES])
        with suppress(exceptions.GoogleAPICallError, exceptions.RetryError):
            client().acknowledge(subscription=subscription, ack_ids=chunk, **_patience())


def _patience() -> dict[str, Any]:
    return {"timeout": START_SECONDS, "retry": retry(START_SECONDS)}


def _unusable(rule: str, fix: str) -> UsageError:
    return UsageError("table.subscription", rule, fix)


def answer_of(ask: Any) -> Any:
    """Return an answer of the service; the texts of its errors never leave."""
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


#: Messages of one pull (the service's most), and how long it waits (then it is asked again).
PULL_MESSAGES, PULL_SECONDS = 1_000, 90.0
#: How long the service may be away before the job fails; the pause after a fault.
LOST_SECONDS, PAUSE_SECONDS = 600.0, 1.0
#: A pull that waits for so long says that there is nothing.
QUIET_SECONDS = 1.0
#: An answer that was picked up later than that: nobody pulled in between.
GAP_SECONDS = 0.25
#: Ages of messages are looked at over that time.
HORIZON_SECONDS = 10.0
_PULL = "/google.pubsub.v1.Subscriber/Pull"


class Ages:
    """The greatest age of the messages that are still to come, from pulls alone.

    The service has no order and does not tell the oldest message that waits.  What is assumed: a
    pull that waited for `QUIET_SECONDS` says that nothing waits; while messages come, those
    to come are not older (at delivery) than the oldest of the last `HORIZON_SECONDS`.  Nothing
    is said before the first of the two has been seen, nor in the first ``hold`` seconds.
    """

    def __init__(self, now: float, hold: float = 0.0) -> None:
        self._begun, self._quiet_since, self._settled = now, now, False
        self._hold_until = now + hold
        self._ages: deque[tuple[float, int]] = deque()

    def hold(self, until: float) -> None:
        """Note that earlier messages may come again."""
        self._hold_until = max(until, self._hold_until)

    def came(self, now: float, oldest: int) -> None:
        """Note that messages came, the oldest of them ``oldest`` micros old."""
        self._quiet_since = now
        while self._ages and self._ages[-1][1] <= oldest:
            self._ages.pop()
        self._ages.append((now, oldest))

    def gap(self, now: float) -> None:
        """Note that nobody pulled for a while."""
        self._quiet_since = now

    def failed(self, now: float) -> None:
        """Note that a pull failed: no age is known until another one has waited."""
        self._quiet_since = self._begun = now
        self._settled = False

    def age(self, now: float) -> int | None:
        """Return the largest age (micros) of messages to come; ``None``: not known."""
        if now < self._hold_until:
            return None
        if now - self._quiet_since >= QUIET_SECONDS:
            self._ages.clear()
            self._settled = True
            return 0
        while self._ages and now - self._ages[0][0] > HORIZON_SECONDS:
            self._ages.popleft()
        self._settled = self._settled or now - self._begun > HORIZON_SECONDS
        return (self._ages[0][1] if self._ages else 0) if self._settled else None


class Puller:
    """Pulls messages of one reader in the background, one pull at a time.

    Args:
        subscription: full name of the subscription.
        hold: seconds in which messages may come again that a reader before this one had.
    """

    def __init__(self, subscription: str, hold: float = 0.0) -> None:
        channel = client().transport.grpc_channel
        self._pull = channel.unary_unary(
            _PULL,
            request_serializer=PullRequest.serialize,
            response_deserializer=PullResponse.pb().FromString,
        )
        self._request = PullRequest(subscription=subscription, max_messages=PULL_MESSAGES)
        self._metadata = [to_grpc_metadata([("subscription", subscription)])]
        self._call: Any = None
        self.used = time.monotonic()
        #: Messages that the reader will have claimed after this bundle; ``None``: not known.
        self.claimed: int | None = None
        self._ages = Ages(self.used, hold)
        self._answered = self.used
        self._lost_since: float | None = None
        self._pause_until = 0.0

    def take(self, most: int, seconds: float, more_seconds: float) -> tuple[list[Any], int | None]:
        """Return ``ReceivedMessage``s (protobuf) of the next ``seconds``, and `Ages.age`.

        After the first ones it waits only ``more_seconds``.

        Raises:
            RunError: the subscription is gone, may not be read, or is away for too long.
        """
        messages: list[Any] = []
        until = time.monotonic() + seconds
        while len(messages) < most and (left := until - time.monotonic()) > 0:
            answer = self._answer(left)
            if answer is None:
                break
            if answer:
                if not messages:
                    until = min(until, time.monotonic() + more_seconds)
                messages += answer
                self._ages.came(time.monotonic(), oldest_micros(answer))
        self.used = time.monotonic()
        self.claimed = None if self.claimed is None else self.claimed + len(messages)
        return messages, self._ages.age(self.used)

    def stands(self, claimed: int, hold: float) -> None:
        """Note that a bundle begins.

        Where the runner went back, or a bundle failed, the messages of this puller come again
        within ``hold`` seconds.
        """
        if self.claimed not in (None, claimed):
            self._ages.hold(time.monotonic() + hold)
        self.claimed = claimed

    def _answer(self, seconds: float) -> list[Any] | None:
        """The messages of the pull that waits; ``None``: it still does, or failed."""
        now = time.monotonic()
        if now < self._pause_until:
            time.sleep(min(seconds, self._pause_until - now))
            return None
        if self._call is None:
            self._ask()
        try:
            answer = self._call.result(timeout=seconds)
        except grpc.FutureTimeoutError:
            return None
        except (grpc.RpcError, grpc.FutureCancelledError):
            code = self._call.code()
            self._call = None
            self._failed(code)
            return None
        self._lost_since = None
        if time.monotonic() - self._answered > GAP_SECONDS:
            self._ages.gap(time.monotonic())
        self._ask()
        return list(answer.received_messages)

    def _ask(self) -> None:
        def note(_: Any) -> None:
            self._answered = time.monotonic()

        self._call = self._pull.future(self._request, timeout=PULL_SECONDS, metadata=self._metadata)
        self._call.add_done_callback(note)

    def _failed(self, code: grpc.StatusCode) -> None:
        now = time.monotonic()
        self._ages.failed(now)
        self._lost_since = self._lost_since or now
        self._pause_until = now + PAUSE_SECONDS
        if code.name not in PASSING or now - self._lost_since > LOST_SECONDS:
            raise RunError(
                "table.subscription",
                f"cannot be pulled ({code.name})",
                "check that it exists, the network and credentials, and run again",
            ) from None

    def close(self) -> None:
        """Give up the pull that waits; messages that it had come again."""
        if self._call is not None:
            self._call.cancel()
            self._call = None


def oldest_micros(messages: list[Any]) -> int:
    """Return the age of the oldest of some messages in micros, not below 0."""
    first = min(publish_micros(m.message) for m in messages)
    return max(0, time.time_ns() // 1_000 - first)


def publish_micros(message: Any) -> int:
    """Return the publish time of a message, in micros."""
    at = message.publish_time
    return int(at.seconds) * 1_000_000 + int(at.nanos) // 1_000
