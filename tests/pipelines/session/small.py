"""A tiny table: two dimensions, budgets of epsilon and rho, and its records by hand."""

from pathlib import Path

from dpstream.pipelines.session.config import Config, load_config
from dpstream.pipelines.session.records.load import init
from dpstream.state.ledger.open import PROJECT_FILE
from tests import accounts

PROJECT = """
version = 1

[data_set.small]
insecure_test_secret = "{key}"
account = {{ path = "ledger.db" }}

[table.small]
path = "small.csv"
record_id = "name"
{more}

[table.small.dimension.a]
type = "integer"
low = 0
high = 4

[table.small.dimension.b]
type = "integer"
low = 0
high = 10
missing = "point"

[table.small.dimension.epsilon]
type = "budget"
most = 2.0
step = 0.25

[table.small.dimension.rho]
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
    """The project file of a folder, and the table with its records."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.csv").write_text(records)
    accounts.write(folder / PROJECT_FILE, PROJECT.format(key="22" * 32, more=more))
    config = load_config(folder)
    init(config)
    return config
