"""Names of columns that travel between stages, beside those that a job's key columns may have."""

import msgspec
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import admitted_schema, record_schema, shard_release_schema
from tests.dp_transforms.runs import PLANS
from tests.streams import make_plan


def keyed(plan: Plan, name: str) -> Plan:
    """The plan with one key column of that name."""
    return msgspec.structs.replace(plan, key=(Field(name, "string"),)).check()


@pytest.mark.parametrize("plan", [*PLANS.values(), make_plan(stamped=True)])
def test_no_key_column_may_have_the_name_of_an_inner_one(plan: Plan) -> None:
    schemas = record_schema(plan), admitted_schema(plan), shard_release_schema(plan)
    inner = {name for schema in schemas for name in schema.names} - {f.column for f in plan.key}
    for name in inner:
        with pytest.raises(UsageError):
            keyed(plan, name)


@pytest.mark.parametrize("name", ["step_index", "event_trigger_time", "leaf", "event_cut", "cut"])
def test_a_key_column_may_have_any_other_name(name: str) -> None:
    plan = keyed(make_plan(stamped=True), name)
    for schema in (record_schema(plan), admitted_schema(plan), shard_release_schema(plan)):
        assert len(set(schema.names)) == len(schema.names)
