"""Checks of this machine: versions, engines, emulators, and whether its disk stores files durably.

The report has only names and versions, no paths.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dpstream.accounting.errors import RunError
from dpstream.accounting.extras import EXTRAS, NAME, absent, installing
from dpstream.pipelines.runners import parts, prism_build
from dpstream.state.durable import put_once
from dpstream.state.sqlite.database import sqlite3, wal_is_safe

#: How to get what is missing.
HOW = {
    "Prism": "dpstream doctor --fix",
    "Flink's job server": "make flink",
    "Java": "install Java 17",
    "Spanner emulator": "gcloud components install cloud-spanner-emulator",
    "Pub/Sub emulator": "gcloud components install pubsub-emulator",
    "Kafka broker's jars": "make kafka",
}
#: Of a version that can damage a file in WAL mode.
OLD_SQLITE = (
    "SQLite {version} can damage a database in WAL mode that several processes write, so stores "
    "use a rollback journal, which is slower: pip install pysqlite3, or use SQLite 3.51.3 or newer."
)


def examine() -> dict[str, Any]:
    """Return the report on this installation.

    Its keys are ``python``, ``packages``, ``extras``, ``runners``, ``emulators``, ``sqlite`` (its
    version), ``disk`` (fsync and its milliseconds), ``ready`` and ``verdict`` (lines).
    """
    needs = requirements()
    packages = {name: installed(name) for name in needs}
    disk = _disk()
    missing = [name for name, version in packages.items() if version is None]
    unfit = [
        f"{name} {version} (needs {needs[name]})"
        for name, version in packages.items()
        if version is not None and not needs[name].contains(version, prereleases=True)
    ]
    old = sys.version_info < (3, 11)
    faults = [f"missing packages: {', '.join(missing)}"] if missing else []
    faults += [f"unfit packages: {', '.join(unfit)}"] if unfit else []
    faults += ["Python 3.11 or newer is needed"] if old else []
    faults += [] if disk["fsync"] else ["the disk of this folder refuses fsync"]
    runners, emulators = _runners(), _emulators()
    extras = _extras()
    away = [
        f"{name} ({HOW[name]})" if name in HOW else name
        for name, status in {**runners, **emulators}.items()
        if not status
    ]
    program = parts.prism()
    opened = program is not None and parts.prism_is_open(program)
    older = program is not None and not opened and not parts.prism_has_edits(program)
    return {
        "python": platform.python_version(),
        "packages": packages,
        "extras": extras,
        "runners": runners,
        "emulators": emulators,
        "sqlite": sqlite3.sqlite_version,
        "disk": disk,
        "ready": not faults,
        "verdict": [
            f"Not ready: {'; '.join(faults)}." if faults else "Ready for local runs.",
            f"Not found (not needed locally): {', '.join(away)}." if away else "All found.",
            *(
                f"Extra `{name}` is not installed ({entry['purpose']}): {entry['install']}"
                for name, entry in extras.items()
                if entry["missing"]
            ),
            *([] if wal_is_safe() else [OLD_SQLITE.format(version=sqlite3.sqlite_version)]),
            *([f"Prism is refused, it lets other machines in: {HOW['Prism']}."] if opened else []),
            *([f"Prism lacks edits of this version, it may be slow: {HOW['Prism']}."] * older),
        ],
    }


def requirements() -> dict[str, SpecifierSet]:
    """Return the allowed versions of each package, as the installed distribution declares them.

    This package comes first, then those that it depends on without any extra.
    """
    try:
        lines = importlib.metadata.requires(NAME) or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    declared = [Requirement(line) for line in lines]
    plain = {"extra": ""}
    return {
        NAME: SpecifierSet(),
        **{r.name: r.specifier for r in declared if r.marker is None or r.marker.evaluate(plain)},
    }


def _extras() -> dict[str, dict[str, Any]]:
    """Return for each extra its purpose, its missing modules, and the command that installs it."""
    return {
        name: {
            "purpose": entry.purpose,
            "missing": list(absent(name)),
            "install": installing(name),
        }
        for name, entry in EXTRAS.items()
    }


def fix_prism() -> Path | None:
    """Build the required version of Prism.

    It replaces a wrong version that ``make`` built, else it is written to the user's data folder.

    Returns:
        Its path; ``None``: the right version exists.

    Raises:
        RunError: there is no Go, the module is not the pinned one, or the build failed.
    """
    program = parts.prism()
    if program is not None and _fits(program):
        return None
    if shutil.which("go") is None:
        raise RunError(
            "Prism",
            "is built by Go, which is not on the path",
            "install Go (https://go.dev/dl) and run `dpstream doctor --fix` again",
        )
    made = program is not None and program.parents[1] in parts.tools()
    out = program if program and made else parts.data_folder() / "bin" / "prism"
    try:
        prism_build.build(out)
    except SystemExit as refused:  # the script's own words; they name the module, no path
        raise RunError("Prism", str(refused), "get the pinned module of Beam") from None
    except (OSError, subprocess.SubprocessError):
        raise RunError(
            "Prism", "could not be built", "look at what Go said; it needs the network and a disk"
        ) from None
    if not _fits(out):
        out.unlink()
        raise RunError("Prism", "was built and does not fit, so it was removed", "report it")
    return out


def _fits(program: Path) -> bool:
    """Return whether a Prism has this program's Beam and all edits, and listens only here."""
    same = parts.prism_version(program) == parts.beam_version()
    return same and parts.prism_has_edits(program)


def installed(name: str) -> str | None:
    """Return the version of a package; ``None`` if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _runners() -> dict[str, str | None]:
    """Return the version of each engine on this machine; ``None`` if it is missing."""
    prism, java = parts.prism(), parts.java_version()
    return {
        "FnApiRunner": installed("apache-beam"),
        "Prism": (parts.prism_version(prism) or "of unknown version") if prism else None,
        "Flink's job server": "jar" if parts.job_server() else None,
        "Java": str(java) if java else None,
    }


def _emulators() -> dict[str, bool]:
    """Return which emulators and brokers for tests are available.

    They are running, named, in an SDK on the path, or made.
    """
    binary = os.environ.get("SPANNER_EMULATOR_BINARY", "")
    gcloud = shutil.which("gcloud")
    programs = Path(gcloud).resolve().parent if gcloud else None
    return {
        "Spanner emulator": bool(os.environ.get("SPANNER_EMULATOR_HOST"))
        or os.access(binary, os.X_OK)
        or (programs is not None and (programs / "cloud_spanner_emulator").exists()),
        "Pub/Sub emulator": bool(os.environ.get("PUBSUB_EMULATOR_HOST"))
        or (programs is not None and (programs.parent / "platform/pubsub-emulator").is_dir()),
        "Kafka broker's jars": parts.kafka() is not None,
    }


def _disk() -> dict[str, Any]:
    """Return whether a file in this folder can be stored durably, and how long that takes."""
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=".") as folder:
            begin = time.perf_counter()
            put_once(Path(folder) / "probe", b"probe")
            return {"fsync": True, "milliseconds": round(1000 * (time.perf_counter() - begin), 2)}
    except OSError:
        return {"fsync": False, "milliseconds": None}
