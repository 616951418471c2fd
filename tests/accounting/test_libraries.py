"""When the libraries are loaded: at the first call; and strategies use one thread.

Importing the package, or a benchmark, writes nothing to stderr; warnings of others go there.

Every optional import belongs to an extra, whose command fits the way of the installation.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.special
from packaging.requirements import Requirement

from dpstream.accounting import extras
from dpstream.accounting.errors import UsageError
from dpstream.accounting.libraries import Kernel, blas_libraries, njit, one_thread, special

ROOT = Path(__file__).parents[2]
FOLDERS = ("accounting", "state", "dp_transforms", "pipelines", "dpstream")


@njit(inline="always")
def twice(value: int) -> int:
    return 2 * value


@njit(nogil=True)
def plus_one(value: int) -> int:
    return value + 1


@njit(nogil=True)
def total(values: np.ndarray) -> int:  # type: ignore[type-arg]
    """Sum of 2 v + 1."""
    running_total = 0
    for value in values:
        running_total += plus_one(twice(value))
    return running_total


def test_kernels_call_each_other_compiled() -> None:
    values = np.arange(10)
    assert total(values) == 100 == sum(2 * v + 1 for v in range(10))
    assert isinstance(total, Kernel) and total.dispatcher.signatures
    assert vars(total)["__name__"] == "total" and total.py_func.__doc__ == total.__doc__


def test_numba_is_loaded_by_the_first_call() -> None:
    """And by nothing before it, in every module with kernels but the one that calls SciPy's."""
    code = """
import sys
from pathlib import Path
import dpstream.dp_transforms.flow, dpstream.accounting.strategies.kernels
import dpstream.dp_transforms.tuning, dpstream.pipelines.stream.run
import numpy as np
from dpstream.state.idtable import IdTable
assert not {"numba", "llvmlite", "scipy"} & set(sys.modules)
IdTable().intern(np.ones((1, 2), np.uint64))
assert "numba" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_second_process_takes_machine_code_from_the_cache(tmp_path: Path) -> None:
    """The first process of a new installation compiles and stores, the next compiles nothing."""
    code = """
import gc, sys
import numpy as np
from dpstream.accounting.libraries import Kernel
from dpstream.state.idtable import IdTable
table = IdTable()
table.intern(np.arange(8, dtype=np.uint64).reshape(4, 2))
called = [k for k in gc.get_objects() if isinstance(k, Kernel) and "dispatcher" in vars(k)]
stats = [kernel.dispatcher.stats for kernel in called if kernel.targetoptions.get("cache")]
print(*(sum(len(part) for part in parts) for parts in (
    [each.cache_hits for each in stats], [each.cache_misses for each in stats])))
print(*{"numba.np.arraymath", "numba.cpython.unicode"} & {*sys.modules})  # of the compiler
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    first, second = (
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        for _ in range(2)
    )
    first_hits, first_misses, *first_compiler = first.stdout.split()
    second_hits, second_misses, *second_compiler = second.stdout.split()
    assert first_hits == second_misses == "0"
    assert first_misses == second_hits != "0"
    assert first_compiler and not second_compiler


SERVER = "apache_beam.runners.portability.flink_uber_jar_job_server"
#: A module, what is imported with it, a use of it, and what tells that it has run.
LATE = {
    "all names": ("httplib2", "sys", "from httplib2 import *; Http", "httplib2.auth"),
    "attribute": ("httplib2", "sys", "httplib2.Http()", "httplib2.auth"),
    "listed": ("httplib2", "sys", "assert 'Http' in dir(httplib2)", "httplib2.auth"),
    "part before it": (
        *("httplib2", "httplib2.error as error"),
        *("assert httplib2.HttpLib2Error is error.HttpLib2Error", "httplib2.auth"),
    ),
    "no package": (SERVER, f"{SERVER} as server", "server.FlinkUberJarJobServer", "requests.api"),
    "compiled part": (
        *("scipy.special", "scipy.special._ufuncs as compiled"),
        *("from scipy.special import ndtr; assert ndtr is compiled.ndtr", "scipy.special._basic"),
    ),
    "other packages": (
        *("scipy.special", "scipy.special._ufuncs"),
        *("import scipy.stats, scipy.special.cython_special", "scipy.special._basic"),
    ),
    "threads": (
        *("scipy.special", "importlib, concurrent.futures"),
        "names = ['scipy.special', 'scipy.special._ufuncs', 'scipy.stats', 'scipy.optimize'] * 8;"
        "get = lambda name: (importlib.import_module(name), scipy.special.expit);"
        "list(concurrent.futures.ThreadPoolExecutor(8).map(get, names))",
        "scipy.special._basic",
    ),
}


