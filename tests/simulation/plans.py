"""Jobs of the simulation: audited mechanisms on a time axis drawn anew.

The number of triggers of a mechanism stays, and with it the sd of its noise: the sampler's
tables cost more than a simulated run.
"""

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.plan.plan import Plan
from tests.audit.neighbours import plans, skipping_plans
from tests.streams import STEP, public_table

KEYS, USERS = 12, 40
#: Plans that a third of the worlds get, in place of one of the others.
LATER = ("two_per_key", "three_per_key", "one_per_key", "derived")
#: Public keys, some of them without data; records of the others are dead letters.
PUBLIC = range(0, KEYS + 3, 2)


def draw_plan(rng: np.random.Generator, skipping: bool = False) -> Plan:
    """A mechanism with other windows, slides, lateness, skew, periods and stamps.

    Args:
        skipping: one in which pairs on published keys take no selection weight.
    """
    # Without a further draw: what seeds do that are known for something stays what it was.
    dice = int(rng.bit_generator.state["state"]["state"])
    later, remember = dice // 7 % 12, (None, None, "never", 3 * STEP)[dice // 84 % 4]
    candidates = skipping_plans() if skipping else plans()
    name = str(rng.choice([name for name in candidates if name not in LATER]))
    plan = plans()[LATER[later]] if later < len(LATER) and not skipping else candidates[name]
    triggers = plan.timeline.triggers
    stamped = bool(rng.random() < 0.7)
    lateness = int(rng.integers(0, min(3, triggers))) if stamped else 0
    width = triggers - lateness
    slide = width
    if rng.random() < 0.35:
        slide = int(
            rng.choice([d for d in range(1, width + 1) if width % d == 0 and width <= 3 * d])
        )
    windows = int(rng.integers(1, 3 if slide == width else 5))
    period = None if plan.timeline.period is None else int(rng.integers(2, 6)) * STEP
    line = msgspec.structs.replace(
        plan.timeline,
        window=width * STEP,
        slide=slide * STEP,
        allowed_lateness=lateness * STEP,
        end=plan.timeline.start + windows * slide * STEP,
        max_skew=int(rng.choice([0, STEP // 2, 2 * STEP])) if stamped else 0,
        period=period,
    )
    stamp = "arrived" if stamped else "event_time"
    privacy = msgspec.structs.replace(plan.privacy, periods_share_windows=period is not None)
    plan = msgspec.structs.replace(plan, timeline=line, stamp=stamp, privacy=privacy)
    if plan.public_keys is None and privacy.mode == "sticky":
        plan = msgspec.structs.replace(plan, remember=remember)
    return plan.check()


def public_of(plan: Plan) -> pa.Table | None:
    """The canonical public key list of a plan that has one."""
    return None if plan.public_keys is None else public_table(plan, PUBLIC)
