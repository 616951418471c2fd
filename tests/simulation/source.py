"""The source: partitions that are read in pieces, pieces that come again, records that are late.

A record's stamp is fixed; what varies is when it is delivered.  The watermark may pass a trigger
time only after every record up to it was delivered (mechanism.md rule 0), but for the ``tardy``
ones, which break that assumption on purpose.

Jobs of the simulation: audited mechanisms on a time axis drawn anew.

The number of triggers of a mechanism stays, and with it the sd of its noise: the sampler's
tables cost more than a simulated run.
"""

import dataclasses

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool
from dpstream.accounting.plan.plan import Plan
from tests.audit.neighbours import plans, skipping_plans
from tests.streams import STEP, Stream, generate, positioned, public_table

KEYS, USERS = 12, 40
#: Plans that a third of the worlds get, in place of one of the others.
LATER = ("two_per_key", "three_per_key", "one_per_key", "derived", "kinds")
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
    # The hash names the noise: with the version that they were searched with, seeds that are known
    # for something keep what they do.
    named = {"timeline": line, "stamp": stamp, "privacy": privacy, "mechanism_version": 2}
    plan = msgspec.structs.replace(plan, **named)
    if plan.public_keys is None:
        plan = msgspec.structs.replace(plan, remember=remember)
    return plan.check()


