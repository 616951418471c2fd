"""A small office: generated files that a test may spoil."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.faults import Fault
from dpstream.pipelines.tabulation.files import Loaded, load, validate
from dpstream.pipelines.tabulation.generate import Size, generate

SIZE = Size(persons=300)


class Office(NamedTuple):
    """The two folders of an office."""

    parameters: Path
    data: Path

    def path(self, name: str) -> Path:
        """A file of either folder."""
        inside = self.parameters / name
        return inside if inside.exists() else self.data / name

    def spoil(self, name: str, change: Callable[[list[str]], Any]) -> None:
        """Change the lines of a file."""
        lines = self.path(name).read_text().splitlines()
        changed = change(lines)
        self.path(name).write_text("\n".join(lines if changed is None else changed) + "\n")

    def configure(self, **fields: Any) -> None:
        """Set fields of the configuration; ``None`` takes one away."""
        path = self.parameters / "config.json"
        config = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    def faults(self, program: Any = "p") -> list[Fault]:
        """Everything that is wrong."""
        return validate(self.parameters, self.data, Choice(program))

    def load(self, program: Any = "p") -> Loaded:
        """What is public, if nothing is wrong."""
        return load(self.parameters, self.data, Choice(program))


def office(folder: Path, size: Size = SIZE) -> Office:
    """A new office in a folder."""
    made = Office(folder / "parameters", folder / "data")
    generate(made.parameters, made.data, size)
    return made
