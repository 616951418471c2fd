"""Make a Flink job server out of Maven's jars: ``python deploy/flink/assemble.py FOLDER``.

``mvn`` fetches the jars of ``pom.xml`` into FOLDER/lib; one of them is mended, so that nothing
listens beyond the address it is given (``loopback.py``).  FOLDER/job-server.jar is a jar of one
manifest that names them all, starts Beam's job server, and opens to Flink's serialisers what
Java 17 closes.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import loopback

MAIN = "org.apache.beam.runners.flink.FlinkJobServerDriver"
#: Packages of java.base that Flink reaches into by reflection.
OPENS = (
    "java.io",
    "java.lang",
    "java.lang.invoke",
    "java.lang.reflect",
    "java.net",
    "java.nio",
    "java.text",
    "java.time",
    "java.util",
    "java.util.concurrent",
    "java.util.concurrent.atomic",
    "java.util.concurrent.locks",
    "sun.net.util",
    "sun.nio.ch",
)


def assemble(folder: Path) -> Path:
    """Fetch what is missing and write the jar; returns its path."""
    lib = folder / "lib"
    subprocess.run(
        [
            "mvn",
            "--quiet",
            "--batch-mode",
            "--file",
            str(Path(__file__).with_name("pom.xml")),
            "dependency:copy-dependencies",
            "-DincludeScope=runtime",
            f"-DoutputDirectory={lib.resolve()}",
        ],
        check=True,
    )
    loopback.mend(lib)
    jars = sorted(path.name for path in lib.glob("*.jar") if path.name != loopback.JAR)
    jar, draft = folder / "job-server.jar", folder / ".job-server.draft"
    with zipfile.ZipFile(draft, "w") as archive:
        archive.writestr("META-INF/MANIFEST.MF", manifest(jars))
    # Before this jar says that all is done: a class path of the folder must not find both.
    (lib / loopback.JAR).unlink()
    draft.replace(jar)
    return jar


def manifest(jars: list[str]) -> str:
    """The manifest: lines of at most 72 bytes, longer values go on after a blank."""
    values = {
        "Manifest-Version": "1.0",
        "Main-Class": MAIN,
        "Add-Opens": " ".join(f"java.base/{package}" for package in OPENS),
        "Class-Path": " ".join(f"lib/{name}" for name in jars),
    }
    lines = []
    for name, value in values.items():
        line = f"{name}: {value}"
        lines.append(line[:70])
        lines += [f" {line[i : i + 69]}" for i in range(70, len(line), 69)]
    return "\r\n".join(lines) + "\r\n"


if __name__ == "__main__":
    print(assemble(Path(sys.argv[1])))
