"""Where a secret is, in one grammar, and how it is read: the only module that reads one.

    file:PATH                                    64 hex digits in a file of mode 0600
    env:NAME                                     64 hex digits in an environment variable
    gcp:projects/P/secrets/S/versions/NUMBER     64 hex digits in Google Secret Manager

A reference is public (it stands in project files and pickles); what it leads to is not: it is read
into a buffer that is overwritten after its children are derived, and no error quotes it, nor is
raised while an exception of a library (which might) is handled.  A reference names one secret for
good: a run must go on with the secret it was begun with, so moving names are refused.
"""

import os
import re
import stat

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.dp_transforms.noise.secret import KEY_BYTES, wipe

FIELD = "secret"
#: Bytes of a secret's text with the white space around it.
MAX_TEXT = 256
#: Distinct bytes that 32 random ones have but for a chance of 2^-75; a placeholder has fewer.
MIN_DISTINCT = 12
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_SECRET = re.compile(r"projects/[a-z0-9.:-]{1,100}/secrets/[A-Za-z0-9_-]{1,255}/versions/(.*)")
_VERSION = re.compile(r"[1-9][0-9]{0,18}")


def parse_reference(text: str) -> tuple[str, str]:
    """(scheme, place) of a reference; nothing is read.

    Raises:
        UsageError: not of the grammar; the text is not repeated, because it may be a secret.
        PolicyError: a version of a secret by a name that can move (``latest``, an alias).
    """
    scheme, _, place = text.partition(":")
    if scheme == "file" and place and "\0" not in place:
        return scheme, place
    if scheme == "env" and _VARIABLE.fullmatch(place):
        return scheme, place
    secret = _SECRET.fullmatch(place) if scheme == "gcp" else None
    if secret is None:
        raise UsageError(
            FIELD,
            "is not a reference to a secret",
            "write 'file:PATH', 'env:NAME' or 'gcp:projects/P/secrets/S/versions/NUMBER', never "
            "the secret itself",
        )
    if not _VERSION.fullmatch(secret[1]):
        raise PolicyError(
            FIELD,
            "must name a version by its number: a run goes on with the secret it was begun with, "
            "and any other name can move to another secret",
            "write '.../versions/NUMBER'",
        )
    return scheme, place


def read_secret(reference: str) -> bytearray:
    """The 32 bytes a reference leads to, in a buffer that the caller overwrites (``wipe``).

    Raises:
        UsageError: there is no secret, or something else; PolicyError: others can read it.
        RunError: the secret manager could not be asked.
    """
    scheme, place = parse_reference(reference)
    if scheme == "file":
        text = _of_file(place)
    elif scheme == "env":
        text = _of_environment(place)
    else:
        from dpstream.dp_transforms.noise.secret_manager import (
            access,  # an extra, and slow to import
        )

        text = bytearray(access(place))
    try:
        return _decoded(text)
    finally:
        wipe(text)


def _of_file(path: str) -> bytearray:
    """The text of a file that nobody else can read; permissions of what was opened."""
    text = bytearray(MAX_TEXT)
    problem: DpstreamError | None = None
    try:
        with open(path, "rb", buffering=0) as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                problem = PolicyError(
                    FIELD,
                    "the secret can be read or changed by other users",
                    "run chmod 600 on the file",
                )
            else:
                del text[file.readinto(text) or 0 :]
    except PermissionError:
        problem = UsageError(
            FIELD, "the secret file may not be read", "check its owner and its folder"
        )
    except (OSError, ValueError):
        problem = UsageError(
            FIELD,
            "the secret file is missing or no file",
            "restore it, or create one for a new run with `dpstream secret new FILE`",
        )
    if problem is not None:
        raise problem
    return text


def _of_environment(name: str) -> bytearray:
    """The text of a variable; the process keeps its own copy for as long as it lives."""
    value = os.environ.get(name)
    if not value:
        raise UsageError(
            FIELD,
            "the environment variable it names is not set",
            "set it to 64 hex digits where the job runs, on every worker",
        )
    return bytearray(value.encode("utf-8", "surrogateescape"))


def _decoded(text: bytearray) -> bytearray:
    """The bytes of 64 hex digits with white space around them."""
    digits = re.fullmatch(rb"\s*([0-9a-fA-F]{64})\s*", text) if len(text) < MAX_TEXT else None
    if digits is None:
        raise UsageError(
            FIELD,
            "what it leads to is not 64 hex digits",
            "make a secret with `dpstream secret new FILE` and keep its text there",
        )
    begin, secret = digits.start(1), bytearray(KEY_BYTES)
    for index in range(KEY_BYTES):
        at = begin + 2 * index
        secret[index] = int(text[at : at + 2], 16)
    if len(set(secret)) < MIN_DISTINCT:
        wipe(secret)
        raise PolicyError(
            FIELD,
            "what it leads to is a placeholder, not a random secret",
            "make a secret with `dpstream secret new FILE`",
        )
    return secret
