"""The reward of code: which tests pass, and which tricks do not help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vime.rewards.load import load_reward
from vime.sample import Task

SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6", "output": "11"}]
ADDS = ["assert add(1, 2) == 3", "assert abs(add(1.5, 1) - 2.5) < 1e-6", "assert add('a', 'b') == 'ab'"]


@pytest.fixture(scope="module")
def share() -> Callable[..., float]:
    """The share of tests that a program passes."""
    reward = load_reward("code", {"score": "share", "test_timeout_s": 60}, deadline_s=300)

    def scored(source: str, tests: Any, **columns: Any) -> float:
        found: float = reward(Task("t1", (), None, {"tests": tests, **columns}), f"So:\n```python\n{source}\n```\n")
        return found

    return scored


def test_a_program_is_compared_by_what_it_writes(share: Any) -> None:
    assert share("print(sum(map(int, input().split())))", SUMS) == 1
    assert share("print(3, end='   ')", SUMS) == 0.5
    assert share("print(3)\nraise SystemExit(1)", SUMS) == 0
    assert share("if __name__ == '__main__': print(3)", {"inputs": ["", ""], "outputs": ["3", "4"]}) == 0.5
    assert share("print(3)", '[{"input": "", "output": "3"}]') == 1


def test_functions_are_called_by_the_tests(share: Any) -> None:
    assert share("def add(a, b): return a + b", ADDS) == 1
    assert share("def add(a, b): return a * b if a == 'a' else a + b", ADDS) == pytest.approx(2 / 3)
    assert share("def add(a, b: return", ADDS) == 0
    assert share("def sub(a, b): return a - b", ADDS) == 0


CHEATS = {
    "exit": "import sys\ndef add(a, b): sys.exit(0)",
    "exit in C": "import os\ndef add(a, b): os._exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "an object equal to all": (
        "class E:\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = lambda s, o: True\n"
        "    __sub__ = __rsub__ = lambda s, o: 0\n    __abs__ = lambda s: 0\n    __float__ = lambda s: 0.0\n"
        "def add(a, b): return E()"
    ),
    "a number equal to all": "class E(int):\n    __eq__ = __lt__ = lambda s, o: True\ndef add(a, b): return E(9)",
    "names of Python's own": "def abs(x): return 0\ndef add(a, b): return 9",
    "builtins changed": "import builtins\nbuiltins.abs = lambda x: 0\n__builtins__ = {}\ndef add(a, b): return 9",
    "assertions that are none": "class AssertionError(Exception): pass\ndef add(a, b): raise AssertionError",
    "reports of its own": (
        "import os\nfor number in range(3, 20):\n"
        '    try: os.write(number, b\'{"passed": true, "gone": false, "unusable": false}\\n\' * 9)\n'
        "    except OSError: pass\ndef add(a, b): return 9"
    ),
    "the tests on the disk": (
        "import glob\nfound = [open(name).read() for name in glob.glob('/box/*') + glob.glob('/tmp/*')]\n"
        "def add(a, b): return 3 if any(' '.join(['assert', 'add']) in text for text in found) else 9"
    ),
    "the tests in the memory": (
        "import gc\ndef add(a, b):\n"
        "    words = ' '.join(['assert', 'add'])\n"
        "    return 3 if any(words in repr(one) for one in gc.get_objects() if type(one) in (tuple, list, dict)) else 9"
    ),
}


@pytest.mark.parametrize("trick", CHEATS)
def test_no_trick_passes(share: Any, trick: str) -> None:
    assert share(CHEATS[trick], ADDS) == 0


def test_code_that_ends_is_started_again_for_the_next_test(share: Any) -> None:
    source = "import os\ndef add(a, b):\n    if a == 1: os._exit(0)\n    return a + b"
    assert share(source, ADDS) == pytest.approx(2 / 3)


def test_a_test_that_swallows_every_exception_does_not_pass_code_that_ended(share: Any) -> None:
    swallowing = "try:\n    add(1, 2)\nexcept BaseException:\n    pass"
    assert share("import os\ndef add(a, b): os._exit(0)", swallowing) == 0


def test_a_test_cannot_be_reached_through_a_function_that_it_gives_away(share: Any) -> None:
    source = """
def tried(f):
    found = []
    for name in ("__globals__", "__code__", "gi_frame", "__self__"):
        try: found.append(getattr(f, name))
        except Exception: pass
    return len(found)
"""
    tests = [
        "secret = 5\nassert tried(lambda: secret) == 0",
        "assert tried(x for x in [1]) == 0",
        "assert tried([].append) == 0",
    ]
    assert share(source, tests) == 1


SOLUTION = """
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum
class MyError(ValueError): pass
class Color(Enum):
    RED = 1
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
def sort_in_place(items): items.sort()
def apply(f, x): return f(x)
def fail(n):
    if n == 1: raise MyError("no")
    raise KeyError("bad")