def public_of(plan: Plan) -> pa.Table | None:
    """The canonical public key list of a plan that has one."""
    return None if plan.public_keys is None else public_table(plan, PUBLIC)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Records ``begin .. end - 1`` of a partition."""

    partition: int
    begin: int
    end: int


@dataclasses.dataclass
class Cursor:
    """What was delivered and what will be; copied with a checkpoint."""

    delivered: list[Bool]
    pending: list[Piece]

    def copy(self) -> "Cursor":
        return Cursor([d.copy() for d in self.delivered], list(self.pending))


class Source:
    """All records of a world.

    Args:
        tardy: how many records are delivered when the source feels like it.

    Attributes:
        trigger_times: by partition and offset, the one before which a record must be delivered.
        tardy: by partition and offset, records that may come later; none of them twice so:
            what was seen once is there when the input is read again.
    """

    def __init__(self, plan: Plan, rng: np.random.Generator, records: int, tardy: int) -> None:
        self.plan, self._rng = plan, rng
        partitions = int(rng.integers(1, 4))
        stream = _in_order(
            generate(
                plan, int(rng.integers(1 << 31)), records=records, users=USERS, keys=KEYS,
                partitions=partitions, tick=STEP // 4, heavy=bool(rng.random() < 0.4),
            ),
            rng,
        )  # fmt: skip
        self._tables = [
            _table(stream.take(np.flatnonzero(stream.partition == p)), rng)
            for p in range(partitions)
        ]
        timeline = plan.timeline
        by_partition = [stream.stamp[stream.partition == p] for p in range(partitions)]
        self.trigger_times = [
            np.maximum(1, timeline.trigger_time_of(stamp)) for stamp in by_partition
        ]
        self.tardy: list[Bool] = [
            np.zeros(len(trigger_times), np.bool_) for trigger_times in self.trigger_times
        ]
        for row in rng.choice(len(stream), min(tardy, len(stream)), replace=False):
            self.tardy[stream.partition[row]][stream.offset[row]] = True
        self.ever_tardy = {
            (p, int(offset)) for p, t in enumerate(self.tardy) for offset in np.flatnonzero(t)
        }

    def all_batches(self) -> list[pa.RecordBatch]:
        """Every record once, in order."""
        return [self.batch(Piece(p, 0, t.num_rows)) for p, t in enumerate(self._tables)]

    def batch(self, piece: Piece) -> pa.RecordBatch:
        """The records of a piece, with their position."""
        table = self._tables[piece.partition].slice(piece.begin, piece.end - piece.begin)
        return positioned(
            {name: table.column(name) for name in table.schema.names},
            piece.partition,
            piece.begin,
        )

    def start(self) -> Cursor:
        """Nothing delivered."""
        cursor = Cursor([np.zeros(len(c), np.bool_) for c in self.trigger_times], [])
        self.plan_reads(cursor)
        return cursor

    def plan_reads(self, cursor: Cursor) -> None:
        """Cut all that was not delivered into pieces; some come again, later or much later."""
        rng, queue = self._rng, list[tuple[float, Piece]]()
        most = int(rng.integers(5, 120))
        for partition, done in enumerate(cursor.delivered):
            size = len(done)
            at = int(np.argmin(done)) if not done.all() else size
            while at < size:
                end = min(size, at + int(rng.integers(1, most + 1)))
                tardy = np.flatnonzero(self.tardy[partition][at:end])
                if len(tardy):
                    end = at + max(1, int(tardy[0]))
                alone = bool(self.tardy[partition][at])
                when = at / size + (rng.random() * 0.1 if not alone else 0.1 + rng.random())
                piece = Piece(partition, at, end)
                queue.append((when, piece))
                for _ in range(int(rng.integers(1, 6)) - 1 if rng.random() < 0.3 else 0):
                    begin = at if alone else int(rng.integers(0, end))  # other pieces, too
                    again = when + rng.random() * float(rng.choice([0.05, 1.0]))
                    queue.append((again, Piece(partition, begin, end)))
                at = end
        queue.sort(key=lambda entry: entry[0])
        cursor.pending = [piece for _, piece in queue]

    def deliver(self, cursor: Cursor) -> pa.RecordBatch:
        """The next piece."""
        piece = cursor.pending.pop(0)
        cursor.delivered[piece.partition][piece.begin : piece.end] = True
        return self.batch(piece)

    def seen(self, cursor: Cursor) -> None:
        """A runner that starts again will find what it found before."""
        pairs = zip(self.tardy, cursor.delivered, strict=True)
        self.tardy = [tardy & ~done for tardy, done in pairs]

    def owed(self, cursor: Cursor, watermark: int) -> list[Piece]:
        """Records that should have been there before the watermark of a checkpoint.

        They were late then and have been seen since.  Late once more, a record would be counted
        nowhere: its place is fixed by the decision that the runner went back behind.
        """
        out = []
        zipped = zip(self.trigger_times, self.tardy, cursor.delivered, strict=True)
        for partition, (trigger_times, tardy, done) in enumerate(zipped):
            missing = np.flatnonzero(~done & ~tardy & (trigger_times <= watermark))
            out += [Piece(partition, at, at + 1) for at in missing.tolist()]
        return out

    def reach(self, cursor: Cursor) -> int:
        """The last trigger time that the watermark may have passed."""
        last = self.plan.timeline.last_trigger_time
        for trigger_times, tardy, done in zip(
            self.trigger_times, self.tardy, cursor.delivered, strict=True
        ):
            missing = trigger_times[~done & ~tardy]
            if len(missing):
                last = min(last, int(missing.min()) - 1)
        return last


def _in_order(stream: Stream, rng: np.random.Generator) -> Stream:
    """Offsets that follow the stamps, but not strictly."""
    jitter = stream.stamp + rng.integers(0, int(rng.choice([1, STEP, 3 * STEP])), len(stream))
    offset = np.empty(len(stream), np.int64)
    for partition in range(int(stream.partition.max(initial=0)) + 1):
        mine = np.flatnonzero(stream.partition == partition)
        offset[mine[np.argsort(jitter[mine], kind="stable")]] = np.arange(len(mine))
    ordered = dataclasses.replace(stream, offset=offset)
    return ordered.take(np.lexsort((offset, stream.partition)))


def _table(stream: Stream, rng: np.random.Generator) -> pa.RecordBatch:
    """The records of one partition; some are malformed."""
    batch = stream.batch(np.arange(len(stream)))
    wrong = {"user": "", "value": float("nan")}
    columns = [
        pc.if_else(
            pa.array(rng.random(len(stream)) < 0.01),
            pa.scalar(wrong.get(name), batch.column(name).type),
            batch.column(name),
        )
        for name in batch.schema.names
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
