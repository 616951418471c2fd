"""Images: their build contexts, builds by the real builder, and contents."""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

from dpstream.pipelines.runners import parts
from dpstream.pipelines.runners import prism_build as PRISM
from tests import guarded
from tests.deploy.stack import DEPLOY, images, load
from tests.deploy.test_stack import beam_version
from tests.emulator import free_port
from tests.runners import prism
from tests.runners.engines import ROOT, need, need_flink, without

DIGEST = "@sha256:" + "0f" * 32
#: An image as a registry names it: a word of a path, then a tag or a digest.
_LITERAL = re.compile(r"\b[a-z0-9.-]+(?:/[a-z0-9._-]+)*(?::[A-Za-z0-9._-]+)?@sha256:|:latest\b")


def references(path: Path) -> list[str]:
    """What a file names as images."""
    text = path.read_text()
    if path.suffix in (".yaml", ".yml"):
        names: list[str] = []

        def walk(node: object) -> None:
            if isinstance(node, dict):
                names.extend(str(v) for k, v in node.items() if k == "image" and isinstance(v, str))
                node = list(node.values())
            for child in node if isinstance(node, list) else ():
                walk(child)

        for document in yaml.safe_load_all(text):
            walk(document)
        return names
    froms = re.findall(r"^FROM (?:--\S+ )?(\S+)", text, flags=re.M)
    copies = re.findall(r"--(?:from|mount=\S*from)=([^\s,]+)", text)
    stages = set(re.findall(r"^FROM .* AS (\S+)", text, flags=re.M))
    return [name for name in [*froms, *copies] if name not in stages]


FILES = [
    path for path in [ROOT / "Dockerfile", *sorted(DEPLOY.rglob("*"))]
    if path.name == "Dockerfile" or path.suffix in (".yaml", ".yml")
]  # fmt: skip


def test_every_image_is_named_in_the_one_file() -> None:
    pins, used = images.read(), set()
    for path in FILES:
        for reference in references(path):
            match = re.fullmatch(r"\$\{([A-Z_]+_IMAGE)\}", reference)
            assert match and match[1] in pins, (path.name, reference)
            used.add(match[1])
    assert used | set(images.BUILDS) == set(pins), "an image that nothing uses"
    assert {"Dockerfile", "compose.yaml", "session-cluster.yaml"} <= {path.name for path in FILES}


def test_nothing_else_in_deploy_names_an_image() -> None:
    """No literal reference, no `latest`, not even in text that is copied from here."""
    for path in [ROOT / "Dockerfile", *DEPLOY.rglob("*")]:
        if path.is_file() and path.suffix not in (".lock", ".pyc", ".env"):
            match = _LITERAL.search(path.read_text())
            assert match is None or path.name == "images.py", (path.name, match)


@pytest.mark.parametrize(
    "line",
    ["FROM python:3.11", "FROM --platform=linux/amd64 python", "COPY --from=a/b:latest /x /x"],
)
def test_a_literal_image_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM ${{A_IMAGE}} AS a\nCOPY --from=a /y /y\n{line}\n")
    literals = [r for r in references(tmp_path / "Dockerfile") if not r.startswith("${")]
    assert len(literals) == 1


def test_tags_are_of_this_version_and_dockerfiles_declare_what_they_use() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    pins = images.read()
    for name in images.BUILDS:
        assert pins[name].partition("@")[0].endswith(f":{version}"), name
    for file, stage, _ in images.BUILDS.values():
        path = ROOT / file
        declared = [f"${{{name}}}" for name in images.arguments(path)]
        assert set(declared) == set(references(path)) and len(declared) == len(set(declared))
        assert not stage or f" AS {stage}\n" in path.read_text()


