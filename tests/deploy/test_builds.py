"""Flink's job server is built to listen on this machine only, or not at all; versions agree."""

import re
import sys
import zipfile
from pathlib import Path

import pytest

from dpstream.pipelines.runners import parts
from dpstream.pipelines.runners import prism_build as PRISM
from tests.deploy.scripts import load
from tests.deploy.test_containers import beam_version
from tests.runners import prism
from tests.runners.engines import ROOT, need_flink

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
