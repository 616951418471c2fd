"""A stage with the key: it is read on the worker, and never pickled."""

import pickle
from collections.abc import Iterator

from dpstream.dp_transforms.beam.keyed import Keyed
from dpstream.dp_transforms.noise.secret_source import SecretSource

SECRET = "3f7a91c4d2e85b60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8"


class Prints(Keyed):
    def process(self, element: int) -> Iterator[str]:
        yield self._ring.fingerprint


def test_the_key_is_read_when_the_worker_begins() -> None:
    source = SecretSource(None, SECRET)
    stage = pickle.loads(pickle.dumps(Prints(source)))  # noqa: S301 - our own bytes
    assert not hasattr(stage, "_ring")
    stage.setup()
    with source.ring() as ring:
        assert list(stage.process(1)) == [ring.fingerprint]
    stage.teardown()
    stage.teardown()
    assert not hasattr(stage, "_ring")
