"""The secret noise key of a job: making one, where it is, and whether it is the one of its store.

A key is 32 random bytes, written once as hex in a file that only its owner can read.
"""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.dp_transforms.noise.secret import KEY_BYTES
from dpstream.pipelines.jobs.job import Job
from dpstream.state import open as stores
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import PRIVATE, put_entry, sync

if TYPE_CHECKING:
    from dpstream.dp_transforms.noise.key_source import KeySource


def new_key(path: Path) -> None:
    """Write a new noise key (hex, mode 0600, whole and on disk or not at all); never overwrites.

    Raises:
        PolicyError: the file exists (overwriting a key would orphan its store).
        RunError: the file cannot be written.
    """
    text = secrets.token_bytes(KEY_BYTES).hex() + "\n"
    with file_errors("key file", "cannot be created"):
        os.stat(path.absolute().parent)  # a folder is not made: its name may be misspelt
        made = not path.is_symlink() and put_entry(path.absolute(), text.encode(), PRIVATE)
        sync(path.absolute().parent)
    if not made:
        raise PolicyError(
            "key file",
            "exists, and the releases made with it cannot be continued with another key",
            "choose another name",
        )


def key_source(job: Job) -> "KeySource":
    """Where the job's noise key is."""
    from dpstream.dp_transforms.noise.key_source import (
        KeySource,
    )

    if job.privacy.reference is None and job.privacy.insecure_test_key is None:
        raise UsageError(
            "secret",
            "is required to run",
            "make one with `dpstream key new noise.key` beside the project file, and write "
            'secret = "file:noise.key" into its data set',
        )
    return KeySource(job.privacy.reference, job.privacy.insecure_test_key)


def check_key(job: Job) -> dict[str, str]:
    """Read the key as a worker would, hold it against the store, and destroy it.

    Returns:
        ``where`` (``file``, ``env``, ``gcp`` or ``insecure_test_key``), ``store`` (``new`` or
        ``fits``) and the key's ``fingerprint``, which tells keys apart and nothing else.

    Raises:
        UsageError, PolicyError, RunError: no key can be had, the store is of another plan, or
            was begun with another key.
    """
    keys, url = key_source(job), job.state.store or ""
    with keys.ring() as ring:
        fingerprint = ring.fingerprint
    store = "new"
    if stores.exists(url):
        if stores.identity_of(url, job.plan).key_fingerprint != fingerprint:
            raise PolicyError(
                "secret",
                "is not the key this store was begun with",
                "use the run's own key; to rotate it, begin a new run: a new store, charged again",
            )
        store = "fits"
    return {"where": keys.kind, "store": store, "fingerprint": fingerprint}
