"""The three experiments: data, settings, comparison.

* Table 1: the synthetic day, C = 32, T = 100 and 1000.
* Figure 10: the same data and T = 100 with C from 1 to 50.
* Table 2: the Reddit corpus, generated in its shape or the real one, C = 17.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dpstream.accounting.errors import UsageError
from tests.bench.paper import reddit, synth
from tests.bench.paper.baselines import NAMES
from tests.bench.paper.jobs import Frame, Setting, parse_mode
from tests.bench.paper.runs import Contest, Row, Say, check, compare, provenance


@dataclass(frozen=True)
class Study:
    """Parameters of one experiment; all public.

    Attributes:
        users, seed: of the generated data; keys: of Table 1's data.
        modes: as for `modes.parse_mode`; baselines: of `baselines.NAMES`.
        triggers: every T; contributions: every C (the tables take one).
        epsilon, delta: the guarantee of every method.
        folder: data and runs; webis: the real corpus for Table 2.
    """

    folder: Path
    users: int
    modes: tuple[str, ...]
    triggers: tuple[int, ...] = (100, 1000)
    contributions: tuple[int, ...] = (32,)
    baselines: tuple[str, ...] = NAMES
    keys: int = 1_000_000
    seed: int = 0
    epsilon: float = 6.0
    delta: float = 1e-9
    shards: int = 4
    webis: Path | None = None
    notes: Row = field(default_factory=dict)

    def contest(self, data: Path, user_type: str) -> Contest:
        """All runs of the study on one data set.

        Raises:
            UsageError: a mode that cannot be read.
        """
        modes = [parse_mode(text) for text in dict.fromkeys(self.modes)]
        frame = Frame(data, user_type, self.folder / "runs", self.epsilon, self.delta, self.shards)
        settings = [
            Setting(mode, t, c)
            for t in dict.fromkeys(self.triggers)
            for mode in modes
            for c in dict.fromkeys(self.contributions)
        ]
        if not settings and not self.baselines:
            raise UsageError("--modes", "and --baselines are both empty", "name something to run")
        baselines = tuple(dict.fromkeys(self.baselines))
        return Contest(frame, settings, baselines, self.triggers, self.contributions[0])


def synthetic(study: Study, say: Say) -> tuple[Path, Callable[[], None]]:
    """File of Table 1's data, and what writes it if it is not there."""
    params = synth.Synth(users=study.users, keys=study.keys, seed=study.seed).check()
    path = study.folder / f"zipf-{study.users}-{study.keys}-{study.seed}.parquet"

    def make() -> None:
        if not path.exists():
            say(f"generating the records of {study.users:,} users")
            synth.generate(params, path)

    return path, make


def corpus(study: Study, say: Say) -> tuple[Path, Callable[[], None]]:
    """File of Table 2's data, and what writes it if it is not there."""
    params = reddit.Reddit(users=study.users, seed=study.seed).check()
    if study.webis is None:
        path = study.folder / f"reddit-{study.users}-{study.seed}.parquet"
    else:
        size = study.webis.stat().st_size if study.webis.exists() else 0
        path = study.folder / f"webis-{size}-{study.seed}.parquet"

    def make() -> None:
        if not path.exists():
            say("writing the posts as records")
            write_posts(params, path, study.webis)

    return path, make


def write_posts(
    params: reddit.Reddit, path: Path, source: Path | None, overwrite: bool = False
) -> reddit.PostCount:
    """Write Reddit records to a Parquet file: generated, or of the real corpus ``source``.

    Raises:
        UsageError: the corpus cannot be read or holds no post; the file exists.
    """
    if source is None:
        made = reddit.batches(params)
        return reddit.PostCount(synth.write_batches(made, params.layout, path, overwrite))
    tally = reddit.PostCount()
    with reddit.open_corpus(source) as stream:
        posts = reddit.corpus_batches(stream, params.layout, tally)
        synth.write_batches(reddit.checked(posts), params.layout, path, overwrite)
    return tally


def synthetic_day(name: str, study: Study, say: Say) -> Row:
    """Table 1: modes and baselines at every T; Figure 10: every C of ``study.contributions``."""
    path, make = synthetic(study, say)
    return _result(name, study, _run(study, study.contest(path, "int"), make, say))


def table2(name: str, study: Study, say: Say) -> Row:
    """Table 2: modes and baselines at every T on Reddit posts."""
    path, make = corpus(study, say)
    return _result(name, study, _run(study, study.contest(path, "string"), make, say))


def _run(study: Study, contest: Contest, make: Callable[[], None], say: Say) -> list[Row]:
    study.folder.mkdir(parents=True, exist_ok=True)
    jobs = check(contest)
    make()
    return compare(contest, jobs, say)


def _result(name: str, study: Study, rows: list[Row]) -> Row:
    """The result as JSON: what was asked, where it was run, what was measured."""
    settings = {
        "users": study.users,
        "seed": study.seed,
        "epsilon": study.epsilon,
        "delta": study.delta,
        "shards": study.shards,
        "data": "webis-tldr-17" if study.webis else "generated",
    }
    if name != "table2":
        settings["keys"] = study.keys
    return {"experiment": name, **provenance(), **settings, **study.notes, "runs": rows}