@pytest.mark.parametrize(("module", "more", "used", "part"), LATE.values(), ids=LATE)
def test_modules_that_run_late_run_when_used(module: str, more: str, used: str, part: str) -> None:
    """And a pickle names them, as it names other modules."""
    code = f"""
import pickle, sys
from dpstream.accounting.libraries import HIDDEN
HIDDEN.add("apache_beam.io.gcp.bigquery")  # as commands do; it loads `requests`
from apache_beam.internal.cloudpickle import cloudpickle
import {module}, {more}
module = sys.modules[{module!r}]
assert {part!r} not in sys.modules and type(module).__name__ == "_Deferred"
assert pickle.loads(cloudpickle.dumps(lambda: module))() is module
assert {part!r} not in sys.modules
{used}
assert {part!r} in sys.modules and type(module) is type(sys) and module is sys.modules[{module!r}]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_late_module_that_fails_says_so_at_each_use(tmp_path: Path) -> None:
    (tmp_path / "httplib2.py").write_text("import there_is_none")
    code = """
import dpstream, httplib2
for _ in range(2):
    try:
        httplib2.Http
    except ModuleNotFoundError as error:
        print(error.name)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["there_is_none"] * 2


def test_special_functions_are_those_of_the_package() -> None:
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    names = {name for path in paths for name in re.findall(r"special\.(\w+)\(", path.read_text())}
    assert {"ndtr", "log_ndtr", "gammaln"} <= names
    assert all(getattr(special, name) is getattr(scipy.special, name) for name in names)


MODULES = (
    "gaussian", "budget.thresholds", "tuning.question", "query.calibration", "sessions.calibration"
)  # fmt: skip


def test_importing_the_accounting_of_a_session_loads_no_scipy() -> None:
    names = ", ".join(f"dpstream.accounting.{name}" for name in MODULES)
    code = f"import sys, {names}; assert 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_thread_and_then_as_before() -> None:
    reads = [get for get, _ in blas_libraries()]
    # Wheels of numpy and scipy bring an OpenBLAS each; another library is left alone.
    assert len(reads) == 2
    before = [get() for get in reads]
    with one_thread():
        assert [get() for get in reads] == [1, 1]
    assert [get() for get in reads] == before


BEAM_WARNINGS_MODULES = """
import importlib, pkgutil, {package}
for module in pkgutil.walk_packages({package}.__path__, "{package}."):
    if not module.name.endswith("__main__") and "test_" not in module.name:
        importlib.import_module(module.name)
"""
NAMES = "import dpstream\nfor name in dpstream.__all__: getattr(dpstream, name)"


def stderr_of(*words: str) -> str:
    command = [sys.executable, *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("-c", NAMES),
        ("-c", "import dpstream.pipelines.demo"),
        ("-c", BEAM_WARNINGS_MODULES.format(package="dpstream")),
        ("-c", BEAM_WARNINGS_MODULES.format(package="tests.bench")),
        ("-m", "tests.bench.stream", "--help"),
        ("-m", "dpstream", "demo", "--help"),
    ],
    ids=["names", "demo", "modules", "benchmarks", "benchmark", "command"],
)
def test_stderr_is_empty(words: tuple[str, ...]) -> None:
    assert stderr_of(*words) == ""


