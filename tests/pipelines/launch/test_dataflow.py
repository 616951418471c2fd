"""Beam's flags for Dataflow, and where a launcher's files may be."""

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.launch.dataflow import flags, in_stores


def test_flags_are_added_once() -> None:
    added = flags(["--sdk_container_image=i"], streaming=True)
    assert added[1:] == ["--runner=DataflowRunner", "--streaming", "--sdk_location=container"]
    assert flags(added, streaming=True) == added
    assert "--streaming" not in flags([], streaming=False)
    for given in (["--runner=DirectRunner"], ["--streaming"]):
        with pytest.raises(UsageError) as error:
            flags(given, streaming=False)
        assert error.value.field == given[0].partition("=")[0]


def test_places_are_in_stores() -> None:
    secret = SecretSource("gcp:projects/p/secrets/s/versions/1")
    assert in_stores({"--out": "gs://b/out/"}, secret) == ["gs://b/out"]
    for place, source, field in (
        ("gs://b", SecretSource("env:KEY"), "secret"),
        ("gs://b", SecretSource(), "secret"),
        ("out", secret, "--out"),
    ):
        with pytest.raises(UsageError) as error:
            in_stores({"--out": place}, source)
        assert error.value.field == field
