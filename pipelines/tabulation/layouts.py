"""The layouts of the private files: columns, and what a column may hold.

A record has up to eight race codes and one of ethnicity.  `Null` stands for no code, only behind
the last one; a record without any race code is a fault.
"""

from enum import StrEnum
from typing import NamedTuple

from dpstream.dp_transforms.tabulation.expand import RACES
from dpstream.pipelines.tabulation.geography import BLOCK

RACE_COLUMNS = tuple(f"QRACE{number}" for number in range(1, RACES + 1))
ETHNICITY = "QSPAN"


class Rule(StrEnum):
    """Why a record goes to the dead letter; fixed and public, in the order in which they count."""

    MALFORMED = "malformed"
    LINE_TOO_LONG = "line_too_long"
    FIELD_COUNT = "field_count"
    BLOCK_FORM = "block_form"
    BLOCK_UNKNOWN = "block_unknown"
    AGE = "age"
    SEX = "sex"
    HOUSEHOLDER = "householder"
    RACE_GROUP = "race_group"
    NO_RACE_CODE = "no_race_code"
    RACE_CODE_UNKNOWN = "race_code_unknown"
    RACE_CODE_AFTER_NULL = "race_code_after_null"
    ETHNICITY_CODE_UNKNOWN = "ethnicity_code_unknown"
    HOUSEHOLD_TYPE = "household_type"
    TENURE = "tenure"


class Layout(NamedTuple):
    """A private file.

    Attributes:
        file: its name; columns: its header.
        race_group: column of the race group, 01 to 63, which no table uses.
    """

    file: str
    columns: tuple[str, ...]
    race_group: str


LAYOUTS = {
    "p": Layout(
        "person-records.txt",
        ("QAGE", "QSEX", "HOUSEHOLDER", *BLOCK, "CENRACE", *RACE_COLUMNS, ETHNICITY),
        "CENRACE",
    ),
    "h": Layout(
        "household-records.txt",
        (*BLOCK, "HHRACE", *RACE_COLUMNS, ETHNICITY, "HOUSEHOLD_TYPE", "TEN"),
        "HHRACE",
    ),
}
