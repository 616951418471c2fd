"""What the benchmarks share: the machine they ran on, and JSON results."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """What the figures were measured on, without names."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "load_1m": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def emit(result: dict[str, Any], out: Path | None) -> None:
    """Print the result as JSON and append it to a file, if one is named."""
    text = json.dumps(result)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "a", encoding="utf-8") as file:
            file.write(text + "\n")
