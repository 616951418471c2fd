"""References to keys: the grammar, the file, the variable, and refusals that quote nothing."""

import contextlib
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource, parse_reference, read_secret
from tests.audit.leaks import contents, printed

KEY = bytes(range(32))
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
def test_what_is_no_reference_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        SecretSource(text)
    assert caught.value.field == "secret"
    assert KEY.hex() not in printed(caught.value)


@pytest.mark.parametrize("version", ["latest", "current", "0", "01", "-1", "1 ", "", "1/2", "٣"])
def test_versions_that_can_move_are_refused(version: str) -> None:
    with pytest.raises(UsageError, match="by its number"):
        SecretSource(f"{VERSION}/{version}")


# --- what they lead to -----------------------------------------------------------------------


def secret_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "noise.secret"
    path.write_bytes(text.encode("utf-8"))
    path.chmod(mode)
    return f"file:{path}"


def refusal(reference: str) -> DpstreamError:
    with pytest.raises(DpstreamError) as caught:
        read_secret(reference)
    assert caught.value.field == "secret"
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    return caught.value


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
@pytest.mark.parametrize("text", [KEY.hex(), KEY.hex().upper() + "\n", f"  {KEY.hex()}\r\n"])
def test_a_key_is_read(
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
    with pytest.raises(UsageError, match="required to run"):
        SecretSource(None).ring()


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
