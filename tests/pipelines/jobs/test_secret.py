"""Jobs with their key in each place: the same releases, one grammar, checks, rotation."""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner, Result

from dpstream.accounting.errors import DpstreamError
from dpstream.dp_transforms import flow
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.run import Run
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.job import TEST_RUN_IDS, Job, load_job
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests import accounts
from tests.audit.leaks import make_job
from tests.fixed_runs import fix_run_id
from tests.golden.refusals import Refused
from tests.pipelines.cli.called import printed
from tests.secret_server import NAME, REFERENCE, SecretServer, secret_server

KEY, OTHER = os.urandom(32).hex(), os.urandom(32).hex()
VARIABLE = "DPSTREAM_TEST_KEY"
LINES = {
    "file": 'secret = "file:keys/noise.secret"',
    "env": f'secret = "env:{VARIABLE}"',
    "gcp": f'secret = "{REFERENCE}"',
}


@pytest.fixture(autouse=True)
def loud_again() -> Iterator[None]:
    """The command line turns logging off for its process."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SecretServer]:
    """A secret manager with the key."""
    with secret_server(monkeypatch) as running:
        running.secrets[NAME] = KEY.encode()
        yield running


def job_in(folder: Path, line: str, key: str = KEY, more: str = "") -> Job:
    """The job with a line that says where its key is, and a key in a file."""
    folder.mkdir(exist_ok=True)
    fix_run_id(folder)  # runs with one key can be compared
    (folder / "keys").mkdir(exist_ok=True)
    path = folder / "keys" / "noise.secret"
    path.write_text(key)
    path.chmod(0o600)
    if (folder / "dpstream.toml").exists():
        text = (folder / "dpstream.toml").read_text().splitlines()
        lines = [line if x.startswith("secret = ") else x for x in text]
        accounts.write(folder / "dpstream.toml", "\n".join(lines))
        return load_job(folder / "dpstream.toml")
    return make_job(folder, line, more)


def files(job: Job) -> dict[str, bytes]:
    folder = Path(job.sink.path)
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.glob("window-*/*")}


def test_the_place_of_the_key_changes_no_byte(
    tmp_path: Path, server: SecretServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.chdir("/")
    runs = []
    for name, line in LINES.items():
        job = job_in(tmp_path / name, line)
        run_job(job)
        runs.append((job.plan.hash, files(job)))
    assert len(server.calls) > 3
    assert all(one == runs[0] for one in runs) and len(runs[0][1]) == 4
    other = job_in(tmp_path / "other", LINES["file"], OTHER)
    run_job(other)
    assert other.plan.hash == runs[0][0] and files(other) != runs[0][1]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (f'{LINES["env"]}\ninsecure_test_secret = "{KEY}"', "secret"),
        (f'{LINES["file"]}\ninsecure_test_secret = "{KEY}"', "secret"),
        (f'secret = "{KEY}"', "secret"),
        ('secret = "noise.secret"', "secret"),
        ('secret = "file:"', "secret"),
        (f'secret = "env:{KEY}!"', "secret"),
    ],
    ids=range(6),
)
def test_jobs_that_name_no_key_or_two(
    tmp_path: Path, line: str, field: str, refused: Refused
) -> None:
    caught = refused(make_job, tmp_path, line)
    assert caught.field == f"data_set.tests.{field}" and KEY not in str(caught)


def test_a_moving_version_is_refused_before_anything_is_done(
    tmp_path: Path, server: SecretServer, refused: Refused
) -> None:
    refused(lambda: make_job(tmp_path, f'secret = "{REFERENCE.rpartition("/")[0]}/latest"'))
    assert server.calls == []


def test_the_key_does_not_lie_with_the_releases(tmp_path: Path, refused: Refused) -> None:
    job = make_job(tmp_path, 'secret = "file:releases/noise.secret"')
    refused(run_job, job)


def test_rotation_is_a_new_run(tmp_path: Path, refused: Refused) -> None:
    """The store refuses another key, says how to rotate, and stays as it is."""
    job = job_in(tmp_path, LINES["file"])
    first = run_job(job).run_id
    before = files(job)
    job = job_in(tmp_path, LINES["file"], OTHER)
    refused(run_job, job)
    text = (tmp_path / "dpstream.toml").read_text()
    new = text.replace("state/s.db", "state/new.db").replace('"releases"', '"new"')
    accounts.write(tmp_path / "dpstream.toml", new)
    del TEST_RUN_IDS[tmp_path / "dpstream.toml"]  # as outside of tests: each run draws its id
    rotated = load_job(tmp_path / "dpstream.toml")
    assert run_job(rotated).run_id != first
    assert len(files(rotated)) == 4 and files(job) == before
    accounts.write(tmp_path / "dpstream.toml", text)
    assert run_job(job_in(tmp_path, LINES["file"], KEY)).run_id == first


# --- the end of a run ------------------------------------------------------------------------


def rings_of(job: Job, *patches: Any) -> tuple[list[KeyRing], DpstreamError | None]:
    """All rings that a run has made, kept alive, and how the run ended."""
    rings: list[KeyRing] = []
    honest = SecretSource.ring

    def ring(source: SecretSource) -> KeyRing:
        rings.append(honest(source))
        return rings[-1]

    error = None
    with mock.patch.object(SecretSource, "ring", ring):
        for patch in patches:
            patch.start()
        try:
            run_job(job)
        except DpstreamError as caught:
            error = caught
        finally:
            for patch in patches:
                patch.stop()
    return rings, error


def alive(rings: list[KeyRing]) -> int:
    """How many can still be used."""
    count = 0
    for ring in rings:
        try:
            ring.name(())
            count += 1
        except DpstreamError:
            continue
    return count


def test_no_key_outlives_its_run(tmp_path: Path) -> None:
    rings, error = rings_of(job_in(tmp_path / "good", LINES["file"]))
    assert error is None and len(rings) >= 5 and alive(rings) == 0
    failure = mock.patch.object(flow, "seal", side_effect=MemoryError("no room"))
    rings, error = rings_of(job_in(tmp_path / "bad", LINES["file"]), failure)
    assert error is not None and len(rings) >= 5 and alive(rings) == 0
    # Sabotage: nobody destroys them.
    sabotage = mock.patch.object(Run, "destroy_keys")
    rings, _ = rings_of(job_in(tmp_path / "kept", LINES["file"]), sabotage)
    assert alive(rings) >= 4


# --- dpstream secret check ----------------------------------------------------------------------


def check(job: Job, *options: str) -> Result:
    return CliRunner().invoke(cli, ["secret", "check", "--project", str(job.path), *options])


def test_check(tmp_path: Path, server: SecretServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    with KeyRing(bytes.fromhex(KEY)) as ring:
        fingerprint = ring.fingerprint
    for name, where in (("file", "file"), ("env", "env"), ("gcp", "gcp")):
        job = job_in(tmp_path / name, LINES[name])
        description = printed(check(job, "--json").stdout)
        assert description == {"where": where, "store": "new", "fingerprint": fingerprint}
        assert job.state.path is not None and not job.state.path.exists()
    run_job(job)
    server.secrets[NAME] = KEY.upper().encode()
    text = check(job).stdout
    assert "was begun with it" in text and "Secret Manager" in text and fingerprint in text
    assert KEY not in text.lower()


def test_check_of_a_key_that_does_not_fit_or_is_not_there(
    tmp_path: Path, server: SecretServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    job = job_in(tmp_path, LINES["env"])
    run_job(job)
    monkeypatch.setenv(VARIABLE, OTHER)
    result = check(job)
    assert result.exit_code == 3 and "begin a new run" in result.stderr
    monkeypatch.delenv(VARIABLE)
    result = check(job, "--json")
    assert result.exit_code == 2 and printed(result.stderr)["field"] == "secret"
    server.secrets.clear()
    result = check(job_in(tmp_path, LINES["gcp"]))
    assert result.exit_code == 2 and "NOT_FOUND" in result.stderr
    for text in (KEY, OTHER, "my-project"):
        assert text not in result.output + result.stderr
    stores.close_all()


def test_check_of_a_test_key(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    assert "INSECURE" in check(job).stdout
    text = job.path.read_text().replace(f'insecure_test_secret = "{"11" * 32}"', "")
    accounts.write(job.path, text)
    result = check(job)
    assert result.exit_code == 2 and "is required to run" in result.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_key_that_cannot_be_flushed_is_no_key(
    number: int, tmp_path: Path, refused: Refused
) -> None:
    """A file that was cut off would be refused for ever as a key that exists."""
    path = tmp_path / "noise.secret"
    with mock.patch.object(os, "fsync", side_effect=OSError(number, "")):
        refused(new_secret, path)
    assert list(tmp_path.iterdir()) == []
    new_secret(path)
    assert len(path.read_text()) == 65 and path.stat().st_mode & 0o777 == 0o600
    refused(new_secret, path)
