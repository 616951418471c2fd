"""The Spanner store's own life: the suite that every store passes."""

from tests.state.life_conformance import RetentionConformance


class TestSpannerRetention(RetentionConformance):
    """The suite of every store's own life."""
