"""The manifest of a census execution's output, and the files of its draft.

``manifest.json`` is the receipt: it has the digest of every file, and a file that is not in it is
not part of the output.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from dpstream.accounting.composition import Cost
from dpstream.accounting.tabulation.plan import TablePlan
from dpstream.pipelines.ask.folder import Written
from dpstream.pipelines.formats.receipt import Header, header_of
from dpstream.state.disk_errors import file_error, file_errors
from dpstream.state.durable import PUBLIC, drafted, make_folder

MANIFEST = "manifest.json"


class File(NamedTuple):
    """A part of a published table: its name below the output folder, and its content."""

    name: str
    content: bytes


class Manifest(Header, frozen=True, kw_only=True):
    """The description of an execution's output; public.

    Attributes:
        program: ``p`` or ``h``.
        epsilon, delta, mu, rho: the cost; ``epsilon`` is null if there is no guarantee.
        insecure: a fixed test secret was used: whoever knows it can subtract the noise.
        files: by name below the folder.
    """

    program: str
    epsilon: float | None
    delta: float
    mu: float | None
    rho: float | None
    insecure: bool
    files: dict[str, Written]


def manifest_of(
    plan: TablePlan,
    head: dict[str, Any],
    insecure: bool,
    files: dict[str, Written],
) -> Manifest:
    """Return the manifest of an execution, which is its receipt.

    Args:
        head: the fields of every header.
    """
    cost = Cost(0.0, 0.0) if plan.exact else plan.cost()
    epsilon = None if plan.exact else cost.epsilon
    return Manifest(
        **head,
        program=plan.parameters.program,
        epsilon=epsilon,
        delta=cost.delta,
        mu=cost.mu,
        rho=cost.rho,
        insecure=insecure,
        files=files,
    )


def decoded(data: bytes) -> Manifest:
    """Return the manifest of its bytes.

    Raises:
        PolicyError: the bytes have another form.
    """
    return header_of(data, Manifest, MANIFEST)


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


def put(folder: str, file: File) -> None:
    """Write a file of a folder, or an object of a store; every attempt writes the same bytes.

    Raises:
        RunError: it cannot be written.
    """
    if "://" not in folder:
        write_file(Path(folder), file)
        return
    from dpstream.pipelines.connectors.folder.store import Folder

    place = Folder(folder)
    system, path = place.open(), place.path(file.name)
    with file_errors("out_folder", "cannot be written"):
        if place.local:
            system.create_dir(path.rpartition("/")[0], recursive=True)
        with system.open_output_stream(path) as out:
            out.write(file.content)


def get(folder: str, name: str) -> bytes | None:
    """Return the object of a store; ``None``: there is none.

    Raises:
        RunError: the store cannot be read.
    """
    from dpstream.pipelines.connectors.folder.store import Folder

    try:
        if Folder(folder).info(name) is None:
            return None
        with Folder(folder).stream(name) as file:
            return file.read()
    except OSError as error:
        raise file_error(name, "cannot be read", error) from None
