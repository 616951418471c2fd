"""Run ids: the one draw that no key determines."""

import secrets


def new_run_id() -> str:
    """128 random bits: names a run, its charge and every noise node of it.

    It is committed before the first draw.  Every system takes its run ids from here, so that tests
    can fix them by one replacement; no argument, setting or environment variable does.
    """
    return secrets.token_hex(16)
