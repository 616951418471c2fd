"""``python -m tests.fuzz.run [TARGET ...] --seconds 60 --seed 1``: feed mutated files to readers.

A failing input is made smaller, written into ``--out`` and said once for each kind of failure.
``--root`` names another checkout of the program, whose readers are then fuzzed: by hand only.
"""

import argparse
import contextlib
import importlib
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.mutate import Mutator

CORPUS = Path(__file__).with_name("corpus")
#: More memory than the process had before, or CPU seconds, no input may need.
MAX_MEMORY, MAX_SECONDS = 2 << 30, 20.0
#: Where each target is, in modules that are imported when they are needed.
MODULES = {
    **dict.fromkeys(("csv", "jsonl", "packed"), "texts"),
    "parquet": "columns",
    **dict.fromkeys(("job", "catalog", "table", "workload", "sql"), "settings"),
}


@dataclass
class Findings:
    """What was run of a target, and the first input of each kind of failure."""

    inputs: int = 0
    seconds: float = 0.0
    failures: dict[str, tuple[bytes, str, float]] = field(default_factory=dict)


def fuzz(target: str, folder: Path, seed: int, inputs: int, seconds: float) -> Findings:
    """Run so many inputs, or for so long."""
    check, corpus, tokens = target_of(target)
    mutator, findings, begin = Mutator(corpus, tokens, seed), Findings(), time.process_time()
    current = folder / f"{target}.current"  # what killed the process, if something did
    for data in corpus:
        failure = failure_of(check, data)
        assert not failure, f"{target}: a file of the corpus fails: {failure}"
    while findings.inputs < inputs and findings.seconds < seconds:
        data = mutator.draw()
        current.write_bytes(data)
        failure = failure_of(check, data)
        findings.inputs += 1
        findings.seconds = time.process_time() - begin
        kind = failure.partition(":")[0]
        if failure and kind not in findings.failures:
            small = smaller(check, data, kind)
            findings.failures[kind] = (small, failure_of(check, small), findings.seconds)
            (folder / f"{target}-{len(findings.failures)}").write_bytes(small)
    current.unlink(missing_ok=True)
    return findings


def target_of(name: str) -> tuple[Callable[[bytes], None], list[bytes], list[bytes]]:
    """How a target is checked, its corpus and tokens."""
    module = importlib.import_module(f"tests.fuzz.{MODULES[name]}")
    files = sorted((CORPUS / name).iterdir())
    return module.target(name), [path.read_bytes() for path in files], module.TOKENS[name]


def failure_of(check: Callable[[bytes], None], data: bytes) -> str:
    """What is wrong with what a reader makes of an input; empty if nothing is."""
    begin = time.process_time()
    try:
        check(data)
    except AssertionError as error:
        return f"{type(error).__name__} {error}"
    except (Exception, SystemExit) as error:
        return f"uncoded {type(error).__name__}: {str(error)[:300]}"
    spent = time.process_time() - begin
    return f"slow: {spent:.0f} s of CPU" if spent > MAX_SECONDS else ""


def smaller(check: Callable[[bytes], None], data: bytes, kind: str, seconds: float = 8) -> bytes:
    """A shorter input that fails in the same way."""
    until, size = time.monotonic() + seconds, len(data) // 2
    while size and time.monotonic() < until:
        at = 0
        while at < len(data) and time.monotonic() < until:
            without = data[:at] + data[at + size :]
            if failure_of(check, without).partition(":")[0] == kind:
                data = without
            else:
                at += size
        size //= 2
    return data


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """No input makes the process much larger."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    size = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (size + MAX_MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def main(arguments: Sequence[str]) -> int:
    """Run targets one after the other; the number of kinds of failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--inputs", nargs="+", default=[], metavar="TARGET=NUMBER")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.root is not None:
        sys.path.insert(0, str(options.root))
    folder = options.out or Path(tempfile.mkdtemp(prefix="dpstream-fuzz-"))
    folder.mkdir(exist_ok=True)
    failed, inputs = 0, dict(pair.split("=") for pair in options.inputs)
    targets = options.targets or list(inputs or MODULES)
    for name in targets:
        importlib.import_module(f"tests.fuzz.{MODULES[name]}")
        seconds = options.seconds / len(targets)
        with bounded_memory():
            most = int(inputs.get(name, 1 << 60))
            findings = fuzz(name, folder, options.seed, most, seconds)
        print(f"{name}: {findings.inputs} inputs, {findings.seconds:.1f} s of CPU, "
              f"{len(findings.failures)} failures", flush=True)  # fmt: skip
        for number, (data, failure, spent) in enumerate(findings.failures.values(), 1):
            failed += 1
            print(f"  after {spent:.1f} s: {failure}\n  {folder}/{name}-{number}, {len(data)} bytes"
                  f": {data[:120]!r}", flush=True)  # fmt: skip
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
