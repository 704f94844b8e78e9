"""Structural rewrites: which calls are rewritten, to what, and which are left alone with a reason."""

from __future__ import annotations

import pytest

from forksync.rules.import_edits import add, remove_unused
from forksync.rules.signature import Argument, Unbound, bind, parse_signature
from tests.forksync.repos import rule, table, translated

RUN = rule(
    "call",
    old="backend.run(func, *args, limiter=None, name='x')",
    new="engine.submit(func, *args, label=name)",
    drops=["limiter"],
    imports=["import engine"],
)


@pytest.mark.parametrize(
    ("call", "becomes"),
    [
        ("backend.run(f)", "engine.submit(f)"),
        ("backend.run(f, 1, 2)", "engine.submit(f, 1, 2)"),
        ("backend.run(f, *rest)", "engine.submit(f, *rest)"),
        ("backend.run(f, name=g(1), limiter=q)", "engine.submit(f, label=g(1))"),
        ("backend.run(func=f)", "engine.submit(f)"),
        ("backend.run(\n    f,\n    1,  # one\n)", "engine.submit(\n    f,\n    1,  # one\n)"),
        ("backend.run(backend.run(f))", "engine.submit(engine.submit(f))"),
        ("backend.run(x for x in y)", "engine.submit((x for x in y))"),
        ("other.run(f)", "other.run(f)"),
    ],
)
def test_a_call_is_bound_as_python_would_and_its_arguments_mapped(call: str, becomes: str) -> None:
    result = translated(table(RUN), f"import backend\nx = {call}\n")
    assert result.rstrip().endswith(f"x = {becomes}")
    assert ("import engine" in result) == ("engine" in becomes)


@pytest.mark.parametrize(
    ("line", "name"),
    [("import backend as b", "b.run"), ("from backend import run", "run"), ("from backend import run as r", "r")],
)
def test_a_function_is_found_under_any_name_it_is_imported_as(line: str, name: str) -> None:
    assert "x = engine.submit(f)" in translated(table(RUN), f"{line}\nx = {name}(f)\n")


def test_a_function_that_is_not_imported_is_another() -> None:
    source = "def g(backend):\n    backend.run(f)\n"
    assert translated(table(RUN), source) == source


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("backend.run(*all)", "a * argument may hold func"),
        ("backend.run(f, **more)", "a ** argument may hold limiter"),
        ("backend.run(f, colour=1)", "no parameter for colour"),
        ("backend.run()", "func is missing"),
        ("backend.run(f, func=f)", "func is given twice"),
        ("map(backend.run, fs)", "backend.run is used without a call"),
    ],
)
def test_a_call_that_does_not_fit_is_left_alone_with_a_reason(call: str, why: str) -> None:
    source = f"import backend\n{call}\n"
    result = table(RUN).translate("a.py", source.encode())
    assert result.data.decode() == source
    assert why in str(result.warnings[0])


def test_an_argument_is_never_lost_unless_the_rule_says_so() -> None:
    rules = table({**RUN, "drops": []})
    result = rules.translate("a.py", b"import backend\nbackend.run(f, limiter=q)\nbackend.run(f)\n")
    assert result.data.endswith(b"backend.run(f, limiter=q)\nengine.submit(f)\n")
    assert "no place for limiter" in str(result.warnings[0])


def test_a_missing_optional_argument_is_missing_in_the_result_or_has_its_default_where_one_must_stand() -> None:
    rules = table(rule("call", old="f(a, b=2, c=3)", new="g(b, c, key=b, a=a)"))
    assert translated(rules, "f(1)\nf(1, c=7)\nf(1, 5)\n") == "g(a=1)\ng(2, 7, a=1)\ng(5, key=5, a=1)\n"
    inner = table(rule("call", old="f(a, b=2)", new="g(a + b)"))
    assert translated(inner, "f(1)\nf(x if y else z)\n") == "g(1 + 2)\ng((x if y else z) + 2)\n"


def test_a_method_of_any_receiver_that_matches() -> None:
    rules = table(
        rule("call", old="$client.generate(prompt)", new="complete($client.url, prompt)", receiver=r"(self\.)?client")
    )
    source = "client.generate(p)\nself.client.generate(p)\nother.generate(p)\n"
    assert translated(rules, source) == "complete(client.url, p)\ncomplete(self.client.url, p)\nother.generate(p)\n"


def test_an_awaited_call_becomes_another_expression_and_parentheses_follow_need() -> None:
    rules = table(rule("call", old="await m.get(x)", new="m.read(x) or None"))
    before = ["a = await m.get(1)", "b = (await m.get(2)).c", "return -await m.get(3), m.get(4)"]
    after = ["a = m.read(1) or None", "b = (m.read(2) or None).c", "return -(m.read(3) or None), m.get(4)"]
    source = "import m\nasync def f():\n    {}\n    {}\n    {}\n"
    assert translated(rules, source.format(*before)) == source.format(*after)


