"""What each kind of rename rule changes, and what it leaves alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forksync.rules.python import CODE
from tests.forksync.repos import rule, table, translated

SOURCE = """\
import old as o
from m import old
old = x.old  # old, older
f(old=1, text="old", path="old.part", doc="the old one", fmt=f"old {old}")
older = "older"
"""


@pytest.mark.parametrize(
    ("place", "changed"),
    [
        ("imports", ["import new as o", "from m import new"]),
        ("names", ["new = x.old  # old, older", '{new}")']),
        ("attributes", ["old = x.new"]),
        ("keywords", ["f(new=1"]),
        ("comments", ["# new, older"]),
        ("literals", ['text="new"', 'path="new.part"', 'doc="the old one"']),
        ("strings", ['text="new"', 'doc="the new one"', 'f"new {old}"']),
    ],
)
def test_an_identifier_is_renamed_in_the_chosen_places_only(place: str, changed: list[str]) -> None:
    rules = table(rule("identifier", old="old", new="new", places=[place]))
    result = translated(rules, SOURCE)
    assert all(piece in result for piece in changed)
    places = [*CODE, "literals", "strings", "comments"]
    for other in places:
        if other != place and {other, place} != {"literals", "strings"}:
            alone = translated(table(rule("identifier", old="old", new="new", places=[other])), SOURCE)
            assert alone != result
    back = table(rule("identifier", old="new", new="old", places=[*places]))
    assert translated(back, result) == SOURCE


def test_in_other_files_an_identifier_is_a_word() -> None:
    rules = table(rule("identifier", old="old", new="new", places=["text"]))
    assert translated(rules, "old: older old-fashioned\n", "a.yaml") == "new: older new-fashioned\n"
    assert translated(rules, "old = 1\n", "a.py") == "old = 1\n"


def test_renaming_to_a_name_that_stands_in_the_file_already_is_warned_of() -> None:
    rules = table(rule("identifier", old="old", new="new"))
    assert "two names have become one" in str(rules.translate("a.py", b"old = new\n").warnings[0])
    assert not rules.translate("a.py", b"old = 1\n").warnings


MODULE = table(rule("module", old="pkg.old", new="pkg.new"))


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("x.py", "import pkg.old\npkg.old.f()\n", "import pkg.new\npkg.new.f()\n"),
        ("x.py", "import pkg.old.deep as d, os\nd.f()\n", "import pkg.new.deep as d, os\nd.f()\n"),
        ("x.py", "from pkg.old import a, b\n", "from pkg.new import a, b\n"),
        ("x.py", "from pkg import old, other\nold.f()\n", "from pkg import new as old, other\nold.f()\n"),
        ("x.py", "from pkg import old as o\n", "from pkg import new as o\n"),
        ("pkg/x.py", "from .old import a\n", "from .new import a\n"),
        ("pkg/x.py", "from . import old\n", "from . import new as old\n"),
        ("src/pkg/x.py", "from .old import a\n", "from .new import a\n"),
        ("pkg/__init__.py", "from .old import a\n", "from .new import a\n"),
        ("pkg/sub/x.py", "from ..old import a\n", "from ..new import a\n"),
        ("pkg/sub/x.py", "from .old import a\n", "from .old import a\n"),
        ("pkg/old/x.py", "from .deep import a\n", "from .deep import a\n"),
        ("x.py", "pkg = 1\npkg.old()\n", "pkg = 1\npkg.old()\n"),
        ("x.py", "import pkg.older\npkg.older.f()\n", "import pkg.older\npkg.older.f()\n"),
        ("x.py", 'f("pkg.old.C", "a pkg.old b", "pkg.older")\n', 'f("pkg.new.C", "a pkg.old b", "pkg.older")\n'),
        ("x.py", "from pkg.old import (  # why\n    a,\n)\n", "from pkg.new import (  # why\n    a,\n)\n"),
    ],
)
def test_a_module_is_renamed_in_every_form_of_import_and_in_dotted_use(path: str, before: str, after: str) -> None:
    assert translated(MODULE, before, path) == after


def test_a_module_moves_with_its_file_or_folder_below_any_root() -> None:
    moved = {"pkg/old.py": "pkg/new.py", "src/pkg/old/a.txt": "src/pkg/new/a.txt", "pkg/older.py": "pkg/older.py"}
    assert {path: MODULE.place(path)[0] for path in moved} == moved
    outside = table(rule("module", old="requests", new="httpx", files=False))
    assert outside.place("requests/a.py")[0] == "requests/a.py"


def test_a_module_that_moves_deeper_keeps_its_relative_imports_right() -> None:
    deeper = table(rule("module", old="pkg.old", new="pkg.core.old"))
    assert translated(deeper, "from . import sibling\nfrom .a import b\n", "pkg/old.py") == (
        "from pkg import sibling\nfrom pkg.a import b\n"
    )
    assert translated(deeper, "from .old import a\n", "pkg/x.py") == "from .core.old import a\n"
    assert translated(deeper, "from . import old\n", "pkg/x.py") == "from .core import old\n"
    result = deeper.translate("pkg/x.py", b"from . import old, other\n")
    assert result.data == b"from . import old, other\n"
    assert "imported together with others" in str(result.warnings[0])


def test_a_package_is_renamed_everywhere_as_a_word_of_its_own() -> None:
    rules = table(rule("package", old="slim", new="vim"))
    assert translated(rules, "import slim.a\n# slim, slimmer, slim-kit\nx = 'pip install slim'\nslim.a.f()\n") == (
        "import vim.a\n# vim, slimmer, slim-kit\nx = 'pip install vim'\nvim.a.f()\n"
    )
    assert translated(rules, 'name = "slim"\nsrc/slim/a.py\n', "pyproject.toml") == 'name = "vim"\nsrc/vim/a.py\n'
    assert rules.place("src/slim/a.py")[0] == "src/vim/a.py"


def test_a_flag_is_renamed_with_its_dest_and_never_within_a_longer_one() -> None:
    rules = table(rule("flag", old="--use-slim", new="--use-vim", dest=True))
    source = (
        'add("--use-slim", "--use-slim-kit")  # --use-slim\nargs.use_slim, f(use_slim=1), getattr(args, "use_slim")\n'
    )
    assert translated(rules, source) == (
        'add("--use-vim", "--use-slim-kit")  # --use-vim\nargs.use_vim, f(use_vim=1), getattr(args, "use_vim")\n'
    )
    assert translated(rules, "run --use-slim=1 --no-use-slim\n", "run.sh") == "run --use-vim=1 --no-use-slim\n"


def test_a_star_in_a_flag_stands_for_its_rest() -> None:
    rules = table(rule("flag", old="--slim-*", new="--vim-*", dest=True))
    assert translated(rules, 'add("--slim-tp-size"); args.slim_tp_size\n') == 'add("--vim-tp-size"); args.vim_tp_size\n'


def test_a_path_rule_moves_files_and_by_choice_what_names_them() -> None:
    silent = table(rule("path", old="docs/old", new="guide"))
    assert [silent.place(p)[0] for p in ("docs/old/a.md", "docs/older/a.md")] == ["guide/a.md", "docs/older/a.md"]
    assert translated(silent, "see docs/old/a.md\n", "README.md") == "see docs/old/a.md\n"
    speaking = table(rule("path", old="docs/old", new="guide", mentions=True))
    assert translated(speaking, "see docs/old/a.md, docs/older\n", "README.md") == "see guide/a.md, docs/older\n"


def test_the_last_drop_or_keep_rule_that_covers_a_file_decides() -> None:
    rules = table(
        rule("drop", paths=["docs/"]), rule("keep", paths=["docs/**/*.md"]), rule("drop", paths=["**/secret.md"])
    )
    placed = {p: rules.place(p)[0] for p in ("docs/a.rst", "docs/a.md", "docs/b/secret.md", "src/a.py")}
    assert placed == {"docs/a.rst": None, "docs/a.md": "docs/a.md", "docs/b/secret.md": None, "src/a.py": "src/a.py"}


def test_a_regular_expression_serves_other_languages() -> None:
    rules = table(rule("regex", old=r"^SLIM_(\w+)$", new=r"VIM_\1", paths=["**/*.env"]))
    assert translated(rules, "SLIM_HOME\nX=SLIM_HOME\n", "a/b.env") == "VIM_HOME\nX=SLIM_HOME\n"
    assert translated(rules, "SLIM_HOME\n", "a/b.py") == "SLIM_HOME\n"


@pytest.mark.parametrize("kind", ["package", "identifier", "regex"])
def test_what_a_rule_spares_stays(kind: str) -> None:
    places = {} if kind == "regex" else {"places": ["strings", "comments", "text"]}
    rules = table(rule(kind, old="slim", new="vim", spare=[r"github\.com/\w+/slim"], **places))
    assert translated(rules, "# slim, see github.com/me/slim\n") == "# vim, see github.com/me/slim\n"
    assert translated(rules, "slim: github.com/me/slim\n", "a.yml") == "vim: github.com/me/slim\n"


def test_the_scope_is_the_upstreams_own_path_and_rules_apply_in_order() -> None:
    rules = table(
        rule("package", old="one", new="two"),
        rule("identifier", old="f", new="g", paths=["one/**"]),
        rule("module", old="two.a", new="two.b"),
    )
    assert rules.place("one/a.py")[0] == "two/b.py"
    assert translated(rules, "from .a import f\nimport one.a\n", "one/x.py") == "from .b import g\nimport two.b\n"
    assert translated(rules, "f\n", "two/x.py") == "f\n"


@pytest.mark.parametrize(
    "data",
    [
        b"old\0old",
        b"\xef\xbb\xbfold = 1\r\nx = '\xe9 old'\r\n",
        b"old = '\xff\xfe'\rold\x0cold\n",
        b"# -*- latin-1 -*-\nold = '\xe9'\n",
    ],
)
def test_bytes_that_no_rule_touches_are_kept(data: bytes) -> None:
    result = table(rule("identifier", old="old", new="new")).translate("a.py", data).data
    expected = (
        data
        if b"\0" in data
        else data.replace(b"old = ", b"new = ").replace(b"\x0cold", b"\x0cnew").replace(b"\rold", b"\rnew")
    )
    assert result == expected


IDEMPOTENT = table(
    rule("package", old="slim", new="vim"),
    rule("module", old="vim.old", new="vim.new"),
    rule("identifier", old="alpha", new="beta", places=[*CODE, "literals", "strings", "comments", "text"]),
    rule("flag", old="--slim-*", new="--vim-*", dest=True),
    rule("call", old="vim.run(x, y=None)", new="vim.start(y, x=x)", roots=["."]),
    rule("regex", old=r"\bcolour\b", new="color"),
)
PIECES = [
    "slim", "vim", "old", "new", "alpha", "beta", "colour", "run", ".", " ", "import ", "from ", "(", ")", ", ", "=", '"', "'",
    "#", "\n", "\r\n", "    ", "--slim-a", "slim_a", 'f"{', "}", "def ", "é", "\udcff", ":", "as ",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join), st.sampled_from(["slim/a.py", "a.py", "b.md"]))
def test_translating_twice_with_an_idempotent_table_changes_nothing(text: str, path: str) -> None:
    once = IDEMPOTENT.translate(path, text.encode("utf-8", "surrogateescape")).data
    again = IDEMPOTENT.place(path)[0] or ""
    assert IDEMPOTENT.translate(again, once).data == once


@given(
    st.lists(
        st.sampled_from([*PIECES, "slim.old.run(1)\n", "import slim.old\n", "from slim import run\nrun(a, y=2)\n"]),
        max_size=30,
    ).map("".join)
)
def test_a_translation_undone_by_the_reverse_rename_is_the_source(text: str) -> None:
    if "beta" in text:
        return
    places = [*CODE, "strings", "comments"]
    there = table(rule("identifier", old="alpha", new="beta", places=places))
    back = table(rule("identifier", old="beta", new="alpha", places=places))
    data = text.encode("utf-8", "surrogateescape")
    assert back.translate("a.py", there.translate("a.py", data).data).data == data
