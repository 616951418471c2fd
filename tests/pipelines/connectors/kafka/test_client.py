"""Which of librdkafka's settings a job may give: none that loads code, runs a command or opens
files beyond certificates."""

import ctypes
import re
from pathlib import Path

import confluent_kafka
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.kafka.client import CERTIFICATES, check_options, looked_up
from dpstream.pipelines.connectors.kafka.sink import KafkaSink
from dpstream.pipelines.connectors.registry import input_of
from tests.pipelines.kafka_jobs import kafka_job

BEYOND = [
    "plugin.library.paths", "sasl.kerberos.kinit.cmd", "sasl.kerberos.keytab",
    "sasl.kerberos.principal", "sasl.kerberos.service.name", "ssl.engine.location",
    "ssl.engine.id", "ssl.providers", "offset.store.path", "offset.store.method",
    "sasl.oauthbearer.assertion.file", "sasl.oauthbearer.assertion.private.key.file",
    "sasl.oauthbearer.assertion.jwt.template.file",
]  # fmt: skip
#: Words of a description that tell of files, commands and code.
_WORDS = re.compile(
    r"\b(path|file|director\w+|command|librar\w+|plugin|engine|provider\w*)\b", re.I
)


@pytest.mark.parametrize("name", BEYOND)
def test_refused_everywhere(name: str, tmp_path: Path) -> None:
    options = {name: "/tmp/evil"}
    job = kafka_job(tmp_path, "127.0.0.1:1", "t", f"options = {{ '{name}' = '/tmp/evil' }}")
    with pytest.raises(UsageError, match=f"table.options.{name}") as caught:
        input_of(job)
    assert "evil" not in str(caught.value)
    with pytest.raises(UsageError, match=f"sink.options.{name}"):
        KafkaSink("127.0.0.1:1", "t", options, job.plan.timeline)
    with pytest.raises(UsageError):
        check_options("source", {name: "env:PATH"}, ())


def described() -> dict[str, str]:
    """What librdkafka says of its settings: name -> description."""
    folder = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
    library, c = ctypes.CDLL(str(next(folder.glob("librdkafka*")))), ctypes.CDLL(None)
    c.fopen.restype = ctypes.c_void_p
    memory = ctypes.c_char_p()
    size = ctypes.c_size_t()
    c.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(c.open_memstream(ctypes.byref(memory), ctypes.byref(size)))
    library.rd_kafka_conf_properties_show(stream)
    c.fclose(stream)
    text = ctypes.string_at(memory, size.value).decode()
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 5]
    return {row[0].strip(): row[-1] for row in rows}


def test_every_setting_of_the_client_is_judged() -> None:
    """Strings whose description tells of files, commands or code are refused, certificates apart;
    the others pass.  A new version of the client shows here what it can reach."""
    names = {name for name, text in described().items() if "*Type: string" in text}
    assert {"client.id", "plugin.library.paths", "ssl.ca.location"} <= names
    passed = set()
    for name in names:
        try:
            check_options("source", {name: "env:PATH"}, ())
            passed.add(name)
        except UsageError:
            assert name in BEYOND, name
    suspects = {name for name in names if _WORDS.search(described()[name])}
    # Contents, not names of files; and words that mean something else.
    harmless = {
        *(name for name in names if name.endswith(".pem") or "passphrase" in name),
        "ssl.key.password", "ssl.ca.certificate.stores", "sasl.oauthbearer.scope",
        "sasl.oauthbearer.assertion.claim.aud", "sasl.oauthbearer.assertion.claim.iss",
        "sasl.oauthbearer.assertion.claim.sub", "sasl.oauthbearer.token.endpoint.url",
        "sasl.oauthbearer.client.secret", "sasl.oauthbearer.client.credentials.client.secret",
        "sasl.oauthbearer.client.id", "sasl.oauthbearer.client.credentials.client.id",
    }  # fmt: skip
    assert passed & suspects <= CERTIFICATES | harmless, passed & suspects - CERTIFICATES - harmless
    assert passed >= CERTIFICATES


def test_functions_cannot_be_written_as_text() -> None:
    functions = [name for name, text in described().items() if "see dedicated API" in text]
    assert len(functions) > 10
    for name in functions:
        with pytest.raises((confluent_kafka.KafkaException, TypeError, ValueError)):
            confluent_kafka.Producer({name: "x", "log_level": 0})


@pytest.mark.parametrize(
    "options",
    [
        {"sasl.mechanism": "GSSAPI"},
        {"sasl.mechanisms": "gssapi"},
        {"security.protocol": "SASL_SSL"},
        {"security.protocol": "sasl_plaintext"},
    ],
)
def test_kerberos_runs_a_command(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="GSSAPI"):
        check_options("source", options, ())
    [(name, value)] = options.items()
    monkeypatch.setenv("HIDDEN", value)
    check_options("source", {name: "env:HIDDEN"}, ())
    with pytest.raises(UsageError, match="GSSAPI"):
        looked_up("source", {name: "env:HIDDEN"})


def test_other_mechanisms_pass() -> None:
    for mechanism in ("PLAIN", "SCRAM-SHA-512", "OAUTHBEARER"):
        given = {"security.protocol": "SASL_SSL", "sasl.mechanism": mechanism}
        check_options("source", given | {"ssl.ca.location": "ca.pem"}, ())
        assert looked_up("source", given) == given