def test_other_warnings_are_shown() -> None:
    """Of the program's own loggers, also in Beam's words, and of Beam's later ones."""
    text = (
        "import logging, warnings, dpstream.pipelines.demo\n"
        "logging.warning('apitools not found, mine')\n"
        "logging.getLogger('apache_beam.io.filesystems').warning('other')\n"
        "warnings.warn('own')\n"
    )
    shown_lines = stderr_of("-c", text)
    for words in ("apitools not found, mine", "other", "UserWarning: own"):
        assert words in shown_lines


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEVELOPMENT = {"peers", "test", "docs", "dev"}
#: Package -> the name that is imported, where it is another one.
IMPORTED = {
    "apache-beam": "apache_beam", "python-flint": "flint", "prometheus-client": "prometheus_client",
    "typing-extensions": "typing_extensions", "pyyaml": "yaml",
}  # fmt: skip
#: What apache-beam, pinned exactly, brings and the program speaks to its runners with.
BEAMS = {"grpc", "google.protobuf"}
#: What each client of Google's brings with it; it is loaded behind that client only.
GOOGLES = {"google.api_core", "google.auth", "google.cloud.spanner"}


def imports(source: str) -> Iterator[str]:
    """Every module that a source file imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = (alias.name for alias in node.names)
            spread = node.module in ("google", "google.cloud")
            yield from (f"{node.module}.{name}" for name in names) if spread else [node.module]


def undeclared(source: str) -> set[str]:
    """Imports of a source file that neither a dependency nor an extra brings."""
    plain = {IMPORTED.get(r.name, r.name) for r in map(Requirement, PROJECT["dependencies"])}
    optional = {module for extra in extras.EXTRAS.values() for module in extra.modules}
    brought = {*plain, *optional, *BEAMS, *GOOGLES, "dpstream"}
    return {
        name
        for name in imports(source)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not any(name == top or name.startswith(f"{top}.") for top in brought)
    }


def test_every_import_is_declared() -> None:
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        assert undeclared(path.read_text()) == set(), path


@pytest.mark.parametrize("line", ["import dp_accounting", "def f():\n    from requests import get",
                                  "from google.cloud import storage"])  # fmt: skip
def test_an_undeclared_import_is_seen(line: str) -> None:
    assert undeclared(line)


def test_the_table_lists_the_extras_of_the_package() -> None:
    assert set(extras.EXTRAS) == set(PROJECT["optional-dependencies"]) - DEVELOPMENT
    page = (ROOT / "docs/start/install.md").read_text()
    for name, extra in extras.EXTRAS.items():
        assert f"| `dpstream[{name}]` | {extra.purpose} |\n" in page


@pytest.mark.parametrize("name", extras.EXTRAS)
def test_a_missing_module_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in extras.EXTRAS[name].modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError) as caught:  # its fix names this installation
        extras.require(name, "a.field")
    error = caught.value
    assert error.field == "a.field" and f"`{name}`" in error.rule
    assert extras.installing(name) in error.fix
    module = extras.EXTRAS[name].modules[0]
    absent = ModuleNotFoundError(f"No module named {module!r}", name=module)
    translated = extras.missing_extra(absent, "a.field")
    assert translated is not None and translated.as_dict() == error.as_dict()


def test_another_missing_module_names_none() -> None:
    assert extras.missing_extra(ModuleNotFoundError("x", name="numpy"), "a.field") is None
    assert extras.missing_extra(ImportError("x"), "a.field") is None


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "dpstream[kafka]"),
        ({"url": "file:///a%20b/c", "dir_info": {"editable": True}}, "-e|/a b/c[kafka]"),
        ({"url": "file:///clone", "dir_info": {}}, "/clone[kafka]"),
        (
            {"url": "file:///d/dpstream-0.1.0-py3-none-any.whl", "archive_info": {}},
            "dpstream[kafka] @ file:///d/dpstream-0.1.0-py3-none-any.whl",
        ),
    ],
)
def test_each_origin_has_its_command(origin: dict[str, object] | None, expected: str) -> None:
    command = extras._command(None if origin is None else json.dumps(origin), "kafka")
    words = shlex.split(command)
    assert words[:2] == ["pip", "install"] and "|".join(words[2:]) == expected
    if origin is None or "archive_info" in origin:
        assert Requirement(words[-1]).extras == {"kafka"}
