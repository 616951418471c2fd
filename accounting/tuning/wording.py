"""Settings and changes of a job in the words of its file."""

from typing import Any

from dpstream.accounting.figures import exact
from dpstream.accounting.limits import MICROS_PER_SECOND
from dpstream.accounting.weights import SelectionWeights


def per_key_text(bound: int | None) -> str:
    """What a bound per key makes of the figures."""
    if bound is None:
        return "every record counts"
    what = "one record of a unit counts" if bound == 1 else f"{bound} records of a unit count"
    return f"{what} per key"


def duration_text(micros: int) -> str:
    """A length of time as a job writes it."""
    names = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
    for name, seconds in names:
        number, rest = divmod(micros, seconds * MICROS_PER_SECOND)
        if number and not rest:
            return f"{number}{name}"
    return f"{micros}us"


def written(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a plan as a job has them: equal weights have a name there."""
    equal = {"mechanism.weights": "uniform"}
    return {k: equal.get(k) if v is None else v for k, v in settings.items()}


def settings_text(settings: dict[str, Any]) -> str:
    """Settings as they stand in a job."""
    return ", ".join(_word(field, value) for field, value in settings.items())


def _word(field: str, value: Any) -> str:
    table, _, name = field.partition(".")
    if table == "aggregate":
        return f"without column '{name}'"
    if value is None:
        return f"no {field}"
    return f"{field} = {toml(value)}"


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, SelectionWeights) and value.size_share is not None:
        return f"{{ size_share = {exact(value.size_share)} }}"
    if isinstance(value, SelectionWeights):
        return f"{{ offset = {exact(value.offset)}, power = {exact(value.power)} }}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    return exact(value) if isinstance(value, float) else str(value)
