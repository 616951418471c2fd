"""Make Beam's Java servers listen where they say: ``InetSocketAddressServerFactory`` is given an
address and binds all interfaces at its port.

One line of its source is changed, compiled against the cluster's jars, and put in place of the
classes in Beam's jar, so that the job server and the workers' services of every task manager take
it, whatever order a class path has.  The source jar's digest is pinned and the line must be there
exactly once: there is never a jar that only looks mended.
"""

import hashlib
import subprocess
import tempfile
import zipfile
from pathlib import Path

VERSION = "2.62.0"
JAR = f"beam-sdks-java-core-{VERSION}.jar"
#: What the mended jar is called: a class path with the other one does not start.
MENDED = f"beam-sdks-java-core-{VERSION}-loopback.jar"
SOURCES = f"beam-sdks-java-core-{VERSION}-sources.jar"
SOURCES_SHA256 = "0fa1513b6f3b428e60696a7492830388926029f04c8b20a77229c70ba8010e12"
FOLDER = "org/apache/beam/sdk/fn/server"
OLD = "NettyServerBuilder.forPort(socket.getPort())"
NEW = "NettyServerBuilder.forAddress(socket)"


def mended(text: str) -> str:
    """The source that binds the address it was given.

    Raises:
        SystemExit: it does not say exactly once what is changed.
    """
    if text.count(OLD) != 1:
        raise SystemExit(f"ServerFactory.java says {OLD!r} {text.count(OLD)} times: not built")
    return text.replace(OLD, NEW)


def source(jar: Path) -> str:
    """Beam's source of the class.

    Raises:
        SystemExit: it is of another jar than the pinned one.
    """
    digest = hashlib.sha256(jar.read_bytes()).hexdigest()
    if digest != SOURCES_SHA256:
        raise SystemExit(f"{jar.name} has digest {digest}, not {SOURCES_SHA256}: not built")
    with zipfile.ZipFile(jar) as archive:
        return archive.read(f"{FOLDER}/ServerFactory.java").decode()


def fetch(folder: Path) -> Path:
    """Beam's sources, by Maven."""
    subprocess.run(
        [
            "mvn",
            "--quiet",
            "--batch-mode",
            "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy",
            f"-Dartifact=org.apache.beam:beam-sdks-java-core:{VERSION}:jar:sources",
            f"-DoutputDirectory={folder}",
        ],
        check=True,
        cwd=folder,
    )
    return folder / SOURCES


def mend(lib: Path) -> None:
    """Put the mended jar beside the others and take Beam's away; needs a JDK's ``javac``."""
    with tempfile.TemporaryDirectory(prefix="flink-") as name:
        place = Path(name)
        java = place / "ServerFactory.java"
        java.write_text(mended(source(fetch(place))))
        out = place / "classes"
        subprocess.run(
            [
                "javac",
                "-nowarn",
                "-proc:none",
                "--release",
                "11",
                "-cp",
                f"{lib}/*",
                "-d",
                str(out),
                str(java),
            ],
            check=True,
        )
        classes = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.class")}
        draft = lib / f".{MENDED}.draft"
        with (
            zipfile.ZipFile(lib / JAR) as old,
            zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as new,
        ):
            for item in old.infolist():
                if not item.is_dir() and not item.filename.startswith(f"{FOLDER}/ServerFactory"):
                    new.writestr(item, old.read(item))
            for path, data in sorted(classes.items()):
                new.writestr(path, data)
        draft.replace(lib / MENDED)
