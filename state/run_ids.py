"""Run ids and ids of accounts and tables: the draws that no key determines."""

import secrets


def new_run_id() -> str:
    """Return 128 random bits: the name of a run, its charge and every noise node of it.

    It is committed before the first draw.  Every system takes its run ids from here, so that tests
    can fix them by one replacement; no argument, setting or environment variable does.
    """
    return secrets.token_hex(16)


def new_id() -> str:
    """Return 64 random bits: the lasting id of an account, or of a table of the program."""
    return new_run_id()[:16]
