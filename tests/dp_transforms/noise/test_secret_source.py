"""The secret: its references and what they lead to, bound to a run, overwritten at its end.

Google's own client against a server on this machine: answers, damage, refusals, retries."""

import base64
import contextlib
import importlib.util
import json
import logging
import os
import pickle
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.dp_transforms.noise import secret_source
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret import KEY_BYTES, wipe
from dpstream.dp_transforms.noise.secret_source import (
    SecretSource,
    destroy_keys,
    parse_reference,
    read_secret,
)
from dpstream.state import connecting
from tests.audit.leaks import contents, printed
from tests.golden.refusals import Refused
from tests.secret_server import NAME, REFERENCE, SecretServer, secret_server

HEX_KEY = "5e" * 32


def test_a_ring_of_a_run_is_the_runs_key_and_ends_with_it(refused: Refused) -> None:
    source = SecretSource(None, HEX_KEY)
    fingerprint = source.ring().fingerprint
    ring = source.of_run("run", fingerprint).ring()
    assert ring.source_fingerprint([b"a"]) == source.ring().source_fingerprint([b"a"])
    refused(lambda: SecretSource(None, "12" * 32).of_run("run", fingerprint).ring())
    destroy_keys("run")
    refused(ring.source_fingerprint, [b"a"])


def test_without_a_key_nothing_is_drawn(refused: Refused) -> None:
    refused(lambda: SecretSource(None).ring())
    assert (
        SecretSource("env:A").kind == "env"
        and SecretSource(None, HEX_KEY).kind == "insecure_test_secret"
    )


def test_a_reference_and_a_test_secret_exclude_each_other(refused: Refused) -> None:
    refused(SecretSource, "env:A", HEX_KEY)
    for text in ("5e" * 31, "5E" * 32, ""):
        refused(SecretSource, None, text)
    assert not SecretSource().given and SecretSource(None, HEX_KEY).given


def test_only_a_file_has_a_path_and_starts_from_a_folder(tmp_path: Path) -> None:
    assert SecretSource("file:a").below(tmp_path).file == str(tmp_path / "a")
    for source in (SecretSource("env:A"), SecretSource(None, HEX_KEY), SecretSource()):
        assert source.file is None and source.below(tmp_path) == source


def test_a_text_of_it_has_no_secret() -> None:
    assert HEX_KEY not in repr(SecretSource(None, HEX_KEY)) and HEX_KEY not in str(
        SecretSource(None, HEX_KEY)
    )


KEY = bytes(range(32))
TEXT = KEY.hex().encode()
Code = grpc.StatusCode


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SecretServer]:
    with secret_server(monkeypatch) as running:
        running.secrets[NAME] = TEXT + b"\n"
        yield running


def refusal(reference: str = REFERENCE, never: tuple[str, ...] = ()) -> DpstreamError:
    """The error of reading the key; nothing of library, service or key is in or behind it."""
    with pytest.raises(DpstreamError) as caught:
        read_secret(reference)
    error = caught.value
    assert error.__cause__ is None and error.__context__ is None
    text = printed(error) + contents(error)
    for private in (KEY.hex(), "someone@example.com", "my-project", *never):
        assert private not in text
    return error


def test_a_key_is_read(server: SecretServer) -> None:
    assert read_secret(REFERENCE) == KEY
    with SecretSource(REFERENCE).ring() as ring:
        assert ring.fingerprint == KeyRing(KEY).fingerprint
    assert server.calls == [NAME, NAME]


def test_a_damaged_answer_is_refused(server: SecretServer) -> None:
    server.damage = True
    error = refusal(never=(KEY.hex()[1:],))
    assert isinstance(error, RunError) and "CRC32C" in error.rule
    assert error.field == "secret"
    server.damage, server.no_checksum = False, True
    assert "CRC32C" in refusal().rule
    server.no_checksum = False
    assert read_secret(REFERENCE) == KEY


@pytest.mark.parametrize("data", [b"", KEY, TEXT[:-1], b"\xff" * 64, TEXT * 100])
def test_an_answer_that_is_no_key_is_refused(server: SecretServer, data: bytes) -> None:
    server.secrets[NAME] = data
    error = refusal()
    assert isinstance(error, UsageError) and "64 hex digits" in error.rule


