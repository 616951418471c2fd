"""What an image build sees of this folder: what the Dockerfile copies, and nothing private.

The rules of `.dockerignore` are applied here, and, where there is a docker client, by the client
itself, which sends what it would build from to a listener of the test.
"""

import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.runners.engines import without

ROOT = Path(__file__).parents[2]
RULES = (ROOT / ".dockerignore").read_text()
#: Files that lie about where jobs are tried, at the top and inside the packages.
NOISE = (
    "noise.secret", "other.secret", "job.state.db", "job.state.db-wal", "ledger.db",
    "demo/out.parquet",
    "runs/bench.jsonl", ".git/config", ".tools/kafka/kafka.jar", ".venv/bin/python", "orders.csv",
    "build/lib/state/open.py", "dead_letter/out/part.parquet", "deploy/beam_yaml/noise.secret",
    "accounting/noise.secret", "state/ledger.db", "pipelines/examples/noise.secret",
    "pipelines/examples/releases/run.json", "pipelines/examples/flights.state.db",
    "dp_transforms/noise/key.txt", "state/__pycache__/open.cpython-311.pyc", "deploy/noise.secret",
    ".dockerignore", "Dockerfile", "tests/test_x.py", "deploy/compose/noise.secret", ".env",
)  # fmt: skip


def git_files() -> set[str]:
    completed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    return {name for name in completed.stdout.decode().split("\0") if (ROOT / name).is_file()}


def expression(pattern: str) -> re.Pattern[str]:
    """A rule as Docker reads it: `**` is any number of folders, `*` stays within one name."""
    assert re.fullmatch(r"[A-Za-z0-9_./*-]+", pattern), "a rule that this reading does not know"
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    text = re.sub(r"\*\*/|\*\*|\*|[^*]+", lambda m: parts.get(m[0], re.escape(m[0])), pattern)
    return re.compile(text)


def sent_files(names: set[str], rules: str) -> set[str]:
    """Files that a build gets: the last rule that names a file, or a folder of it, counts."""
    lines = [line for line in rules.splitlines() if line and not line.startswith("#")]
    compiled = [(line.startswith("!"), expression(line.removeprefix("!"))) for line in lines]

    def stays(name: str) -> bool:
        folders = [name, *(str(folder) for folder in Path(name).parents if str(folder) != ".")]
        stay = True
        for keep, rule in compiled:
            if any(rule.fullmatch(folder) for folder in folders):
                stay = keep
        return stay

    return {name for name in names if stays(name)}


def copied() -> set[str]:
    """Sources of the Dockerfile's COPY lines."""
    text = (ROOT / "Dockerfile").read_text()
    lines = re.findall(r"^COPY (?!--from)(.+)$", text, flags=re.M)
    return {source for line in lines for source in line.split()[:-1]}


def test_the_build_sees_what_it_copies_and_nothing_else() -> None:
    files = git_files()
    seen = sent_files(files | set(NOISE), RULES)
    wanted = {name for name in files for source in copied()
              if name == source or name.startswith(source + "/")}  # fmt: skip
    assert seen == wanted and not seen & set(NOISE)
    assert {"pyproject.toml", "deploy/runtime.lock", "pipelines/templates/report.html.j2"} <= seen
    assert not any(source in (".", "./") for source in copied())
    # Docker's older builder does not look into a folder for these.
    assert not re.search(r"^!.*\*\*", RULES, flags=re.M)


@pytest.mark.parametrize(
    "rules",
    ["", "noise.secret\n*.db\n.git\n", RULES.replace("**\n", "", 1), RULES + "!**/*.secret\n",
     RULES.replace("!pipelines/examples/*.toml", "!pipelines/examples")],
    ids=["none", "a deny list", "no denial", "keys let in", "a whole folder"],
)  # fmt: skip
def test_other_rules_let_noise_in(rules: str) -> None:
    assert sent_files(git_files() | set(NOISE), rules) & set(NOISE)


@contextmanager
def listener() -> Iterator[tuple[str, list[bytes]]]:
    """A place that a docker client sends its build context to; nothing is built."""
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("API-Version", "1.50")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self._answer(200, b"OK")

        def do_GET(self) -> None:
            self._answer(200, b"{}")

        def do_POST(self) -> None:
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            got.append(b"".join(chunks))
            self._answer(200, b'{"stream":"seen"}\n')

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"tcp://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        server.server_close()


def test_the_docker_client_sends_the_same(tmp_path: Path) -> None:
    """Machines of CI need no docker: every rule is of the few forms that ``expression`` reads, and
    is applied above on all of them.  This shows on machines that have it that docker agrees."""
    docker = shutil.which("docker")
    if docker is None:
        without("the docker client is missing: its reading of .dockerignore is not compared")
    files = git_files()
    here = tmp_path / "here"
    for name in files | set(NOISE):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        if name in files:
            shutil.copyfile(ROOT / name, here / name)
        else:
            (here / name).write_text("not for a build")
    with listener() as (host, got):
        completed = subprocess.run(
            [docker, "build", "."], cwd=here, capture_output=True, text=True, timeout=60,
            check=False,
            env={"PATH": os.environ["PATH"], "DOCKER_HOST": host, "DOCKER_BUILDKIT": "0",
                 "HOME": str(tmp_path), "DOCKER_CONFIG": str(tmp_path)},
        )  # fmt: skip
    assert completed.returncode == 0 and got, completed.stderr
    with tarfile.open(fileobj=io.BytesIO(got[0])) as archive:
        sent = {member.name for member in archive if member.isfile()}
    # The client adds the two files that the builder itself reads.
    assert sent - {"Dockerfile", ".dockerignore"} == sent_files(files, RULES)
