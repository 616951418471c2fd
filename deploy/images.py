"""The images of `images.env`: pin them by digest, build with them, release.

    python deploy/images.py check [NAME ...]           fails while one has no digest
    python deploy/images.py pin [NAME ...]             ask the registries, write the digests
    python deploy/images.py build-args [DOCKERFILE]    flags of `docker build`
    python deploy/images.py render FILE                a Kubernetes file with the images filled in
    python deploy/images.py release REGISTRY           check, build, push, and pin what was built

Registries are asked by the client that is there: `docker buildx imagetools`, `crane` or `skopeo`.
Exit code 3: refused because an image is not pinned; 4: a client or a build failed.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "deploy" / "images.env"
_LINE = re.compile(
    r"([A-Z][A-Z0-9_]*_IMAGE)=([^\s@]+)(@sha256:[0-9a-f]{64}|(?= # unpinned))( # unpinned)?"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"\$\{([A-Z][A-Z0-9_]*_IMAGE)\}")
#: What a release builds: the image, the Dockerfile, its stage, the folder that it is built from.
BUILDS = {
    "DPSTREAM_IMAGE": ("Dockerfile", "worker", "."),
    "DPSTREAM_DATAFLOW_IMAGE": ("Dockerfile", "dataflow", "."),
    "DPSTREAM_LAUNCHER_IMAGE": ("Dockerfile", "launcher", "."),
    "DPSTREAM_FLINK_IMAGE": ("deploy/flink/Dockerfile", "", ".tools/flink"),
}
#: How each client tells the digest of a tag (of its list of platforms, where it has one).
CLIENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "docker": (
        ("docker", "buildx", "version"),
        ("docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", "{}"),
    ),
    "crane": (("crane", "version"), ("crane", "digest", "{}")),
    "skopeo": (
        ("skopeo", "--version"),
        ("skopeo", "inspect", "--format", "{{.Digest}}", "docker://{}"),
    ),
}


class RefusedError(Exception):
    """Something is missing that a release needs."""


class FailedError(Exception):
    """A program that was asked did not do its work."""


def read(file: Path = FILE) -> dict[str, str]:
    """Name -> reference, with its digest where it has one.

    Raises:
        RefusedError: a line is neither pinned nor marked, or has no tag of its own.
    """
    tags: dict[str, str] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        tag = match[2].rpartition("/")[2].partition(":")[2] if match else ""
        if not match or tag in ("", "latest") or bool(match[3]) == bool(match[4]):
            raise RefusedError(
                f"line {number} is not NAME_IMAGE=IMAGE:TAG with a digest or '# unpinned'"
            )
        if match[1] in tags:
            raise RefusedError(f"line {number} names an image twice")
        tags[match[1]] = match[2] + match[3]
    return tags


def write(images: dict[str, str], file: Path = FILE) -> None:
    """Put the references into the file; its other lines stay."""
    lines = []
    for line in file.read_text().splitlines():
        name = line.partition("=")[0]
        reference = images.get(name, "")
        mark = "" if "@" in reference else " # unpinned"
        lines.append(f"{name}={reference}{mark}" if reference else line)
    file.write_text("\n".join(lines) + "\n")


def named(images: dict[str, str], names: Iterable[str]) -> list[str]:
    """The names, or all.

    Raises:
        RefusedError: one of them is not in the file.
    """
    wanted = list(names) or list(images)
    unknown = [name for name in wanted if name not in images]
    if unknown:
        raise RefusedError(f"not in {FILE.name}: {', '.join(unknown)}")
    return wanted


def check(images: dict[str, str], names: Iterable[str] = ()) -> None:
    """All named images (or all) have a digest.

    Raises:
        RefusedError: names those that have none.
    """
    loose = [name for name in named(images, names) if "@" not in images[name]]
    if loose:
        raise RefusedError(
            f"no digest yet: {', '.join(loose)}; run `python deploy/images.py pin` where the "
            "registries can be reached, and commit the file"
        )


def client() -> str:
    """The first client that answers.

    Raises:
        FailedError: there is none.
    """
    for name, (asks, _) in CLIENTS.items():
        there = shutil.which(asks[0]) is not None
        if there and not subprocess.run(asks, capture_output=True, check=False).returncode:
            return name
    raise FailedError(f"none of {', '.join(CLIENTS)} is installed")


def digest(reference: str, by: str) -> str:
    """What a tag stands for now.

    Raises:
        FailedError: the registry could not be asked, or its answer is no digest.
    """
    command = [
        part.format(reference) if part == "{}" or part.endswith("//{}") else part
        for part in CLIENTS[by][1]
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = process.stdout.strip()
    if process.returncode or not _DIGEST.fullmatch(answer):
        raise FailedError(f"{by} gave no digest for {reference}: {process.stderr.strip()[-300:]}")
    return answer


def pin(images: dict[str, str], names: Iterable[str], by: str | None) -> dict[str, str]:
    """The images with the digests of now; those built here only where they are named."""
    wanted = list(names) or [name for name in images if name not in BUILDS]
    tags = {name: images[name].partition("@")[0] for name in named(images, wanted)}
    tool = by or client()
    return {name: f"{tag}@{digest(tag, tool)}" for name, tag in tags.items()}


def arguments(dockerfile: Path) -> list[str]:
    """Names of the images that a Dockerfile is built from."""
    return re.findall(r"^ARG ([A-Z0-9_]+_IMAGE)$", dockerfile.read_text(), flags=re.M)


def build_args(images: dict[str, str], dockerfile: Path) -> list[str]:
    """Flags of ``docker build`` for a Dockerfile."""
    return [f"--build-arg={name}={images[name]}" for name in arguments(dockerfile)]


def render(images: dict[str, str], text: str) -> str:
    """A file with every ``${NAME_IMAGE}`` filled in; all of them must be pinned."""
    check(images, dict.fromkeys(_NAME.findall(text)))
    return _NAME.sub(lambda match: images[match[1]], text)


def release(images: dict[str, str], registry: str, dry_run: bool) -> dict[str, str]:
    """Build and push all images under a registry's name, with a bill of materials and provenance.

    Returns:
        Their references, pinned where something was pushed.

    Raises:
        RefusedError: an image to build from is not pinned; nothing was built then.
        FailedError: a build did not succeed.
    """
    bases = {base for file, *_ in BUILDS.values() for base in arguments(ROOT / file)}
    check(images, sorted(bases))
    pushed = {}
    for name, (file, stage, context) in BUILDS.items():
        plain = images[name].partition("@")[0].rpartition("/")[2]
        pushed[name] = f"{registry.rstrip('/')}/{plain}"
        command = [
            "docker",
            "buildx",
            "build",
            "--sbom=true",
            "--provenance=mode=max",
            "--push",
            f"--file={file}",
            *([f"--target={stage}"] if stage else []),
            f"--tag={pushed[name]}",
            *build_args(images, ROOT / file),
            context,
        ]
        print(shlex.join(command), flush=True)
        if not dry_run and subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise FailedError(f"{name} was not built")
    return pushed if dry_run else pin(pushed, pushed, "docker")


def main(given: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, default=FILE)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check").add_argument("names", nargs="*")
    pins = commands.add_parser("pin")
    pins.add_argument("names", nargs="*")
    pins.add_argument("--client", choices=sorted(CLIENTS))
    builds = commands.add_parser("build-args")
    builds.add_argument("dockerfile", nargs="?", type=Path, default=ROOT / "Dockerfile")
    commands.add_parser("render").add_argument("target", type=Path)
    releases = commands.add_parser("release")
    releases.add_argument("registry")
    releases.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(given)
    try:
        images = read(options.file)
        if options.command == "check":
            check(images, options.names)
        elif options.command == "pin":
            write(pin(images, options.names, options.client), options.file)
        elif options.command == "build-args":
            print(shlex.join(build_args(images, options.dockerfile)))
        elif options.command == "render":
            print(render(images, options.target.read_text()), end="")
        else:
            made = release(images, options.registry, options.dry_run)
            if not options.dry_run:
                write(made, options.file)
    except RefusedError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 3
    except FailedError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
