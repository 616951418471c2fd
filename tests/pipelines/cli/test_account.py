"""``dpstream account``: made by a command, looked into, and its limit changed.

``dpstream secret``: a new key is for its owner only, and never written over.
"""

import json
import re
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.pipelines.cli import private_counts
from dpstream.pipelines.cli.operate import print_private
from dpstream.pipelines.cli.parts import Bar, stop_signals
from dpstream.pipelines.connectors.folder.store import place
from dpstream.pipelines.jobs.job import Job
from dpstream.state.ledger.open import read_history
from tests import accounts
from tests.pipelines.cli.called import call, printed, refused
from tests.pipelines.jobs.test_charging import job

CREATE = (
    "--data-set",
    "shop",
    "--unit",
    "customer",
    "--type",
    "int",
    "--epsilon",
    "8",
    "--delta",
    "1e-6",
)


def test_an_account_is_made_and_can_be_named(tmp_path: Path) -> None:
    """What it prints is what a file needs; a second account takes no other's place."""
    path = tmp_path / "data" / "shop.account.db"
    done = call("account", "create", path, *CREATE)
    assert done.exit_code == 0, done.output
    section = tomllib.loads(done.output[done.output.index("[data_set.") :])["data_set"]["shop"]
    table = section["account"]
    assert table["path"] == str(path) and section["unit"] == {"name": "customer", "type": "int"}
    account = printed(call("account", "show", path, "--json").stdout)
    assert account["id"] == table["id"] and account["limit"] == {"epsilon": 8.0, "delta": 1e-6}
    assert account["unit"]["text"] == "customer (int), all records" and account["charges"] == 0
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    # Who was stopped before the print types it again; another account takes no place.
    assert call("account", "create", path, *CREATE).output == done.output
    assert "account.path" in refused("account", "create", path, *CREATE, "--epsilon", "9")
    assert path.read_bytes() == before
    other = printed(call("account", "create", tmp_path / "o.db", *CREATE, "--json").stdout)
    assert other["id"] != table["id"] and other["data_set"] == "shop"


