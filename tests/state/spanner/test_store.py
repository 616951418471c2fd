"""The Spanner store on the official emulator: conformance, and what is its own."""

from tests.state.conformance import StoreConformance


class TestSpannerStore(StoreConformance):
    """The suite every store passes."""
