"""A small gRPC server in Spanner's place that refuses everything with one status."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from google.cloud.spanner_v1 import Session

from tests.emulator import HOST

#: In the text of every refusal; it stands for a key of a row.
CANARY = "CANARY7741"


class _Refusing(grpc.GenericRpcHandler):
    """A server that makes sessions (if ``sessions``) and refuses all else with a status."""

    def __init__(self, code: grpc.StatusCode, sessions: bool) -> None:
        self._code, self._sessions = code, sessions

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = details.method.rsplit("/", 1)[1]
        made = Session.pb(Session(name="projects/p/instances/i/databases/d/sessions/s"))

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self._sessions and "Session" in method:
                return bytes(made.SerializeToString())
            context.abort(self._code, f"row {CANARY} of table Keys")
            raise AssertionError

        if method.startswith("Streaming"):
            return grpc.unary_stream_rpc_method_handler(answer)
        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def refusing(
    code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch, sessions: bool = True
) -> Iterator[None]:
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((_Refusing(code, sessions),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv(HOST, f"127.0.0.1:{port}")
    try:
        yield
    finally:
        server.stop(0).wait()
