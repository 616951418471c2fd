"""Warnings that Beam logs while it is imported: they are dropped, and nothing else is.

Beam looks for the libraries of its file systems and of its BigQuery client, and warns of each that
is absent.  Nobody who reads it can act on it: what a job needs and does not find is named when it
is needed (`accounting.extras`).  Any import of the package comes here first, before a module of it
imports Beam.
"""

import logging

#: The loggers' names, and how the messages begin.
_DROPPED = (("apache_beam.io.filesystems", "Failed to import"), (None, "apitools not found"))


def drop_import_warnings() -> None:
    """Keep what Beam logs at its import from all handlers."""
    for name, beginning in _DROPPED:
        logging.getLogger(name).addFilter(_Dropped(beginning))


class _Dropped(logging.Filter):
    """Drops messages of Beam's modules that begin so."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        dropped = isinstance(record.msg, str) and record.msg.startswith(self._beginning)
        return not (dropped and "apache_beam" in record.pathname)
