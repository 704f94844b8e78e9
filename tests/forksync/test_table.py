"""A table's faults are told with their lines; its rules are counted and warned of."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from forksync.config import ConfigError
from forksync.table import load
from tests.forksync.repos import rule, table

MORE = '[[rule]]\nkind = "%s"\nname = "r"\nfrom = "%s"\nto = "%s"\nexamples = [{ before = "", after = "" }]\n'
GOOD = """\
# the package
[[rule]]
kind = "package"
name = "package"
from = "slim"
to = "vim"
examples = [{ before = "import slim", after = "import vim" }, { path = "slim/a.py", becomes = "vim/a.py" }]
"""


def write(folder: Path, text: str) -> Path:
    (folder / "table.toml").write_text(text)
    return folder / "table.toml"


@pytest.mark.parametrize(
    ("text", "line", "fault"),
    [
        (GOOD.replace('to = "vim"', 'too = "vim"'), 6, "too is not an option; did you mean to?"),
        (GOOD.replace('to = "vim"', 'to = "1vim"'), 6, "to = "),
        (GOOD.replace('to = "vim"\n', ""), 2, "to is missing"),
        (GOOD.replace('"package"\nname', '"pakage"\nname'), 3, 'rule.kind = "pakage": must be one of identifier'),
        (GOOD.replace('after = "import vim"', 'after = ""'), 2, "'import slim' becomes 'import vim', not ''"),
        (GOOD.replace('becomes = "vim/a.py"', 'becomes = ""'), 2, "'slim/a.py' becomes 'vim/a.py', not ''"),
        (GOOD.replace("examples", "# examples"), 2, "examples is missing"),
        (GOOD + GOOD, 9, "a second rule is called 'package'; names are unique"),
        (GOOD + '\n[rules]\n', 9, "rules is not known here"),
        (GOOD + MORE % ("regex", "(", ""), 11, "not a regular expression"),
        (GOOD + MORE % ("regex", "a*", ""), 11, "matches the empty text"),
        (GOOD + MORE % ("call", "f(a, b)", "g(a)"), 8, "to does not use b, which every call gives"),
        (GOOD + MORE % ("call", "f(a)", "g(a)") + 'spare = ["x"]\n', 8, "a call rule spares nothing by text"),
        (GOOD.replace("[[rule]]", "[rule]"), 2, "rule must be a list of tables: write [[rule]]"),
        ("rule = 3\n", 1, "rule must be a list of tables: write [[rule]]"),
        (GOOD.replace('"package"\nname', '["package"]\nname'), 3, 'rule.kind = ["package"]: must be one of'),
        (GOOD + "[[rule]\n", 8, "not TOML"),
    ],
)  # fmt: skip
def test_each_fault_is_one_message_with_its_file_and_line(tmp_path: Path, text: str, line: int, fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(write(tmp_path, text))
    message = str(raised.value)
    assert fault in message
    assert f"table.toml:{line}: " in message or (fault == "not TOML" and f"line {line}" in message)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    text = GOOD.replace('"slim"', '"s lim"', 1) + GOOD.replace("package", "pakage")
    with pytest.raises(ConfigError) as raised:
        load(write(tmp_path, text))
    assert len(str(raised.value).splitlines()) == 2


def test_the_hash_is_of_the_rules_meaning(tmp_path: Path) -> None:
    first = load(write(tmp_path, GOOD))
    assert load(write(tmp_path, f"# another comment\n\n{GOOD}")).hash == first.hash
    assert (
        load(
            write(tmp_path, GOOD.replace('"vim"', '"vem"').replace("import vim", "import vem").replace("vim/", "vem/"))
        ).hash
        != first.hash
    )


def test_a_rule_that_matches_too_little_or_too_much_is_warned_of() -> None:
    rules = table(
        rule("identifier", old="gone", new="x"),
        rule("identifier", old="idle", new="y", at_least=0),
        rule("identifier", old="few", new="z", at_least=3),
        rule("identifier", old="many", new="w", at_most=1),
    )
    names = [one.name for one in rules.rules]
    told = [str(warning) for warning in rules.check(Counter({names[2]: 2, names[3]: 2}))]
    assert len(told) == 3
    assert "gone" in told[0] and "matches nothing any more" in told[0]
    assert "matched 2 times, expected at least 3" in told[1]
    assert "matched 2 times, expected at most 1" in told[2]


def test_a_line_that_a_rule_should_not_match_is_warned_of_with_its_place() -> None:
    rules = table(rule("regex", old="slim", new="vim", never=["github", r"\bslimmer\b"]))
    result = rules.translate("a.md", b"slim\nsee github.com/slim\nslimmer\n")
    assert [str(warning).split(": ", 1)[1] for warning in result.warnings] == [
        "a.md:2: changed a line with 'github', which it should not match",
        "a.md:3: changed a line with 'slimmer', which it should not match",
    ]


def test_uses_are_counted_by_rule() -> None:
    rules = table(rule("identifier", old="a", new="b"), rule("package", old="p", new="q"))
    assert rules.translate("x.py", b"a, a, c = p\nimport p\n").uses == {"identifier a 0": 2, "package p 1": 2}
    assert rules.place("p/a.py")[1] == {"package p 1": 1}
