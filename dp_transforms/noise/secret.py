"""A secret key in memory: how long it is, and how it is overwritten.  Needs no library."""

#: A key in a buffer of its owner, who overwrites it if it can be.
Secret = bytes | bytearray
KEY_BYTES = 32


def wipe(*secrets: bytearray) -> None:
    """Overwrite buffers that held a secret with zeros; copies elsewhere are out of reach."""
    for secret in secrets:
        secret[:] = bytes(len(secret))
