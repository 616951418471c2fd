"""Build a Prism that listens on this machine only: ``dpstream doctor --fix``, or, before anything
is installed, ``python pipelines/runners/prism_build.py OUT``.

Prism 2.77 binds all interfaces, asks for no password and has no flag for either.  Whoever reaches
its port can submit code and read exact counts.  It also spends a core on waiting for a bundle whose
outputs are complete.  So it is built from Beam's own Go module with the edits below.  The module's
digest is pinned, and the build fails if an edit does not fit its file exactly once, so that no
program lacks an edit.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MODULE = "github.com/apache/beam/sdks/v2"
VERSION = "2.77.0"
#: The module's digest, as of Go's checksum database.
SUM = "h1:RsC61pHEvtySEHAURQyP/+CVOJm/hy5hewuG9JF0+Ow="
_PRISM = "go/pkg/beam/runners/prism/internal"
#: (file, what it says, what it is to say).  Job management, artifacts and the workers' services
#: share one listener; its clients are told its number, and the web page has one of its own.
EDITS = (
    (
        f"{_PRISM}/jobservices/server.go",
        'net.Listen("tcp", fmt.Sprintf(":%d", port))',
        'net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))',
    ),
    (
        f"{_PRISM}/jobservices/server.go",
        'fmt.Sprintf("localhost:%v", port)',
        'fmt.Sprintf("127.0.0.1:%v", port)',
    ),
    (
        f"{_PRISM}/worker/worker.go",
        'endpoint: "localhost:" + p,',
        'endpoint: "127.0.0.1:" + p,',
    ),
    (
        f"{_PRISM}/web/web.go",
        'fmt.Sprintf("localhost:%d", port)',
        'fmt.Sprintf("127.0.0.1:%d", port)',
    ),
    # A closed channel is always ready: until the bundle's response comes, the loop would take this
    # case again and again.
    (
        f"{_PRISM}/stage.go",
        "case <-dataReady:\n\t\t\tdataFinished = true",
        "case <-dataReady:\n\t\t\tdataReady = nil\n\t\t\tdataFinished = true",
    ),
)
#: Written into the program, where ``pipelines.runners.parts`` finds them: what it was built from,
#: and a digest of the edits.
TAGS = f"loopback,beam{VERSION},edits{hashlib.sha256(repr(EDITS).encode()).hexdigest()[:12]}"


def download() -> Path:
    """Return the module's folder in Go's cache, once its digest is the pinned one."""
    command = ["go", "mod", "download", "-json", f"{MODULE}@v{VERSION}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return checked(json.loads(done.stdout))


def checked(module_info: dict[str, str]) -> Path:
    """Return the folder of a module whose digest is right, as Go reports it.

    Raises:
        SystemExit: it has another digest.
    """
    if module_info["Sum"] != SUM:
        raise SystemExit(
            f"{MODULE} {VERSION} has digest {module_info['Sum']}, not {SUM}: not built"
        )
    return Path(module_info["Dir"])


def edited(folder: Path) -> None:
    """Make the edits in a copy of the module.

    Raises:
        SystemExit: a file does not say exactly once what an edit replaces.
    """
    for name, old, new in EDITS:
        path = folder / name
        text = path.read_text()
        if text.count(old) != 1:
            raise SystemExit(f"{name} says {old!r} {text.count(old)} times, not once: not built")
        path.write_text(text.replace(old, new))


def build(out: Path) -> None:
    """Copy, edit and compile; OUT is replaced once all has worked."""
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="prism-") as name:
        source = Path(name) / "beam"
        # Files of Go's cache are read-only: contents are copied, not modes.
        shutil.copytree(
            download(),
            source,
            copy_function=shutil.copyfile,
            ignore=shutil.ignore_patterns("java", "python", "typescript", "testdata"),
        )
        for folder in (source, *source.rglob("*/")):
            folder.chmod(0o755)
        edited(source)
        draft = out.with_name(f".{out.name}.draft")
        subprocess.run(
            ["go", "build", "-buildvcs=false", f"-tags={TAGS}", "-o", str(draft), "./go/cmd/prism"],
            cwd=source,
            check=True,
        )
        draft.replace(out)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
