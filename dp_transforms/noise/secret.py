"""The length of a secret key in memory, and its overwriting; needs no library."""

#: A key in a buffer of its owner, who overwrites it if it can be.
Secret = bytes | bytearray
KEY_BYTES = 32


def wipe(*secrets: bytearray) -> None:
    """Overwrite buffers that held a secret with zeros; copies elsewhere are out of reach."""
    for secret in secrets:
        secret[:] = bytes(len(secret))
