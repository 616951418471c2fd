"""A stage that draws or digests with the secret, which it reads on its worker."""

import apache_beam as beam

from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.telemetry import guarded


class Keyed(beam.DoFn):
    """Reads the secret when a worker begins, and destroys its key ring when the worker ends.

    Only the reference to the secret is pickled, never the secret.

    Args:
        keys: the reference to the secret, bound to the run.
    """

    def __init__(self, keys: SecretSource) -> None:
        self._keys = keys

    @guarded("release")
    def setup(self) -> None:
        """Read the secret."""
        self._ring = self._keys.ring()

    def teardown(self) -> None:
        """Destroy the key ring."""
        self.__dict__.pop("_ring", None)
