"""A filter that drops the warnings that Beam logs while it is imported, and no others.

Beam warns of each missing library of its file systems and of its BigQuery client.  A reader cannot
act on these warnings: a library that a job needs is named when it is needed
(`accounting.extras`).  Every import of the package runs this module before any of its modules
imports Beam.
"""

import logging

#: The loggers' names, and how the messages begin.
_DROPPED = (("apache_beam.io.filesystems", "Failed to import"), (None, "apitools not found"))


def drop_import_warnings() -> None:
    """Drop the warnings that Beam logs at its import, before they reach any handler."""
    for name, beginning in _DROPPED:
        logging.getLogger(name).addFilter(_Dropped(beginning))


class _Dropped(logging.Filter):
    """Drops messages of Beam's modules that begin with a text."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        dropped = isinstance(record.msg, str) and record.msg.startswith(self._beginning)
        return not (dropped and "apache_beam" in record.pathname)
