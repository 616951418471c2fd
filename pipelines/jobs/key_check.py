"""Whether a job's noise key can be had on this machine and is the one of its store."""

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.begin import key_source
from dpstream.pipelines.jobs.job import Job
from dpstream.state import open as stores


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
                "privacy.key",
                "is not the key this store was begun with",
                "use the run's own key; to rotate it, begin a new run: a new store, charged again",
            )
        store = "fits"
    return {"where": keys.kind, "store": store, "fingerprint": fingerprint}