def test_the_data_set_is_that_of_the_project_or_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a part of the path; what the refusal says to type is enough."""
    monkeypatch.chdir(tmp_path)
    given = ("--unit", "customer", "--epsilon", "8", "--delta", "1e-6", "--json")

    def made(path: str, *more: str) -> object:
        return printed(call("account", "create", path, *more, *given).stdout)["data_set"]

    message = refused("account", "create", "acc.db", *given[:-1])
    assert "type --data-set NAME" in message and not (tmp_path / "acc.db").exists()
    assert made("acc.db", "--data-set", "shop") == "shop"
    project = tmp_path / "dpstream.toml"
    project.write_text('version = 1\n[data_set.visits]\naccount = { path = "data/v.db" }\n')
    assert made("data/v.db") == "visits" and made("o.db") == "visits"  # its only one
    more = '[data_set.orders]\naccount = { path = "spanner://p/i/orders" }\n'
    project.write_text(project.read_text() + more)
    (tmp_path / "data" / "v.db").unlink()
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert made("../data/v.db") == "visits"
    message = " ".join(refused("account", "create", "p.db", *given[:-1]).split())
    assert "type --data-set NAME with one of these names: visits, orders" in message
    assert made("p.db", "--data-set", "orders") == "orders"


@pytest.mark.parametrize(
    "limit",
    [("0", "1e-9"), ("1", "1"), ("-1", "1e-9"), ("1", "0"), ("inf", "1e-9"), ("nan", "1e-9")],
)
def test_what_is_no_limit(limit: tuple[str, str], tmp_path: Path) -> None:
    pair = ("--epsilon", limit[0], "--delta", limit[1])
    of = ("--data-set", "a", "--unit", "user")
    refused("account", "create", tmp_path / "a.db", *of, *pair)
    assert not (tmp_path / "a.db").exists()
    accounts.create(tmp_path / "b.db", "b")
    refused("account", "limit", tmp_path / "b.db", *pair)
    assert len(accounts.events(tmp_path / "b.db")) == 1


def test_a_large_delta_is_asked_for(tmp_path: Path) -> None:
    """A limit is judged as the guarantee of a run is, where it is set."""
    large = ("--epsilon", "50", "--delta", "0.02")
    path = tmp_path / "a.db"
    create = ("account", "create", path, "--data-set", "a", "--unit", "u", *large)
    assert "--delta" in refused(*create, code=3)
    done = call(*create, "--allow-large-delta")
    assert done.exit_code == 0 and done.stderr.count("promises little") == 2
    assert len(printed(call("account", "show", path, "--json").stdout)["warnings"]) == 2
    assert "--delta" in refused("account", "limit", path, *large, code=3)


def test_a_limit_is_changed_by_its_command_alone(tmp_path: Path) -> None:
    """A job that would pass a higher limit runs once the command has set it, and not before."""
    one = job(tmp_path, 1.0)
    project = ("--project", one.path)
    assert "account.limit" in refused("run", *project, "--quiet", code=3)
    assert call("plan", *project).exit_code == 3
    text = one.path.read_text()
    assert "account = { " in text
    limit = "limit = { epsilon = 99, delta = 1e-5 }"
    one.path.write_text(text.replace("account = { ", f"account = {{ {limit}, "))
    for command in ("plan", "run"):
        message = refused(command, *project)
        assert "account.limit" in message and "dpstream account limit" in message
    one.path.write_text(text)
    done = call("account", "limit", *project, "--epsilon", "40", "--delta", "1e-5", "--json")
    assert printed(done.stdout) == {
        "old": {"epsilon": 1.0, "delta": 1e-5}, "new": {"epsilon": 40.0, "delta": 1e-5},
    }  # fmt: skip
    assert call("plan", *project).exit_code == 0
    assert call("run", *project, "--quiet").exit_code == 0
    assert one.ledger is not None and read_history(one.ledger).limit == (40.0, 1e-5)


def test_the_limit_of_records_stands_in_their_budgets(tmp_path: Path) -> None:
    accounts.of_records(tmp_path / "r.db", "rides").close()
    pair = ("--epsilon", "1", "--delta", "1e-9")
    assert "account.limit" in refused("account", "limit", tmp_path / "r.db", *pair, code=3)


def test_options_of_the_project_file_do_not_go_with_a_path(tmp_path: Path) -> None:
    """They would change nothing, and whoever typed them believes that they did."""
    path = tmp_path / "b.db"
    accounts.create(path, "b")
    for option in (("--env", "live"), ("--set", "data_set.b.secret=x"), ("--project", "p.toml")):
        assert "--env" in refused("account", "show", path, *option)


def test_a_new_key_is_the_owners_alone(tmp_path: Path) -> None:
    key = tmp_path / "noise.secret"
    assert call("secret", "new", key).exit_code == 0
    assert key.stat().st_mode & 0o777 == 0o600
    before = key.read_bytes()
    outcome = call("secret", "new", key)
    assert outcome.exit_code != 0 and key.read_bytes() == before
    assert before.hex() not in outcome.output


def test_a_test_key_is_told(make_job: Callable[..., Job]) -> None:
    output = call("secret", "check", "--project", make_job().path).output
    assert "INSECURE" in output and "0f0f" not in output


def test_all_that_is_missing_is_named_at_once() -> None:
    example = "`dpstream account create shop.account.db --data-set shop --unit customer"
    for given, names in (
        ((), "PATH, --unit, --epsilon, --delta"),
        (("a.db", "--unit=user"), "--epsilon, --delta"),
        (("a.db", "--unit", "user", "--epsilon", "1"), "--delta"),
    ):
        assert f"{names} must be given, as in {example}" in refused("account", "create", *given)
        error = json.loads(refused("account", "create", *given, "--json"))
        assert error["field"] == names and error["rule"].startswith("must be given, as in")


@pytest.mark.parametrize("limit", [("1", "1e-5"), ("99", "1e-12")], ids=["epsilon", "delta"])
def test_the_figure_of_a_limit_that_is_too_small(tmp_path: Path, limit: tuple[str, str]) -> None:
    project = ("--project", job(tmp_path, 40.0).path)
    figures = ("--epsilon", limit[0], "--delta", limit[1])
    assert call("account", "limit", *project, *figures).exit_code == 0
    error = refused("run", *project, "--quiet", code=3)
    assert re.search(r"too small: this would spend [\d.e+]+% of it", error)
    fix = re.search(r"`dpstream (account limit [^`]*)`", error)
    assert fix is not None and call(*fix[1].split(), *project).exit_code == 0
    assert call("run", *project, "--quiet").exit_code == 0


# ``dpstream folder``: markers are written, and rows of dead letters found.


@pytest.mark.parametrize("name", ["info", "releases"])
def test_without_a_store(name: str, make_job: Callable[..., Job], tmp_path: Path) -> None:
    assert "store" in refused("state", name, "--project", make_job().path)
    assert not list(tmp_path.glob("*.db"))


def test_a_kind_is_for_files(make_job: Callable[..., Job]) -> None:
    assert "--kind" in refused("state", "releases", "--project", make_job().path, "--kind", "csv")


def test_sizes_are_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_counts, "visible", lambda: True)
    part = {"name": "units", "window": 3, "bytes": 2**20, "rows": 1234}
    print_private({"bytes": 2**21, "parts": [part], "input_changed": False})
    out, err = capsys.readouterr()
    assert out == ""
    assert "2.0 MiB" in err and "1.0 MiB in 1,234 rows, window 3" in err


def test_new_files_are_closed_once(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("x")
    first = json.loads(call("folder", "close", tmp_path, "--new", "--json").output)
    assert first["files"] == 2 and (tmp_path / first["marker"]).exists()
    assert "0 files closed" in call("folder", "close", tmp_path, "--new").output


def test_a_position_is_a_row_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    at = place("a.csv")
    outcome = call("folder", "find", tmp_path, str(at.partition), str(at.base + 12), "--json")
    assert json.loads(outcome.output) == [{"file": "a.csv", "row": 12}]
    assert "no file" in call("folder", "find", tmp_path, "1", "2").output


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "file" in refused("folder", "close", tmp_path, "none.csv")


def test_signals_stop_while_the_block_runs_and_then_do_what_they_did() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals(True) as stop:
        assert stop is not None and not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGTERM) is before
    with stop_signals(False) as none:
        assert none is None and signal.getsignal(signal.SIGTERM) is before


def test_a_bar_shows_steps_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar(hidden=True) as bar:
        bar.update(3, 0)
        [task] = bar._progress.tasks
        assert (task.completed, task.total) == (3, None)
        bar.update(4, 9)
        assert (task.completed, task.total) == (4, 9)
    assert capsys.readouterr() == ("", "")
