"""P7 for the secret: wherever it is kept, it is in no plan, pickle, log, error or file."""

import hashlib
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import apache_beam as beam
import msgspec
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.guarantee import describe
from dpstream.dp_transforms.flow import DPStream
from dpstream.dp_transforms.noise import prf
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret import Secret
from dpstream.dp_transforms.noise.secret_source import SecretSource, read_secret
from dpstream.pipelines.connectors import write as sinks
from dpstream.pipelines.connectors.files.source import ReadFiles
from dpstream.pipelines.connectors.registry import sink_of
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.render.job_plan import details_text
from dpstream.pipelines.stream.begin import begin
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.audit.leaks import Logs, contents, key_forms, make_job, opened, printed
from tests.secret_server import NAME, REFERENCE, secret_server

SECRET = hashlib.sha256(b"a key of the tests").digest()
FORMS = key_forms(SECRET)
KEY_FILE = "kept/noise.secret"


def key_hits(data: str | bytes) -> int:
    """Forms of the key, or of one of its children, in a text."""
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    return sum(form in data for form in FORMS)


@pytest.fixture(autouse=True)
def clean_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    logging.disable(logging.NOTSET)  # the command line, if it ran before, turned it off
    yield
    stores.close_all()


@pytest.fixture(params=["file", "env", "gcp"])
def job(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Job]:
    """The job of the leak tests with its key in each place that there is."""
    folder = tmp_path / "job"
    path = folder / KEY_FILE
    path.parent.mkdir(parents=True)
    path.write_text(SECRET.hex())
    path.chmod(0o600)
    monkeypatch.setenv("DPSTREAM_TEST_KEY", SECRET.hex())
    line = {
        "file": f'secret = "file:{KEY_FILE}"',
        "env": 'secret = "env:DPSTREAM_TEST_KEY"',
        "gcp": f'secret = "{REFERENCE}"',
    }[request.param]
    with secret_server(monkeypatch) as server:
        server.secrets[NAME] = SECRET.hex().encode()
        yield make_job(folder, line)


def files_with_key(folder: Path) -> list[str]:
    """Files below a folder that hold the key, but for the key's own file."""
    return [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.match(KEY_FILE) and key_hits(path.read_bytes())
    ]


def what_travels(job: Job) -> bytes:
    """Everything of a run that is sent to workers, printed or kept as a text."""
    run, _ = begin(job)
    pipeline = beam.Pipeline(runner=FnApiRunner())
    output = (pipeline | ReadFiles(job)).records | DPStream(run.plan, run)
    _ = output.releases | sinks.WriteReleases(sink_of(job))
    budget = allocate(job.plan)
    parts: list[object] = [job, run, run.keys, vars(run.keys), run.plan, run.open().identity]
    parts += [describe(job.plan, budget), details_text(job.plan, budget)]
    return b"\n".join(
        [
            opened(pipeline.to_runner_api().SerializeToString()),
            pickle.dumps((run, run.keys, run.plan, job.plan)),
            msgspec.json.encode(job.plan),
            *(repr(part).encode() for part in parts),
        ]
    )


def test_a_run_leaves_no_key(job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Logs() as logs:
        result = run_job(job, progress=print)
    assert read_releases(job.sink.path).num_rows and logs.text
    assert not key_hits("".join((logs.text, *capfd.readouterr(), repr(result))))
    assert files_with_key(tmp_path) == []


def test_nothing_that_travels_has_the_key(job: Job) -> None:
    data = what_travels(job)
    # The search sees into the pickles: where the key is stands there.
    reference = (job.secret.reference or "").encode()
    assert reference in data and data.count(reference) > 4
    assert not key_hits(data)


def test_no_error_has_the_key(job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another key than the store's, a damaged one and a failure while it is in use."""
    run_job(job)
    errors: list[DpstreamError] = []
    with Logs() as logs:
        for make in (
            lambda ring: setattr(ring, "fingerprint", "0" * 32),
            lambda ring: ring.destroy(),
        ):

            class Other(KeyRing):
                """A ring that is not what it should be."""

                def __init__(self, secret: Secret, make: Callable[..., object] = make) -> None:
                    super().__init__(secret)
                    make(self)

            with monkeypatch.context() as patched:
                patched.setattr(prf, "KeyRing", Other)
                with pytest.raises(DpstreamError) as caught:
                    run_job(job)
            errors.append(caught.value)
    assert {error.field for error in errors} == {"secret"}
    assert not key_hits(logs.text + "".join(printed(e) + contents(e) for e in errors))
    assert files_with_key(tmp_path) == []


# --- sabotage: the search finds each of these ------------------------------------------------


class KeepsKey(SecretSource):
    """A source that remembers what it has read."""

    def __init__(self, reference: str | None, insecure_test_secret: str | None = None) -> None:
        super().__init__(reference, insecure_test_secret)
        copy = self.form(bytes(read_secret(reference or "")))
        object.__setattr__(self, "copy", copy)

    @staticmethod
    def form(secret: bytes) -> object:
        """As it is kept."""
        return secret

    def of_run(self, run_id: str, fingerprint: str) -> SecretSource:
        return self


class KeepsHex(KeepsKey):
    """The same as a text."""

    @staticmethod
    def form(secret: bytes) -> object:
        return {"note": f"key {secret.hex()}"}


class KeepsChild(KeepsKey):
    """A child of the key draws as well."""

    @staticmethod
    def form(secret: bytes) -> object:
        return bytes(prf._child(secret, "node noise"))


@pytest.mark.parametrize("source", [KeepsKey, KeepsHex, KeepsChild])
def test_a_source_that_keeps_the_key_is_caught(job: Job, source: type[SecretSource]) -> None:
    leaking = source(job.secret.reference)
    job = msgspec.structs.replace(job, secret=leaking)
    run, _ = begin(job)
    assert key_hits(pickle.dumps(run))
    pipeline = beam.Pipeline(runner=FnApiRunner())
    _ = (pipeline | ReadFiles(job)).records | DPStream(run.plan, run)
    graph = pipeline.to_runner_api().SerializeToString()
    assert key_hits(opened(graph)) and not key_hits(graph)


def test_a_fingerprint_that_is_the_key_is_caught(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Telling(KeyRing):
        def __init__(self, secret: Secret) -> None:
            super().__init__(secret)
            self.fingerprint = secret.hex()

    monkeypatch.setattr(prf, "KeyRing", Telling)
    run_job(job)
    assert [name for name in files_with_key(tmp_path) if "state/s.db" in name]
