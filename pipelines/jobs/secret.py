"""The secret of a job: making one, its reference, and whether it is the secret of the job's store.

A secret is 32 random bytes, written once as hex in a file that only its owner can read.
"""

import os
import secrets
from pathlib import Path

from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.noise.secret import KEY_BYTES
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.jobs.job import Job
from dpstream.state import open as stores
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import PRIVATE, put_entry, sync


def new_secret(path: Path) -> None:
    """Write a new secret (hex, mode 0600, complete and on disk or not at all); never overwrites.

    Raises:
        UsageError: the file exists; if it were overwritten, its store could not be used again.
        RunError: the file cannot be written.
    """
    text = secrets.token_bytes(KEY_BYTES).hex() + "\n"
    with file_errors("secret file", "cannot be created"):
        os.stat(path.absolute().parent)  # a folder is not made: its name may be misspelt
        made = not path.is_symlink() and put_entry(path.absolute(), text.encode(), PRIVATE)
        sync(path.absolute().parent)
    if not made:
        raise UsageError(
            "secret file",
            "exists, and the releases made with it cannot be continued with another secret",
            "choose another name",
        )


def secret_source(job: Job) -> SecretSource:
    """Return the reference to the job's secret.

    Raises:
        UsageError: its data set names no secret.
    """
    return job.secret.required("secret", "is required to run")


def check_secret(job: Job) -> dict[str, str]:
    """Read the secret as a worker would, compare it with the store's, and erase it from memory.

    Returns:
        ``where`` (``file``, ``env``, ``gcp`` or ``insecure_test_secret``), ``store`` (``new`` or
        ``fits``) and the secret's ``fingerprint``, which only distinguishes secrets.

    Raises:
        UsageError, PolicyError, RunError: the secret cannot be read, the store has another plan,
            or was begun with another secret.
    """
    keys, url, store = secret_source(job), job.state.store or "", "new"
    with keys.ring() as ring:
        fingerprint = ring.fingerprint
    if stores.backend(url).identity() is not None:
        stores.refuse_other_secret(stores.identity_of(url, job.plan), fingerprint)
        store = "fits"
    return {"where": keys.kind, "store": store, "fingerprint": fingerprint}
