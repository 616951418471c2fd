"""A stage that draws or digests with the secret, which it reads on its worker."""

import apache_beam as beam

from dpstream.dp_transforms.noise.key_source import KeySource
from dpstream.dp_transforms.telemetry import guarded


class Keyed(beam.DoFn):
    """Reads the key when a worker begins, and lets go of it when the worker ends.

    Only the key's place is pickled, never the key.

    Args:
        keys: where a worker finds the key, bound to the run.
    """

    def __init__(self, keys: KeySource) -> None:
        self._keys = keys

    @guarded("release")
    def setup(self) -> None:
        """Read the key."""
        self._ring = self._keys.ring()

    def teardown(self) -> None:
        """Let go of the key."""
        self.__dict__.pop("_ring", None)
