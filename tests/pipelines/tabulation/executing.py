"""Executions of a small office, with a ledger."""

from pathlib import Path
from typing import Any

from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.execute import Execution, Order, execute
from dpstream.pipelines.tabulation.inputs import inputs_of
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.open import AccountPlace
from tests import accounts
from tests.pipelines.tabulation.office import Office

KEY = "3f7a91c4d2e85b60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8"


def ledger_of(folder: Path, epsilon: float = 1e3, unit: str = "person") -> AccountPlace:
    return accounts.create(folder / "ledger.db", "people", (epsilon, 1e-9), unit)


def order(made: Office, out: Path, choice: Choice | None = None, **more: Any) -> Order:
    inputs = inputs_of(made.parameters, made.data, choice or Choice("p"))
    return Order(inputs, out, SecretSource(None, KEY), **more)


def executed(
    made: Office, out: Path, choice: Choice | None = None, fresh: bool = False, as_of: str = "",
    **more: Any,
) -> Execution:  # fmt: skip
    more["how"] = Asking(fresh, as_of)
    return execute(order(made, out, choice, **more))


def charges(folder: Path) -> list[Charge]:
    path = folder / "ledger.db"
    return accounts.charges(path)


def content(out: Path) -> dict[str, bytes]:
    """Every file of an output, and the manifest's."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def left_over(folder: Path) -> list[str]:
    """Hidden things that nobody took away."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]
