"""The images: every name of one comes from one file, and nothing loose is released.

Digests are asked of a real registry (`crane registry serve`, from `make crane`) on this machine.
"""

import os
import re
import shutil
import subprocess
import tarfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests import guarded
from tests.deploy.stack import DEPLOY, images
from tests.emulator import free_port
from tests.runners.engines import ROOT, need

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
