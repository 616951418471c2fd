"""Environments of their own for peers of benchmarks and for Airflow, made where they are used.

Their pins need not agree with those of this project's tests, so each environment has a lock of
its own beside this file (`make locks`), is filled from it by hash, and is kept below ``.tools``
under the lock's digest: another lock is another environment.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
_MADE = ROOT / ".tools" / "environments"


def python_of(name: str) -> Path:
    """The Python of an environment, which is made first where it is missing.

    Args:
        name: of the lock, such as ``peers``.

    Raises:
        SystemExit: it could not be made; what uv says stands above the message.
    """
    lock = Path(__file__).with_name(f"{name}.lock")
    folder = _MADE / f"{name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    uv = str(Path(sys.executable).parent / "uv")
    print(f"makes the environment {folder} of {lock.name}", file=sys.stderr, flush=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    steps = (
        [uv, "venv", "--quiet", "--clear", "--python", version, str(folder)],
        [uv, "pip", "install", "--quiet", "--require-hashes", "--python", str(python),
         "-r", str(lock)],
    )  # fmt: skip
    for step in steps:
        try:
            subprocess.run(step, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(
                f"The environment of {lock.name} could not be made ({type(error).__name__} of uv: "
                f"see above). It needs the package index; run `make test` once for uv itself."
            ) from None
    ready.touch()
    return python


def inside(name: str) -> bool:
    """Whether this process runs in an environment."""
    return Path(sys.prefix) == python_of(name).parents[1]


def run_inside(name: str, module: str, arguments: list[str]) -> int:
    """Run a module of this repository in an environment; gives its exit code."""
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [str(python_of(name)), "-m", module, *arguments]
    return subprocess.run(words, cwd=ROOT, env=paths, check=False).returncode
