"""The page's script: named by its digest, and data that cannot leave its element."""

import base64
import hashlib
import json

from dpstream.pipelines.report.script import embedded, parts, policy, script


def test_the_policy_names_the_script_and_nothing_else() -> None:
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policy().split("; "))
    assert rules["script-src"] == f"'sha256-{digest}'" and rules["default-src"] == "'none'"
    assert rules["base-uri"] == rules["form-action"] == "'none'" and "connect-src" not in rules
    assert policy(live=True) == policy() + "; connect-src 'self'"
    assert parts()["script"] == script() and parts(True)["policy"] == policy(True)


def test_the_script_writes_text_alone() -> None:
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert sink not in script()
    assert "</script" not in script() and "<!--" not in script()


def test_data_holds_no_mark_of_html() -> None:
    evil = ["</script><script>alert(1)</script>", "<!--", "&lt;", "\u2028\u2029", '"\\']
    text = embedded({"keys": evil})
    assert not set("<>&\u2028\u2029") & set(text) and json.loads(text) == {"keys": evil}
