"""The programs that engines need on this machine: Prism, Flink's job server, Java.

Each is looked for where a flag says, then in ``.tools`` of the folder the command runs in and of
the project's own folder, where ``make prism flink`` puts them, and in the user's data folder, where
``dpstream doctor --fix`` does; Prism then on the path.
"""

import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apache_beam

from dpstream.pipelines.runners import prism_build

#: Where a Go program names the module it was built from.
_MODULE = b"mod\tgithub.com/apache/beam/sdks/v2\t"
#: What ``pipelines.runners.prism_build`` writes into a Prism that listens on this machine only.
_LOOPBACK = b"build\t-tags=loopback,beam"


def prism(named: str | None = None) -> Path | None:
    """Return Prism's program; ``named`` excludes all other places."""
    made = _tool("bin/prism", named)
    on_path = None if named else shutil.which("prism")
    return made or (Path(on_path) if on_path else None)


def prism_version(program: Path) -> str | None:
    """Return the Beam version that a Prism was built from, or ``None`` if it does not say."""
    return _after(program, _LOOPBACK) or _after(program, _MODULE)


def prism_is_open(program: Path) -> bool:
    """Return whether it is Beam's own build, which listens on all interfaces."""
    return _after(program, _LOOPBACK) is None and _after(program, _MODULE) is not None


def prism_has_edits(program: Path) -> bool:
    """Return whether it was built by this program's ``prism_build``, with all of its edits."""
    with _bytes(program) as data:
        return data.find(f"build\t-tags={prism_build.TAGS}\n".encode()) >= 0


def _after(program: Path, prefix: bytes) -> str | None:
    """The version that follows a prefix in a program."""
    with _bytes(program) as data:
        at = data.find(prefix)
        if at < 0:
            return None
        version = re.split(rb"[\t\n,]", data[at + len(prefix) : at + len(prefix) + 40])[0]
    text = version.decode("ascii", "replace").removeprefix("v")
    return text if text[:1].isdigit() else None


@contextmanager
def _bytes(program: Path) -> Iterator[mmap.mmap]:
    with program.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def beam_version() -> str:
    """Return the Beam version of this program."""
    return str(apache_beam.__version__)


def job_server(named: str | None = None) -> Path | None:
    """Return the jar of Flink's job server; ``named`` excludes all other places."""
    return _tool("flink/job-server.jar", named)


def kafka() -> Path | None:
    """Return the folder of a Kafka broker's jars."""
    ready = _tool("kafka/.ready")
    return ready and ready.parent


def java_version(launcher: str = "java") -> int | None:
    """Return the major version of a Java, or ``None`` if there is none that runs."""
    program = shutil.which(launcher)
    if program is None:
        return None
    try:
        output = subprocess.run(
            [program, "-version"], capture_output=True, text=True, check=True, timeout=30
        ).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    number = output.partition('"')[2].partition('"')[0].removeprefix("1.").split(".")[0]
    return int(number) if number.isdigit() else None


def tools() -> list[Path]:
    """Return the folders into which ``make`` may have put programs."""
    own = Path(__file__).resolve().parents[2] / ".tools"
    return [Path(".tools").resolve(), own, data_folder()]


def data_folder() -> Path:
    """Return the folder of this user's programs, whatever folder a command runs in (XDG)."""
    named = os.environ.get("XDG_DATA_HOME", "")
    return (Path(named) if named else Path.home() / ".local" / "share") / "dpstream"


def _tool(path: str, named: str | None = None) -> Path | None:
    """The file that is named, else the first of a folder of tools."""
    places = [Path(named)] if named else [folder / path for folder in tools()]
    return next((place for place in places if place.is_file()), None)
