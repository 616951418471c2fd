"""Tests, and benchmarks beside them: the package is imported before any of them imports Beam."""

import dpstream  # noqa: F401