def test_an_import_goes_where_nothing_uses_it_any_more() -> None:
    rules = table({**RUN, "unused": ["import backend"]})
    assert "import backend" not in translated(rules, "import backend\nbackend.run(f)\n")
    assert "import backend" in translated(rules, "import backend\nbackend.run(f)\nbackend.other()\n")


@pytest.mark.parametrize(
    ("code", "after"),
    [
        ("", "import b\n"),
        ("x = 1\n", "import b\n\nx = 1\n"),
        (
            "#!/bin/sh\n# coding: utf-8\n'''Doc.'''\nx = 1\n",
            "#!/bin/sh\n# coding: utf-8\n'''Doc.'''\nimport b\n\nx = 1\n",
        ),
        ("from __future__ import annotations\nx = 1\n", "from __future__ import annotations\nimport b\nx = 1\n"),
        ("import a\nimport b.c\nimport d\n", "import a\nimport b\nimport b.c\nimport d\n"),
        ("import a  # why\r\nx = 1\r\n", "import a  # why\r\nimport b\r\nx = 1\r\n"),
        (
            "from a import (\n    c,  # )\n    d,\n)\nx = 1\n",
            "from a import (\n    c,  # )\n    d,\n)\nimport b\nx = 1\n",
        ),
        ("def f():\n    import a\n", "import b\n\ndef f():\n    import a\n"),
        ("import a", "import a\nimport b\n"),
        ("import b, c\n", "import b, c\n"),
        ("import a\ndef f():\n    import b\n", "import a\nimport b\ndef f():\n    import b\n"),
    ],
)
def test_an_import_is_put_among_the_first_ones_once(code: str, after: str) -> None:
    assert add(code, "import b") == after
    assert add(after, "import b") == after


@pytest.mark.parametrize(
    ("statement", "code", "after"),
    [
        ("import a", "import a\nx = 1\n", "x = 1\n"),
        ("import a", "import a\na.f()\n", None),
        ("import a", "import a\nx: 'a.B' = 1\n", None),
        ("import a", "import a\nx.a = 1\n", "x.a = 1\n"),
        ("import a.b", "import a.b\na.c()\n", None),
        ("import a.b", "import a\nimport a.b\na.c()\n", "import a\na.c()\n"),
        ("import a.b as c", "import a.b as c\na.b()\n", "a.b()\n"),
        ("from m import a", "from m import a, b\nb()\n", "from m import b\nb()\n"),
        ("from m import b as c", "from m import (\n    a,\n    b as c,\n)\na()\n", "from m import (\n    a,\n)\na()\n"),
        ("import a", "try:\n    import a\nexcept E:\n    pass\n", None),
        ("import a", "import b\n", None),
        ("import a", "import a; x = 1\n", None),
        ("import a", "import a  # why\n", ""),
    ],
)
def test_an_import_is_taken_out_only_where_nothing_can_use_it(statement: str, code: str, after: str | None) -> None:
    assert remove_unused(code, statement) == (code if after is None else after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"\xef\xbb\xbfimport m\r\nm.f(1)\r\nx = '\xff'\r\n", b"\xef\xbb\xbfimport m\r\nm.g(1)\r\nx = '\xff'\r\n"),
        (b"import m\nif x:\n\tm . f (1)\n\n\n# \xe9", b"import m\nif x:\n\tm.g(1)\n\n\n# \xe9"),
        (b"import m\nm.f(\n  1\n)  # a\x0c\n", b"import m\nm.g(\n  1\n)  # a\x0c\n"),
    ],
)
def test_what_is_around_a_call_keeps_every_byte(before: bytes, after: bytes) -> None:
    assert table(rule("call", old="m.f(a)", new="m.g(a)")).translate("a.py", before).data == after


def test_source_that_is_no_python_is_left_alone_and_said() -> None:
    source = b"import backend\nprint backend.run(f)\n"
    result = table(RUN).translate("a.py", source)
    assert result.data == source
    assert "line 2 is not read as Python" in str(result.warnings[0])


def test_a_binding_gives_each_argument_to_one_parameter() -> None:
    signature = parse_signature("f(a, /, b, *rest, c=1, **more)")
    bound = bind(
        signature, [Argument(n, keyword=k) for n, k in [(1, None), (2, None), (3, None), (4, "c"), (5, "d"), (6, "a")]]
    )
    assert {name: [argument.value for argument in found] for name, found in bound.items()} == {
        "a": [1],
        "b": [2],
        "rest": [3],
        "c": [4],
        "more": [5, 6],
    }
    with pytest.raises(Unbound, match="a is missing"):
        bind(signature, [Argument(1, keyword="b")])
