"""``dpstream workload`` as it is typed."""

import json
from pathlib import Path

from tests.pipelines.cli.called import call, examples_of, printed, refused
from tests.pipelines.workload.survey import JOB, survey, write


def test_plan(tmp_path: Path) -> None:
    file, cache = write(tmp_path / "w.json"), ("--cache", tmp_path / "cache")
    done = call("workload", "plan", file, "--epsilon", "1", "--delta", "1e-8", *cache)
    assert done.exit_code == 0, done.output
    assert "Floor" in done.stdout and "gap" in done.stdout and "identity" in done.stdout
    outcome = call("workload", "plan", file, "--mu", "1", *cache, "--json",
                 "--picture", tmp_path / "p.png", "--matrix", tmp_path / "m.svg")  # fmt: skip
    plan = json.loads(outcome.stdout)
    assert (tmp_path / "m.svg").exists()
    assert plan["cached"] and plan["rmse"] >= plan["floor"] and (tmp_path / "p.png").exists()
    named = call("workload", "plan", file, "--mu", "1", *cache, "--strategy", "identity",
                 "--objective", "worst", "--json")  # fmt: skip
    assert json.loads(named.stdout)["strategy"] == "identity"


def test_a_section_has_the_budget_and_bound_of_its_job(tmp_path: Path) -> None:
    survey(tmp_path, 10, text=JOB.replace("contributions = 1", "contributions = 3"))
    with open(tmp_path / "dpstream.toml", "a") as file:
        file.write('[workload.ages]\nfile = "asked.json"\njob = "people"\n')
    cache = ("--cache", tmp_path / "cache", "--json")
    section = ("workload", "plan", "ages", "--project", tmp_path, *cache)
    budget = ("--epsilon", "6", "--delta", "1e-9")
    bare = ("workload", "plan", tmp_path / "asked.json", *cache)
    assert call(*section).exit_code == 0  # the strategy is in the cache then
    of_job, by_hand = call(*section), call(*bare, *budget, "--contributions", "3")
    plan = printed(of_job.stdout)
    accepted = plan.pop("acceptance")
    assert accepted["accepted"] and accepted["charged"] == {"epsilon": 6, "delta": 1e-9}
    without = printed(by_hand.stdout)
    warnings, of_budget = plan.pop("warnings"), without.pop("warnings")
    assert plan == without
    assert warnings[:-1] == of_budget and "the account's limit" in warnings[-1]
    other = ("--mu", "0.5", "--contributions", "1")
    assert printed(call(*section, *other).stdout) == printed(call(*bare, *other).stdout)


def test_a_plan_begins_as_the_dry_run_of_the_answer(tmp_path: Path) -> None:
    survey(tmp_path, 10)
    with open(tmp_path / "dpstream.toml", "a") as file:
        file.write('[workload.ages]\nfile = "asked.json"\njob = "people"\n')
    section = ("ages", "--project", tmp_path, "--cache", tmp_path / "cache")
    dry = call("workload", "answer", *section, "--dry-run")
    plan = call("workload", "plan", *section)
    assert dry.stdout.startswith("Can answer  yes: ") and "\nAccount     " in dry.stdout
    assert plan.stdout.splitlines()[:2] == dry.stdout.splitlines()[:2]

    text = (tmp_path / "dpstream.toml").read_text()
    (tmp_path / "dpstream.toml").write_text(text.replace('key = ["sex"', 'key = ["sx"'))
    plan = call("workload", "plan", *section)
    assert plan.exit_code == 2 and "Can answer  NO. key: names sx; " in plan.stdout
    assert "\nFloor" in plan.stdout


def test_pure(tmp_path: Path) -> None:
    file = write(tmp_path / "w.json", [{"factors": {"age": "range"}}])
    cache = ("--cache", tmp_path / "cache")
    outcome = call(
        "workload", "plan", file, "--epsilon", "1", "--mechanism=geometric", *cache, "--json"
    )
    plan = json.loads(outcome.stdout)
    text = call("workload", "plan", file, "--epsilon", "1", "--mechanism=geometric", *cache).stdout
    assert f"{plan['rmse']:.6g}" in text and f"{plan['floor']:.6g}" in text
    assert plan["floor"] < plan["rmse"]
    [product] = plan["products"]
    assert product["least"] < product["rmse"] < product["most"] and plan["half_width"] > 2.15
    given = ("workload", "plan", file, "--mechanism=geometric")
    assert "--mechanism" in refused(*given, "--mu", "1")
    for more in (("--strategy", "identity"), ("--objective", "worst"), ("--matrix", "m.png")):
        assert "--mechanism" in refused(*given, "--epsilon", "1", *more)


def test_delta_of_zero_is_geometric_noise(tmp_path: Path) -> None:
    ranges, cache = [{"factors": {"age": "range"}}], ("--cache", tmp_path / "cache")
    given = ("workload", "plan", write(tmp_path / "w.json", ranges), "--epsilon", "1", *cache)
    left_out = call(*given).stdout
    flags: tuple[tuple[str, ...], ...] = ((), ("--mechanism=geometric",))
    for more in flags:
        done = call(*given, "--delta", "0", *more)
        assert done.exit_code == 0 and done.stdout == left_out
    assert "--mechanism" in refused(*given, "--delta", "0", "--strategy", "identity")
    flags = (("--mechanism=gaussian",), ("--mechanism=gaussian", "--matrix", "m.png"))
    for more in flags:
        assert "--delta" in refused(*given, "--delta", "0", *more)


def test_refused(tmp_path: Path) -> None:
    file, cache = write(tmp_path / "w.json"), ("--cache", tmp_path / "cache")
    assert "--epsilon" in refused("workload", "plan", file, *cache)
    assert "budget" in refused("workload", "plan", file, "--mu", "0", *cache)
    (tmp_path / "e.json").write_text('{"domain": [], "queries": []}')
    assert "domain" in refused("workload", "plan", tmp_path / "e.json", "--mu", "1")
    assert len(examples_of("workload", "plan")) == 5


def test_a_union_without_a_delta_is_refused_and_answered_as_the_fix_says(tmp_path: Path) -> None:
    """In plan by the flag, in an answer by the job; or one product of it."""
    two_way = [{"ways": 2}, {"ways": 1}]
    file, cache = write(tmp_path / "w.json", two_way), ("--cache", tmp_path / "cache")
    given = ("workload", "plan", file, "--epsilon", "1", *cache)
    fixed = call(*given, "--delta", "1e-9")
    assert fixed.exit_code == 0, fixed.output
    for more in (("--delta", "0"), ("--mechanism=geometric",)):
        text = refused(*given, *more)
        assert "2-way" in text and "--delta 1e-9" in text and "budget.delta = 1e-9" in text
    survey(tmp_path, 100)
    project = tmp_path / "dpstream.toml"
    project.write_text(project.read_text().replace("delta = 1e-9", "delta = 0"))
    answer = ("workload", "answer", file, "--project", tmp_path, *cache, "--quiet")
    assert "budget.delta = 1e-9" in refused(*answer, "--out", tmp_path / "out")
    one = write(tmp_path / "one.json", two_way[:1])
    alone = call("workload", "answer", one, *answer[3:], "--out", tmp_path / "one")
    assert alone.exit_code == 0, alone.output
    project.write_text(project.read_text().replace("delta = 0", "delta = 1e-9"))
    done = call(*answer, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
