"""A tiny table: two dimensions, budgets of epsilon and rho, and its records by hand."""

from pathlib import Path

from dpstream.pipelines.session.config import Config, load_config
from dpstream.pipelines.session.load import init
from tests import accounts

TABLE = """
[ledger]
path = "ledger.db"
data_set = "small"

[privacy]
insecure_test_key = "{key}"

[table]
name = "small"
folder = "small.table"
records = "small.csv"
id = "name"
{more}

[[dimension]]
name = "a"
type = "integer"
low = 0
high = 4

[[dimension]]
name = "b"
type = "integer"
low = 0
high = 10
missing = "point"

[[dimension]]
name = "epsilon"
type = "budget"
most = 2.0
step = 0.25

[[dimension]]
name = "rho"
type = "budget"
kind = "rho"
most = 1.0
step = 0.25
"""
#: name, a, b, epsilon, rho; the last one is not usable.
RECORDS = """name,a,b,epsilon,rho
r0,0,1,1.0,0.5
r1,0,2,2.0,0.5
r2,1,3,0.5,0.5
r3,1,,2.0,0.5
r4,2,5,1.5,0.5
r5,3,9,2.0,0.5
r6,9,9,2.0,0.5
"""


def config_at(folder: Path, records: str = RECORDS, more: str = "") -> Config:
    """The file of a table, and the table with its records."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.csv").write_text(records)
    accounts.write(folder / "TABLE.toml", TABLE.format(key="22" * 32, more=more))
    config = load_config(folder / "TABLE.toml")
    init(config)
    return config