def numbers(n):
    for i in range(n): yield i
@dataclass
class P:
    x: int
    y: int
    def __add__(self, other): return P(self.x + other.x, self.y + other.y)
def count(s): return Counter(s)
def add(a, b): return a + b
def bump(node): node.value += 1
def kinds(): return (1, 2), {1, 2}, {"a": [None]}, b"x", 1j, float("inf"), 10**5000, deque([1]), True
"""
TESTS = [
    "s = Stack(); s.push(1); s.push([2]); assert s.pop() == [2] and len(s) == 1",
    "items = [3, 1, 2]; assert sort_in_place(items) is None; assert items == [1, 2, 3]",
    "assert apply(lambda x: x + 1, 2) == 3 and apply(str, 2) == '2' and apply(len, 'ab') == 2",
    "try:\n    fail(1)\n    assert False\nexcept MyError as error:\n    assert str(error) == 'no'",
    "try:\n    fail(1)\nexcept ValueError:\n    caught = True\nassert caught",
    "try:\n    fail(2)\nexcept KeyError:\n    caught = True\nassert caught",
    "assert list(numbers(3)) == [0, 1, 2] and 2 in numbers(3) and next(iter(numbers(1))) == 0",
    "assert P(1, 2) == P(1, 2) and P(1, 2) != P(1, 3) and (P(1, 2) + P(3, 4)).y == 6 and str(P(1, 2)) == 'P(x=1, y=2)'",
    "assert count('aab') == {'a': 2, 'b': 1}",
    "def check(candidate):\n    assert candidate(1, 2) == 3",
    "def test_points():\n    assert isinstance(P(1, 2), P) and not isinstance(3, P)",
    "from solution import add as plus\nassert plus(2, 2) == 4",
    "class Node:\n    def __init__(self, value): self.value = value\nnode = Node(1)\nbump(node)\nassert node.value == 2",
    "assert Color.RED == Color.RED and Color.RED.value == 1",
    "from collections import deque\nassert kinds() == ((1, 2), {1, 2}, {'a': [None]}, b'x', 1j, float('inf'), 10**5000, "
    "deque([1]), True)",
    "assert helper(add(1, 1)) == 4",
]


def test_objects_exceptions_callbacks_and_changed_arguments_cross_between_test_and_code(share: Any) -> None:
    setup = "def helper(x): return 2 * x"
    assert share(SOLUTION, TESTS, entry_point="add", setup=setup) == 1
    wrong = [test.replace("==", "!=") for test in TESTS if "==" in test and "def " not in test]
    assert share(SOLUTION, wrong, setup=setup) < 0.2


def test_a_late_test_fails_alone_and_the_budget_of_the_call_ends_all() -> None:
    reward = load_reward("code", {"score": "share", "test_timeout_s": 1.5}, deadline_s=300)
    source = "def f(x):\n    while x: pass\n    return 1"
    tests = ["assert f(0) == 1", "assert f(1) == 1", "assert f(0) == 1"]
    scored = reward(Task("t1", (), None, {"tests": tests}), f"```\n{source}\n```")
    assert scored <= 2 / 3 and scored != 0.5
    hopeless = load_reward("code", {"test_timeout_s": 60}, deadline_s=1)
    assert hopeless(Task("t1", (), None, {"tests": ["assert f(1) == 1"] * 50}), f"```\n{source}\n```") == 0


def test_all_or_nothing_is_the_default_and_a_reply_without_a_whole_block_is_worth_nothing() -> None:
    reward = load_reward("code", {"test_timeout_s": 60}, deadline_s=300)
    task = Task("t1", (), None, {"tests": ADDS})
    good = "```python\ndef add(a, b): return a + b\n```"
    assert reward(task, good) == 1
    assert reward(task, "```\nbroken(\n```\nand better:\n" + good) == 1
    assert reward(task, "```python\ndef add(a, b): return 3\n```") == 0
    assert reward(task, "def add(a, b): return a + b") == 0
    assert reward(task, "```python\ndef add(a, b): return a + b") == 0


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({}, "the row has no tests in a column 'tests'"),
        ({"tests": [{"input": 1, "output": "2"}]}, "neither Python code nor"),
        ({"tests": ["def check(f):\n    assert f(1)"]}, "a test runs nothing"),
        ({"tests": ["import math"]}, "a test runs nothing"),
        ({"tests": ["assert f("]}, "a test is no Python"),
    ],
)
def test_rows_whose_tests_would_prove_nothing_are_errors_and_not_rewards(columns: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        load_reward("code")(Task("t1", (), None, columns), "```\nx = 1\n```")


def test_options_are_checked() -> None:
    from vime.rewards import RewardError

    with pytest.raises(RewardError, match="score = 'most'; it is all or share"):
        load_reward("code", {"score": "most"})
    with pytest.raises(RewardError, match="no option 'deadline_s'"):
        load_reward("code", {"deadline_s": 3})
