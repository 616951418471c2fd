"""The manifest of a census execution's output, and the files of its draft.

``manifest.json`` is the receipt: it has the digest of every file, and a file that is not in it is
not part of the output.  Without an account (`launch.census`), ``run.json`` in the output names the
run before it draws noise.
"""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dpstream.accounting.errors import UsageError
from dpstream.accounting.tabulation.plan import Cost, TablePlan
from dpstream.pipelines.ask.folder import Written
from dpstream.pipelines.formats.receipt import Header, header_of
from dpstream.state.disk_errors import ABSENT, file_errors
from dpstream.state.durable import PUBLIC, drafted, make_folder

MANIFEST, RUN = "manifest.json", "run.json"
_SUFFIX = ".dpstream-table"


class File(NamedTuple):
    """A part of a published table: its name below the output folder, and its content."""

    name: str
    content: bytes


class Manifest(Header, frozen=True, kw_only=True):
    """The description of an execution's output; public.

    Attributes:
        program: ``p`` or ``h``.
        request: without an account, the result of `of_run`, which shows whether the output
            answers a request; empty otherwise.
        epsilon, delta, mu, rho: the cost; ``epsilon`` is null if there is no guarantee.
        insecure: a fixed test secret was used: whoever knows it can subtract the noise.
        files: by name below the folder.
    """

    program: str
    request: str
    epsilon: float | None
    delta: float
    mu: float | None
    rho: float | None
    insecure: bool
    files: dict[str, Written]

    def answers(self, request: str) -> bool:
        """Return whether the output answers this very request."""
        return self.request == of_run(request, self.run_id)


def manifest_of(
    plan: TablePlan,
    head: dict[str, Any],
    insecure: bool,
    files: dict[str, Written],
    request: str = "",
) -> Manifest:
    """Return the manifest of an execution, which is its receipt.

    Args:
        head: the fields of every header.
        request: without an account, the keyed fingerprint of the plan and of where the input lies.
    """
    cost = Cost(0.0, 0.0) if plan.exact else plan.cost()
    epsilon = None if plan.exact else cost.epsilon
    digest = of_run(request, head["run_id"]) if request else ""
    return Manifest(
        **head,
        program=plan.parameters.program,
        request=digest,
        epsilon=epsilon,
        delta=cost.delta,
        mu=cost.mu,
        rho=cost.rho,
        insecure=insecure,
        files=files,
    )


def of_run(request: str, run_id: str) -> str:
    """Return a digest of a request that cannot be compared with that of another output.

    A fingerprint of the input's state would be the same in any output of the same records, and
    another as soon as one record differs: two outputs would show, without noise, whether a record
    was added or removed.
    """
    digest = hashlib.blake2b(run_id.encode(), key=request.encode(), digest_size=16)
    return digest.hexdigest()


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The execution that a draft belongs to.

    ``request`` is as in `Manifest`, but covers the state of the input too, so that other records
    are not read under its run id.
    """

    run_id: str
    request: str

    def answers(self, request: str) -> bool:
        """Return whether the draft belongs to this very request."""
        return self.request == of_run(request, self.run_id)


def decoded(data: bytes) -> Manifest:
    """Return the manifest of its bytes.

    Raises:
        PolicyError: the bytes have another form.
    """
    return header_of(data, Manifest, MANIFEST)


def existing_manifest(out: Path) -> Manifest | None:
    """Return the manifest of an existing output; ``None`` if there is nothing at its path.

    Raises:
        UsageError: something else is at the path; PolicyError: its manifest has another form.
    """
    if not out.exists() and not out.is_symlink():
        return None
    with file_errors("OUT", "cannot be read"), contextlib.suppress(*ABSENT):
        return decoded((out / MANIFEST).read_bytes())
    raise UsageError("OUT", "exists and is no output of this command", "name a new folder")


def write_file(folder: Path, file: File) -> None:
    """Write a file of a draft; every attempt writes the same bytes.

    The file appears complete or not at all; it is flushed to disk together with the others
    (`Draft.written`).

    Raises:
        RunError: the file cannot be written.
    """
    path = folder / file.name
    with file_errors("OUT", "cannot be written"):
        make_folder(path.parent)
        with drafted(path, PUBLIC) as draft:
            draft.write_bytes(file.content)
            os.replace(draft, path)