@pytest.mark.parametrize(
    ("code", "kind", "fix"),
    [
        (Code.NOT_FOUND, UsageError, "version"),
        (Code.PERMISSION_DENIED, PolicyError, "secretAccessor"),
        (Code.UNAUTHENTICATED, PolicyError, "renew the credentials"),
        (Code.FAILED_PRECONDITION, RunError, "enable the version"),
        (Code.INVALID_ARGUMENT, UsageError, "project, secret and version"),
        (Code.INTERNAL, RunError, "check the network"),
    ],
)
def test_an_answer_that_cannot_change_is_told_at_once(
    server: SecretServer, code: grpc.StatusCode, kind: type[DpstreamError], fix: str
) -> None:
    server.always = code
    error = refusal()
    assert type(error) is kind and error.field == "secret"
    assert code.name in error.rule and fix in error.fix
    assert len(server.calls) == 1


def test_a_secret_that_is_not_there(server: SecretServer) -> None:
    server.secrets.clear()
    assert isinstance(refusal(), UsageError)


def test_a_short_outage_is_waited_for(server: SecretServer) -> None:
    server.faults = [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED]
    assert read_secret(REFERENCE) == KEY
    assert len(server.calls) == 4


def test_an_answer_that_does_not_come_is_asked_for_again(
    server: SecretServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_source, "RETRY_SECONDS", 30.0)
    monkeypatch.setattr(secret_source, "CALL_SECONDS", 0.5)
    server.delays = [2.0]
    assert read_secret(REFERENCE) == KEY
    assert len(server.calls) >= 2


def test_what_has_no_code_is_told_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError(f"{KEY.hex()} of someone@example.com")

    monkeypatch.setattr(secret_source, "_client", fails)
    error = refusal()
    assert isinstance(error, RunError) and "answered ValueError" in error.rule
    assert error.field == "secret" and "run it again" in error.fix


def test_a_long_outage_ends_the_waiting(server: SecretServer) -> None:
    server.always = Code.UNAVAILABLE
    begin = time.monotonic()
    error = refusal()
    assert time.monotonic() - begin < 6
    assert isinstance(error, RunError) and "UNAVAILABLE" in error.rule
    assert 2 < len(server.calls) < 100


def test_no_service_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with secret_server(monkeypatch):
        pass  # its port is free again
    monkeypatch.setattr(connecting, "CONNECT_SECONDS", 0.5)
    error = refusal()
    assert isinstance(error, RunError) and "does not answer" in error.rule
    assert secret_source.EMULATOR in error.fix


@pytest.mark.parametrize(
    "host",
    [
        "example.com:443",
        "10.0.0.1:80",
        "localhost.example.com:80",
        "elsewhere",
        "localhost:80:example.com:443",
    ],
)
def test_a_stand_in_on_another_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv(secret_source.EMULATOR, host)
    error = refusal(never=(host,))
    assert isinstance(error, UsageError) and error.field == secret_source.EMULATOR


def test_a_stand_in_may_have_an_address_of_version_6(monkeypatch: pytest.MonkeyPatch) -> None:
    with secret_server(monkeypatch):
        monkeypatch.setenv(secret_source.EMULATOR, "[::1]:1")
        monkeypatch.setattr(connecting, "CONNECT_SECONDS", 0.5)
        assert "does not answer" in refusal().rule


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import system says that the packages are not there, as on a machine without them."""
    for name in [n for n in sys.modules if n.startswith("google.cloud.secretmanager")]:
        monkeypatch.delitem(sys.modules, name)

    class Absent:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name.startswith("google.cloud.secretmanager"):
                raise ModuleNotFoundError(name)

    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    error = refusal()
    assert "gcp-secrets" in error.fix and error.field == "secret"
    monkeypatch.undo()
    assert importlib.util.find_spec("google.cloud.secretmanager_v1")


# --- credentials ---------------------------------------------------------------------------------


class Tokens(BaseHTTPRequestHandler):
    """A token endpoint: refuses an expired account, with a text that quotes what was sent."""

    status = 400
    sent = b""

    def do_POST(self) -> None:
        sent = type(self).sent = self.rfile.read(int(self.headers["Content-Length"]))
        answer = {"error": "invalid_grant", "error_description": sent.decode()}
        if self.status == 200:
            answer = {"access_token": "token", "expires_in": "3600", "token_type": "Bearer"}
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        """Not to stderr."""


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Tokens]]:
    """A service account's default credentials, whose tokens come from this machine."""

    class Endpoint(Tokens):
        pass

    http = HTTPServer(("localhost", 0), Endpoint)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    private = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    credentials = {
        "type": "service_account",
        "project_id": "my-project",
        "private_key": private.decode(),
        "client_email": "someone@example.com",
        "token_uri": f"http://localhost:{http.server_port}/token",
    }
    (tmp_path / "account.json").write_text(json.dumps(credentials))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    monkeypatch.delenv(secret_source.EMULATOR, raising=False)
    yield Endpoint
    http.shutdown()
    http.server_close()
    thread.join()


