"""A Storage Write API on this machine: the service's own messages over gRPC, faults on request.

Google has no emulator of it.  The real client talks to this server as to Google's, but for
encryption and credentials.  It decodes rows by the schema that each connection sends and applies
them as upserts by the table's key, which is what the service documents; whether the service does
so is not shown here.
"""

from collections import defaultdict
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pyarrow as pa
from google.cloud.bigquery_storage_v1 import BigQueryWriteClient
from google.cloud.bigquery_storage_v1.types import (
    AppendRowsRequest,
    AppendRowsResponse,
    GetWriteStreamRequest,
    WriteStream,
    WriteStreamView,
)
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

#: Types of a table's columns, by those of Arrow; bytes are text of hex digits.
TYPES = {
    "fixed_size_binary[16]": "STRING", "string": "STRING", "timestamp[us, tz=UTC]": "TIMESTAMP",
    "int32": "INT64", "int64": "INT64", "double": "DOUBLE", "bool": "BOOL",
}  # fmt: skip
SERVICE = "google.cloud.bigquery.storage.v1.BigQueryWrite"
#: The fault of a connection: refuse at once, apply and end without an answer, or answer an error.
REFUSE, LOSE_ANSWER, ANSWER_ERROR, ROW_ERROR = "refuse", "lose answer", "answer error", "row error"


class WriteServer:
    """Tables and what goes wrong with the next connections.

    Attributes:
        keys: the primary key of each table that exists.
        columns: table -> column -> (type, mode).
        tables: table -> key -> row.
        faults: of the next connections, first to last; a code belongs to it.
        requests: all that were sent: (stream, streams named in the header, number of rows, bytes).
        applied: how often each key of a table was applied.
    """

    def __init__(self, **keys: str) -> None:
        self.keys = keys
        self.columns: dict[str, dict[str, tuple[str, str]]] = {}
        self.tables: dict[str, dict[Any, dict[str, Any]]] = {name: {} for name in keys}
        self.faults: list[tuple[str, int]] = []
        self.requests: list[tuple[str, list[str], int, int]] = []
        self.applied: dict[str, dict[Any, int]] = {name: defaultdict(int) for name in keys}

    def define(self, table: str, schema: pa.Schema) -> None:
        """Say a table's columns; others are not found."""
        self.columns[table] = {f.name: (TYPES[str(f.type)], "NULLABLE") for f in schema}

    def get_write_stream(
        self, request: GetWriteStreamRequest, context: grpc.ServicerContext
    ) -> WriteStream:
        """GetWriteStream: with the view FULL it says the table's columns."""
        table = request.name.split("/")[5]
        if table not in self.columns:
            context.abort(grpc.StatusCode.NOT_FOUND, "CANARY7741")
        fields = [
            {"name": name, "type_": kind, "mode": mode}
            for name, (kind, mode) in self.columns[table].items()
        ]
        full = request.view == WriteStreamView.FULL
        return WriteStream(name=request.name, table_schema={"fields": fields if full else []})

    def append_rows(
        self, requests: Iterator[AppendRowsRequest], context: grpc.ServicerContext
    ) -> Iterator[AppendRowsResponse]:
        """AppendRows."""
        fault, code = self.faults.pop(0) if self.faults else ("", 0)
        if fault == REFUSE:
            status = next(s for s in grpc.StatusCode if s.value[0] == code)
            context.abort(status, "CANARY7741")
        # The client adds an empty value of the same name, as it does for Google's own helper.
        given = context.invocation_metadata()
        where = [str(v) for k, v in given if k == "x-goog-request-params" and v]
        for request in requests:
            rows = list(request.proto_rows.rows.serialized_rows)
            size = len(AppendRowsRequest.serialize(request))
            self.requests.append((request.write_stream, where, len(rows), size))
            if fault in (ANSWER_ERROR, ROW_ERROR):
                error = {"code": code, "message": "CANARY7741"}
                yield AppendRowsResponse(
                    **({"error": error} if fault == ANSWER_ERROR else
                       {"row_errors": [{"index": 0, "message": "CANARY7741"}]})
                )  # fmt: skip
                return
            self._apply(request.write_stream, request, rows)
            if fault == LOSE_ANSWER:
                context.abort(grpc.StatusCode.UNAVAILABLE, "CANARY7741")
            yield AppendRowsResponse(append_result={}, write_stream=request.write_stream)

    def _apply(self, stream: str, request: AppendRowsRequest, rows: list[bytes]) -> None:
        parts = stream.split("/")
        assert parts[::2] == ["projects", "datasets", "tables", "streams"]
        assert parts[-1] == "_default"
        table = parts[5]
        described = AppendRowsRequest.pb(request).proto_rows.writer_schema.proto_descriptor
        file = descriptor_pb2.FileDescriptorProto(name="sent.proto", syntax="proto2")
        file.message_type.append(described)
        pool = descriptor_pool.DescriptorPool()
        pool.Add(file)
        kind = message_factory.GetMessageClass(pool.FindMessageTypeByName(described.name))
        for data in rows:
            message = kind.FromString(data)
            row = {f.name: value for f, value in message.ListFields()}
            assert row.pop("_CHANGE_TYPE") == "UPSERT"
            key = row[self.keys[table]]
            self.tables[table][key] = row
            self.applied[table][key] += 1


@contextmanager
def running(service: WriteServer) -> Iterator[str]:
    """The server's address."""
    handler = grpc.stream_stream_rpc_method_handler(
        service.append_rows,
        request_deserializer=AppendRowsRequest.deserialize,
        response_serializer=AppendRowsResponse.serialize,
    )
    look = grpc.unary_unary_rpc_method_handler(
        service.get_write_stream,
        request_deserializer=GetWriteStreamRequest.deserialize,
        response_serializer=WriteStream.serialize,
    )
    server = grpc.server(futures.ThreadPoolExecutor(4))
    methods = {"AppendRows": handler, "GetWriteStream": look}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def client(address: str) -> BigQueryWriteClient:
    """The real client, of a server on this machine."""
    transport = BigQueryWriteClient.get_transport_class("grpc")
    options = [("grpc.max_send_message_length", -1)]
    return BigQueryWriteClient(transport=transport(channel=grpc.insecure_channel(address, options)))