def written(folder: Path, *lines: str) -> Path:
    path = folder / "images.env"
    path.write_text("# a comment\n\n" + "\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    "line",
    ["A_IMAGE=a:1", "A_IMAGE=a # unpinned", "A_IMAGE=a:latest # unpinned", "A=a:1 # unpinned",
     f"A_IMAGE=a:1{DIGEST} # unpinned", "A_IMAGE=a:1@sha256:00", "A_IMAGE=h:5000/a # unpinned",
     f"A_IMAGE=a{DIGEST}", "A_IMAGE=a:1 b # unpinned"],
)  # fmt: skip
def test_lines_that_are_refused(line: str, tmp_path: Path) -> None:
    path = written(tmp_path, line)
    with pytest.raises(images.RefusedError):
        images.read(path)
    assert images.main(["--file", str(path), "check"]) == 3


def test_nothing_loose_is_checked_rendered_or_released(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each is refused before anything runs, and says which images have no digest."""
    path = written(tmp_path, f"A_IMAGE=a:1{DIGEST}", "B_IMAGE=r.example:5000/b/c:2 # unpinned")
    chart = tmp_path / "chart.yaml"
    chart.write_text("image: ${A_IMAGE}\n---\nimage: ${B_IMAGE}\n")
    for command in (["check"], ["render", str(chart)]):
        assert images.main(["--file", str(path), *command]) == 3
        captured = capfd.readouterr()
        assert "B_IMAGE" in captured.err and "A_IMAGE" not in captured.err and not captured.out
    assert images.main(["--file", str(path), "check", "A_IMAGE"]) == 0
    images.write({"B_IMAGE": f"r.example:5000/b/c:2{DIGEST}"}, path)
    assert path.read_text().startswith("# a comment\n\n") and "unpinned" not in path.read_text()
    assert images.main(["--file", str(path), "render", str(chart)]) == 0
    assert capfd.readouterr().out == (
        f"image: a:1{DIGEST}\n---\nimage: r.example:5000/b/c:2{DIGEST}\n"
    )


def test_a_release_stops_at_a_loose_base(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pinned = {
        name: reference.partition("@")[0] + ("" if name in images.BUILDS else DIGEST)
        for name, reference in images.read().items()
    }
    path = tmp_path / "images.env"
    shutil.copy(images.FILE, path)
    for base in ("PYTHON_IMAGE", "BEAM_SDK_IMAGE", "LAUNCHER_BASE_IMAGE", "FLINK_IMAGE"):
        images.write({**pinned, base: pinned[base].partition("@")[0]}, path)
        assert images.main(["--file", str(path), "release", "r.example/x", "--dry-run"]) == 3
        captured = capfd.readouterr()
        assert base in captured.err and not captured.out
    images.write(pinned, path)
    before = path.read_text()
    assert images.main(["--file", str(path), "release", "r.example/x", "--dry-run"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == len(images.BUILDS) and path.read_text() == before
    for line in lines:
        assert "--push" in line and "--sbom=true" in line and "--tag=r.example/x/dpstream" in line
        built = re.findall(r"--build-arg=(\w+)=(\S+)", line)
        assert built and all(reference == pinned[name] for name, reference in built)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A registry of this machine with one image; its reference and its digest."""
    crane = shutil.which("crane", path=f"{ROOT}/.tools/bin:{os.environ['PATH']}")
    need(crane, "crane is missing (make crane)")
    assert crane is not None
    folder = tmp_path_factory.mktemp("registry")
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "DOCKER_CONFIG": str(folder)}
    server = guarded.start(
        [crane, "registry", "serve", "--address", address], env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        with tarfile.open(folder / "layer.tar", "w") as archive:
            archive.add(__file__, "layer.py")
        push: list[str | Path] = [
            crane,
            "append",
            "--new_tag",
            f"{address}/a/image:1",
            "-f",
            folder / "layer.tar",
        ]
        end = time.monotonic() + 120
        while True:
            pushed = subprocess.run(push, env=environment, capture_output=True, text=True,
                                    check=False)  # fmt: skip
            if pushed.returncode == 0:
                break
            assert time.monotonic() < end and server.poll() is None, pushed.stderr
            time.sleep(0.1)
        yield f"{address}/a/image:1", pushed.stdout.strip().partition("@")[2]
    finally:
        guarded.kill(server)


def test_digests_are_the_registrys(
    registry: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A tag is pinned to what the registry has now; one that it has not fails the whole pin."""
    monkeypatch.setenv("PATH", f"{ROOT}/.tools/bin:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    reference, digest = registry
    path = written(tmp_path, f"A_IMAGE={reference} # unpinned")
    assert images.main(["--file", str(path), "pin", "--client", "crane"]) == 0
    assert path.read_text().splitlines()[-1] == f"A_IMAGE={reference}@{digest}"
    assert images.main(["--file", str(path), "check"]) == 0
    assert images.main(["--file", str(path), "pin", "B_IMAGE"]) == 3
    before = f"A_IMAGE={reference}{DIGEST}"
    path = written(tmp_path, before, f"B_IMAGE={reference}9 # unpinned")
    assert images.main(["--file", str(path), "pin", "--client", "crane"]) == 4
    assert "no digest for" in capfd.readouterr().err and before in path.read_text()
    assert images.main(["--file", str(path), "pin", "A_IMAGE", "--client", "crane"]) == 0
    assert f"A_IMAGE={reference}@{digest}\n" in path.read_text()


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


FLINK = load("flink/loopback.py")


def test_another_java_source_is_not_built(tmp_path: Path) -> None:
    assert FLINK.NEW in FLINK.mended(f"a {FLINK.OLD} b")
    for text in ("nothing", FLINK.OLD * 2):
        with pytest.raises(SystemExit, match="times"):
            FLINK.mended(text)
    jar = tmp_path / FLINK.SOURCES
    with zipfile.ZipFile(jar, "w") as archive:
        archive.writestr(f"{FLINK.FOLDER}/ServerFactory.java", FLINK.OLD)
    with pytest.raises(SystemExit, match="digest"):
        FLINK.source(jar)


def test_versions_agree() -> None:
    assert beam_version() == PRISM.VERSION
    pom = (ROOT / "deploy" / "flink" / "pom.xml").read_text()
    assert re.findall(r"beam-runners-flink[^<]*</artifactId>\s*<version>([\d.]+)", pom) == [
        FLINK.VERSION
    ]
    assert parts.beam_version() == PRISM.VERSION


def test_what_make_has_built() -> None:
    """What is tested here is what the recipes of today give."""
    program = Path(prism.binary())
    assert not parts.prism_is_open(program) and parts.prism_version(program) == PRISM.VERSION
    assert parts.prism_has_edits(program), "make prism"
    jar = need_flink()
    lib = jar.parent / "lib"
    assert (lib / FLINK.MENDED).exists() and not (lib / FLINK.JAR).exists(), "make flink"
    with zipfile.ZipFile(jar) as archive:
        manifest = archive.read("META-INF/MANIFEST.MF").decode().replace("\r\n ", "")
    assert f"lib/{FLINK.MENDED}" in manifest and f"lib/{FLINK.JAR}" not in manifest
    with zipfile.ZipFile(lib / FLINK.MENDED) as archive:
        names = archive.namelist()
        compiled = archive.read(
            f"{FLINK.FOLDER}/ServerFactory$InetSocketAddressServerFactory.class"
        )
    assert len(names) == len(set(names))
    assert b"forAddress" in compiled and b"forPort" not in compiled


def test_scripts_run_alone() -> None:
    """``make`` runs them before anything is installed: the standard library is enough."""
    scripts = ("pipelines/runners/prism_build.py", "deploy/flink/assemble.py",
               "deploy/flink/loopback.py")  # fmt: skip
    for path in scripts:
        text = (ROOT / path).read_text()
        for name in re.findall(r"^(?:import|from) (\w+)", text, flags=re.M):
            assert name in sys.stdlib_module_names or name == "loopback", name
