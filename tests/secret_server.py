"""A Secret Manager on this machine: the service's own messages over gRPC, its faults on request.

Google has no emulator of it.  The real client talks to this server as to Google's, but for
encryption and credentials.
"""

import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import google_crc32c
import grpc
import pytest
from google.cloud.secretmanager_v1 import AccessSecretVersionRequest, AccessSecretVersionResponse

from dpstream.dp_transforms.noise import secret_source

SERVICE = "google.cloud.secretmanager.v1.SecretManagerService"
#: A version of a secret, and a reference to it.
NAME = "projects/my-project/secrets/noise/versions/3"
REFERENCE = f"gcp:{NAME}"


class SecretServer:
    """Versions of secrets and what goes wrong with the next calls.

    Attributes:
        secrets: payload of each version that exists.
        faults: codes to answer the next calls with, first to last; the text quotes the payload.
        always: a code to answer every call with.
        delays: seconds that the next calls wait, first to last.
        damage: flip a bit of the payload after the checksum was taken.
        no_checksum: leave the checksum out.
        calls: names that were asked for.
    """

    def __init__(self) -> None:
        self.secrets: dict[str, bytes] = {}
        self.faults: list[grpc.StatusCode] = []
        self.always: grpc.StatusCode | None = None
        self.delays: list[float] = []
        self.damage = self.no_checksum = False
        self.calls: list[str] = []

    def answer(
        self, request: AccessSecretVersionRequest, context: grpc.ServicerContext
    ) -> AccessSecretVersionResponse:
        """AccessSecretVersion."""
        self.calls.append(request.name)
        if self.delays:
            time.sleep(self.delays.pop(0))
        data = self.secrets.get(request.name)
        code = self.faults.pop(0) if self.faults else self.always
        if code is None and data is None:
            code = grpc.StatusCode.NOT_FOUND
        if code is not None or data is None:
            context.abort(code, f"{request.name} of someone@example.com holds {data!r}")
        assert data is not None
        payload = {"data": data, "data_crc32c": google_crc32c.value(data)}
        if self.no_checksum:
            del payload["data_crc32c"]
        if self.damage:
            payload["data"] = bytes([data[0] ^ 1]) + data[1:]
        return AccessSecretVersionResponse(name=request.name, payload=payload)


@contextmanager
def secret_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SecretServer]:
    """A running server that this process asks instead of Google's; retries are short."""
    monkeypatch.setattr(secret_source, "RETRY_SECONDS", 1.0)
    monkeypatch.setattr(secret_source, "FIRST_WAIT", 0.02)
    service = SecretServer()
    handler = grpc.unary_unary_rpc_method_handler(
        service.answer,
        request_deserializer=AccessSecretVersionRequest.deserialize,
        response_serializer=AccessSecretVersionResponse.serialize,
    )
    server = grpc.server(futures.ThreadPoolExecutor(2))
    methods = {"AccessSecretVersion": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("localhost:0")
    server.start()
    monkeypatch.setenv(secret_source.EMULATOR, f"localhost:{port}")
    try:
        yield service
    finally:
        server.stop(1).wait()
