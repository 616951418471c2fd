"""The fixtures of jobs."""

from tests.pipelines.conftest import make_job

__all__ = ["make_job"]
