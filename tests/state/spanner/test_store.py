"""The Spanner store on the official emulator: conformance, and what is its own.

The Spanner store's own life: the suite that every store passes.
"""

from tests.state.conformance import StoreConformance
from tests.state.life_conformance import RetentionConformance


class TestSpannerStore(StoreConformance):
    """The suite every store passes."""


class TestSpannerRetention(RetentionConformance):
    """The suite of every store's own life."""
