"""What a quick command may import: everything else is loaded by the command that needs it."""

import json
import subprocess
import sys

import pytest

#: Beside the standard library and the project's own modules.
ALLOWED = {"click", "typing_extensions", "dpstream"}

LOADED = """
import json, sys
before = set(sys.modules)
from dpstream.pipelines.cli.main import cli
try:
    cli({arguments}, standalone_mode=False)
except SystemExit:
    pass
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print()
print(json.dumps(sorted(loaded - sys.stdlib_module_names)))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["state", "--help"]])
def test_help_loads_no_library_that_works_on_data(arguments: list[str]) -> None:
    code = LOADED.format(arguments=arguments)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name for name in json.loads(out.stdout.splitlines()[-1]) if not name.startswith("_")}
    assert loaded <= ALLOWED
    assert {"click", "dpstream"} <= loaded
