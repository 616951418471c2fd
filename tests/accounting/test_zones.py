"""Local times of zones against another implementation: ICU, in DuckDB."""

import duckdb
import numpy as np
import pytest

from dpstream.accounting.zones import zone_of

ZONES = (
    "Europe/Berlin", "Europe/London", "Europe/Lisbon", "Europe/Moscow", "Europe/Istanbul",
    "Europe/Dublin", "America/New_York", "America/Los_Angeles", "America/Sao_Paulo",
    "America/St_Johns", "America/Caracas", "America/Havana", "America/Santiago", "America/Nuuk",
    "Africa/Cairo", "Africa/Casablanca", "Africa/Lagos", "Africa/Windhoek", "Asia/Kolkata",
    "Asia/Kathmandu", "Asia/Baku", "Asia/Tokyo", "Asia/Pyongyang", "Asia/Gaza", "Asia/Almaty",
    "Australia/Lord_Howe", "Australia/Sydney", "Pacific/Apia", "Pacific/Chatham",
    "Pacific/Kiritimati",
)  # fmt: skip
DAY, YEARS = 86_400_000_000, 50


@pytest.mark.parametrize("name", ZONES)
def test_a_local_time_is_the_first_instant_that_a_clock_shows_it(name: str) -> None:
    """Of 50 years: each change of the clocks to the second, and 2,000 times between."""
    zone, rng = zone_of(name), np.random.default_rng(7)
    drawn = rng.integers(0, YEARS * 365 * DAY, 2_000) // 1_000_000 * 1_000_000
    changes = zone.changes[(zone.changes > 0) & (zone.changes < YEARS * 365 * DAY)]
    instants = np.unique(np.concatenate([drawn, changes, changes - 1_000_000, changes + DAY // 24]))
    local = on_clocks(name, instants)
    read = zone.utc(local)
    assert (read <= instants).all() and (instants - read <= DAY).all()
    assert (on_clocks(name, read) == local).all()
    again = np.diff(np.sort(local)) == 0
    assert (read == instants).sum() >= len(instants) - again.sum() - len(changes)


def on_clocks(name: str, instants: np.ndarray) -> np.ndarray:
    """Micros that clocks of a zone show at instants."""
    with duckdb.connect(config={"threads": 1}) as db:
        db.register("given", {"micros": instants})
        query = f"SELECT epoch_us(timezone('{name}', make_timestamptz(micros))) AS t FROM given"
        return np.asarray(db.sql(query).fetchnumpy()["t"], np.int64)


def test_a_time_that_was_skipped_goes_on_with_the_old_offset() -> None:
    skipped = np.array(["2024-03-31T02:30"], "datetime64[us]").astype(np.int64)
    twice = np.array(["2024-10-27T02:30"], "datetime64[us]").astype(np.int64)
    zone = zone_of("Europe/Berlin")
    assert zone.utc(skipped).astype("datetime64[us]").item().isoformat() == "2024-03-31T01:30:00"
    assert zone.utc(twice).astype("datetime64[us]").item().isoformat() == "2024-10-27T00:30:00"


def test_a_digest_tells_of_the_past_alone() -> None:
    zone = zone_of("Europe/Berlin")
    begin, later = (int(zone.changes[number]) for number in (5, 7))
    assert zone.digest(begin) == zone.digest(begin - 1) != zone.digest(later)
    longer = zone._replace(changes=np.append(zone.changes, 2**62))
    assert longer.digest(later) == zone.digest(later)
