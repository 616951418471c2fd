"""DuckDB's errors as coded ones: its own texts quote values."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.state.disk_errors import failed_read


@contextlib.contextmanager
def coded(paths: list[str], too_large: RunError, failed: RunError) -> Iterator[None]:
    """Replace DuckDB's errors, without their texts and causes; a context.

    Args:
        paths: the files that it reads.
        too_large: the error beyond its limit of memory; failed: that for every other error.
    """
    try:
        yield
    except duckdb.IOException:
        failure: DpstreamError = failed_read(failed.field, map(Path, paths))
    except (duckdb.OutOfMemoryException, pa.ArrowMemoryError):
        failure = too_large
    except (duckdb.Error, pa.ArrowException, UnicodeError):
        failure = failed
    else:
        return
    raise failure from None