def test_an_expired_credential(account: type[Tokens]) -> None:
    error = refusal(never=("invalid_grant", "assertion"))
    assert isinstance(error, UsageError)
    assert "RefreshError" in error.rule and "renew" in error.fix


def test_a_credential_is_renewed_before_the_question(account: type[Tokens]) -> None:
    account.status = 200
    assert secret_source._credentials().token == "token"
    claims = parse_qs(account.sent.decode())["assertion"][0].split(".")[1]
    payload = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    assert payload["scope"] == "https://www.googleapis.com/auth/cloud-platform"


def test_an_unreachable_token_service(account: type[Tokens], tmp_path: Path) -> None:
    path = tmp_path / "account.json"
    credentials = json.loads(path.read_text())
    path.write_text(json.dumps(credentials | {"token_uri": "http://localhost:9/token"}))
    error = refusal()
    assert isinstance(error, RunError) and "cannot be reached" in error.rule
    assert error.field == "secret"


def test_a_token_service_that_never_answers(
    account: type[Tokens], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "account.json"
    monkeypatch.setattr(secret_source, "CONNECT_SECONDS", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}/token"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"token_uri": uri}))
        begun = time.monotonic()
        assert "cannot be reached" in refusal().rule
    assert time.monotonic() - begun < 8


def test_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (secret_source.EMULATOR, "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    error = refusal()
    assert isinstance(error, UsageError) and "DefaultCredentialsError" in error.rule


# --- the client's own log ------------------------------------------------------------------------


@pytest.fixture
def everything_logged() -> Iterator[list[str]]:
    """All that Google's libraries log when an operator asks for it, fields included."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(str(vars(record)))

    base, talkative = logging.getLogger("google"), logging.getLogger(secret_source._TALKATIVE)
    level, disabled, handler = base.level, talkative.disabled, Keep()
    everywhere = logging.root.manager.disable  # the command line turns all logging off
    logging.disable(logging.NOTSET)
    base.setLevel(logging.DEBUG)
    base.addHandler(handler)
    talkative.disabled = False
    yield lines
    base.removeHandler(handler)
    base.setLevel(level)
    talkative.disabled = disabled
    logging.disable(everywhere)


def test_the_clients_debug_log_does_not_get_the_key(
    server: SecretServer, everything_logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = base64.b64encode(TEXT + b"\n").decode()
    assert read_secret(REFERENCE) == KEY
    assert not [x for x in everything_logged if KEY.hex() in x or encoded in x]
    # Sabotage: the client's logger is left as it is.
    logging.getLogger(secret_source._TALKATIVE).disabled = False
    monkeypatch.setattr(secret_source, "_TALKATIVE", "another")
    read_secret(REFERENCE)
    assert [x for x in everything_logged if KEY.hex() in x or encoded in x]


VERSION = "gcp:projects/my-project/secrets/noise/versions"


# --- the grammar -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "file:noise.secret",
        "file:/a/b:c.key",
        "env:DPSTREAM_KEY",
        "env:_k1",
        f"{VERSION}/1",
        f"{VERSION}/120",
        "gcp:projects/example.com:p-1/secrets/A_b-9/versions/7",
    ],
)
def test_references(text: str) -> None:
    assert ":".join(parse_reference(text)) == text
    assert pickle.loads(pickle.dumps(SecretSource(text))).reference == text  # noqa: S301
    assert SecretSource(text).kind == text.partition(":")[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "noise.secret",
        KEY.hex(),
        "file:",
        "file:a\0b",
        "env:",
        "env:1A",
        "env:A B",
        "env:A=B",
        "ENV:A",
        "aws:projects/p/secrets/s/versions/1",
        "gcp:",
        "gcp:projects/p/secrets/s",
        "gcp:projects/p/secrets/s/versions",
        "gcp:projects/p/locations/l/secrets/s/versions/1",
        "gcp:projects/p/secrets/s/t/versions/1",
        f"hex:{KEY.hex()}",
    ],
)
def test_what_is_no_reference_is_refused_and_not_repeated(text: str, refused: Refused) -> None:
    caught = refused(SecretSource, text)
    assert KEY.hex() not in printed(caught)


@pytest.mark.parametrize("version", ["latest", "current", "0", "01", "-1", "1 ", "", "1/2", "٣"])
def test_versions_that_can_move_are_refused(version: str, refused: Refused) -> None:
    refused(SecretSource, f"{VERSION}/{version}")


# --- what they lead to -----------------------------------------------------------------------


def secret_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "noise.secret"
    path.write_bytes(text.encode("utf-8"))
    path.chmod(mode)
    return f"file:{path}"


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
@pytest.mark.parametrize("text", [KEY.hex(), KEY.hex().upper() + "\n", f"  {KEY.hex()}\r\n"])
def test_a_key_of_a_file_or_a_variable_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, text: str
) -> None:
    monkeypatch.setenv("DPSTREAM_TEST_KEY", text)
    for reference in (secret_file(tmp_path, text, mode), "env:DPSTREAM_TEST_KEY"):
        assert read_secret(reference) == KEY
        assert SecretSource(reference).ring().fingerprint == KeyRing(KEY).fingerprint


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620, 0o601, 0o610, 0o777])
def test_a_file_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    error = refusal(secret_file(tmp_path, KEY.hex(), mode))
    assert isinstance(error, UsageError) and "chmod 600" in error.fix


@pytest.mark.parametrize(
    "text",
    [
        "zz" * 32,
        KEY.hex()[:-1],
        KEY.hex()[:-2],
        KEY.hex() + "00",
        KEY.hex()[:-1] + "_",
        "+" + KEY.hex()[1:],
        f"{KEY.hex()[:32]}\n{KEY.hex()[32:]}",
        KEY.hex() + " " * 400,
        "\u00e9" * 32,
        "\u0663" * 64,
        "",
        "\n",
    ],
)
def test_what_is_no_key_is_refused_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("DPSTREAM_TEST_KEY", text)
    for reference in (secret_file(tmp_path, text), "env:DPSTREAM_TEST_KEY"):
        error = refusal(reference)
        assert isinstance(error, UsageError)
        if text or reference.startswith("file:"):
            assert error.fix.startswith("restore it")
        for part in (text.strip(), KEY.hex()[:16]):
            assert not part or part not in printed(error) + contents(error)


@pytest.mark.parametrize("text", ["00" * 32, "ab" * 32, "0123456789abcdef" * 4, "f" * 64])
def test_placeholders_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DPSTREAM_TEST_KEY", text)
    error = refusal("env:DPSTREAM_TEST_KEY")
    assert isinstance(error, UsageError) and text not in str(error)


def test_random_keys_are_no_placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(200):
        text = os.urandom(32).hex()
        monkeypatch.setenv("DPSTREAM_TEST_KEY", text)
        assert read_secret("env:DPSTREAM_TEST_KEY").hex() == text


def test_missing_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPSTREAM_TEST_KEY", raising=False)
    none = (tmp_path / "none", tmp_path, Path(os.devnull) / "x")
    assert all(re.search("no |folder", refusal(f"file:{path}").rule) for path in none)
    assert "not set" in refusal("env:DPSTREAM_TEST_KEY").rule


@contextlib.contextmanager
def ordinary_user() -> Iterator[None]:
    """The superuser may read every file: be somebody else in the block."""
    superuser = os.geteuid() == 0
    if superuser:
        os.seteuid(65534)
    try:
        yield
    finally:
        if superuser:
            os.seteuid(0)


def test_a_file_without_permission(tmp_path: Path) -> None:
    reference = secret_file(tmp_path, KEY.hex(), 0o000)
    with ordinary_user():
        error = refusal(reference)
    assert isinstance(error, UsageError) and "may not use it" in error.rule


@pytest.mark.parametrize("size", [0, 1, KEY_BYTES, 1000])
def test_buffers_are_overwritten_in_place(size: int) -> None:
    one, other = bytearray(b"\xff" * size), bytearray(range(200))
    seen = memoryview(one), memoryview(other)
    wipe(one, other)
    assert one == bytes(size) and other == bytes(200)
    assert bytes(seen[0]) == bytes(size) and not any(seen[1]), "the same memory, not a copy"
    wipe()


def test_what_cannot_be_overwritten_is_an_error() -> None:
    """Better than a key that is believed to be gone."""
    with pytest.raises(TypeError):
        wipe(b"\x07" * KEY_BYTES)  # type: ignore[arg-type]


def test_a_key_has_256_bits() -> None:
    assert KEY_BYTES * 8 == 256
