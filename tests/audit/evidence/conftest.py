"""The fixtures of plans."""

from tests.accounting.conftest import make_plan

__all__ = ["make_plan"]
