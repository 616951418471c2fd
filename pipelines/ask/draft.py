"""The manifest of an execution's output, and the files of a draft.

``manifest.json`` is the receipt: the digest of every file; what is not in it is not in OUT.  Where
no account is (`launch.census`), ``run.json`` in the output names the run before it draws.
"""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.tabulation.plan import Cost, TablePlan
from dpstream.pipelines.ask.folder import Written
from dpstream.pipelines.formats.receipt import Header, header_of
from dpstream.state.disk_errors import file_errors
from dpstream.state.drafts import drafted
from dpstream.state.durable import PUBLIC, make_folder

MANIFEST, RUN = "manifest.json", "run.json"
_SUFFIX = ".dpstream-table"


class File(NamedTuple):
    """A part of a published table: name below the output folder, and content."""

    name: str
    content: bytes


class Manifest(Header, frozen=True, kw_only=True):
    """What an execution published; public.

    Attributes:
        program: ``p`` or ``h``.
        request: where no account is, what tells whether it answers a request, as `of_run` gives
            it; empty else.
        epsilon, delta, mu, rho: what it costs, ``epsilon`` null: nothing is promised.
        insecure: a fixed test secret was used: its noise can be subtracted by whoever knows it.
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
        """Whether it is of this very request."""
        return self.request == of_run(request, self.run_id)


def manifest_of(
    plan: TablePlan,
    head: dict[str, Any],
    insecure: bool,
    files: dict[str, Written],
    request: str = "",
) -> Manifest:
    """The manifest of an execution, which is its receipt.

    Args:
        head: the fields of every header.
        request: keyed fingerprint of the plan and of all input, where no account is; not shown.
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
    """What an output shows of a request: nothing that can be compared with another output.

    The fingerprint itself would be the same of any output of the same records, and another as soon
    as one record differs: two outputs would tell, without noise, whether anybody came or left.
    """
    digest = hashlib.blake2b(run_id.encode(), key=request.encode(), digest_size=16)
    return digest.hexdigest()


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which execution a draft is of; ``request`` as in `Manifest`."""

    run_id: str
    request: str

    def answers(self, request: str) -> bool:
        """Whether it is of this very request."""
        return self.request == of_run(request, self.run_id)


def decoded(data: bytes) -> Manifest:
    """The manifest of its bytes.

    Raises:
        PolicyError: they are of another form.
    """
    return header_of(data, Manifest, MANIFEST)


def existing_manifest(out: Path) -> Manifest | None:
    """What stands at the output's place, ``None``: nothing.

    Raises:
        PolicyError: something else stands there.
    """
    if not out.exists() and not out.is_symlink():
        return None
    with contextlib.suppress(OSError):
        return decoded((out / MANIFEST).read_bytes())
    raise PolicyError("OUT", "exists and is no output of this command", "name a new folder")


def write_file(folder: Path, file: File) -> None:
    """Write a file of a draft; who writes it again writes the same.

    It is whole at once, and on disk with the others (`Draft.written`).

    Raises:
        RunError: it cannot be written.
    """
    path = folder / file.name
    with file_errors("OUT", "cannot be written"):
        make_folder(path.parent)
        with drafted(path, PUBLIC) as draft:
            draft.write_bytes(file.content)
            os.replace(draft, path)
