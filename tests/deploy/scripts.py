"""The scripts of deploy/, which are no package."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load(path: str) -> ModuleType:
    """A script of deploy/ as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "deploy" / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
