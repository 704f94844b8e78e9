"""User code in worker processes: however it fails, its own call fails, the others are answered and the driver goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_supervise import alive
from vime.cluster import supervise
from vime.workers import pool as pool_module
from vime.workers.dispatch import AHEAD, AT_ONCE, Call, Dispatch
from vime.workers.pool import Pool
from vime.workers.worker import CallError, CallLate, Function, WorkerError

# which call goes where


class World:
    """Workers of a dispatch in which some calls end their worker, and others are never done; the clock is ours."""

    def __init__(self, concurrent: bool, count: int, ends: set[int], hangs: set[int]) -> None:
        self.count = count
        self.dispatch: Dispatch[int] = Dispatch(concurrent)
        self.ends, self.hangs = ends, hangs
        self.now, self.workers = 0.0, 0
        self.answered: list[int] = []
        self.failed: list[int] = []

    def send(self) -> None:
        while found := self.dispatch.next(self.now):
            assert self.dispatch.desks[found[0]].sent[found[1].id] is found[1]
        live = [call.id for desk in self.dispatch.desks.values() for call in desk.sent.values() if not call.recalled]
        live += [call.id for call in self.dispatch.waiting]
        assert sorted(live + self.answered + self.failed) == list(range(self.count))
        for desk in self.dispatch.desks.values():
            assert len(desk.sent) <= (AT_ONCE if self.dispatch.concurrent else AHEAD)
            if self.dispatch.concurrent and desk.sent:
                assert len(desk.sent) <= min(call.beside for call in desk.sent.values())

    def running(self, worker: int) -> list[int]:
        calls = list(self.dispatch.desks[worker].sent)
        return calls if self.dispatch.concurrent else calls[:1]

    def step(self, worker: int) -> None:
        """What this worker does next: it ends, hangs until it is ended, or answers its first call."""
        running = self.running(worker)
        if fatal := [number for number in running if number in self.ends | self.hangs]:
            if not self.ends.intersection(fatal):
                self.now += 2.0
                assert fatal[0] in [call.id for _, call in self.dispatch.late(self.now)]
            self.failed += [call.id for call in self.dispatch.lost(worker)]
            self.workers += 1
            self.dispatch.open(self.workers)
        elif running:
            self.now += 0.001 if running[0] % 5 else 0.1
            self.dispatch.recall(self.now)
            if self.dispatch.done(worker, running[0], self.now):
                self.answered.append(running[0])


@given(
    st.booleans(),
    st.integers(1, 40),
    st.sets(st.integers(0, 39), max_size=3),
    st.sets(st.integers(0, 39), max_size=3),
    st.integers(1, 3),
    st.integers(0, 2),
    st.randoms(use_true_random=False),
)
def test_whatever_calls_do_to_their_workers_the_others_are_all_answered_and_each_ends_once(
    concurrent: bool, count: int, ends: set[int], hangs: set[int], workers: int, retries: int, chance: Any
) -> None:
    world = World(concurrent, count, ends, hangs)
    for world.workers in range(workers):
        world.dispatch.open(world.workers)
    for number in range(count):
        world.dispatch.waiting.append(Call(number, b"", 1.0, retries))
    for _ in range(10_000):
        world.send()
        busy = [worker for worker, desk in world.dispatch.desks.items() if desk.sent]
        if not busy:
            break
        world.step(chance.choice(busy))
    assert sorted(world.failed) == sorted((ends | hangs) & set(range(count)))
    assert sorted(world.answered + world.failed) == list(range(count))


def test_plain_calls_go_ahead_of_the_answers_only_as_far_as_they_are_short() -> None:
    dispatch: Dispatch[str] = Dispatch(concurrent=False)
    dispatch.open("a")
    dispatch.waiting.extend(Call(number, b"", 1.0, 0) for number in range(1000))

    def sent(seconds: float) -> int:
        now = 0.0
        while dispatch.next(now):
            pass
        for _ in range(40):
            now += seconds
            dispatch.done("a", next(iter(dispatch.desks["a"].sent)), now)
            while dispatch.next(now):
                pass
        return len(dispatch.desks["a"].sent)

    assert sent(1e-4) == AHEAD
    assert sent(0.2) == 1


def test_plain_calls_behind_one_that_turns_out_long_are_taken_back_for_another_worker() -> None:
    dispatch: Dispatch[str] = Dispatch(concurrent=False)
    dispatch.open("a")
    dispatch.desks["a"].mean_s = 1e-4
    calls = [Call(number, b"", 1.0, 0) for number in range(4)]
    dispatch.waiting.extend(calls)
    while dispatch.next(0.0):
        pass
    dispatch.recall(0.5)
    assert list(dispatch.waiting) == calls[1:]
    dispatch.open("b")
    assert dispatch.next(0.5) == ("b", calls[1])
    assert dispatch.done("a", 0, 0.9) is calls[0]
    assert dispatch.done("a", 1, 0.9) is None, "b answers it"
    assert dispatch.lost("a") == [] and list(dispatch.waiting) == calls[2:]
    assert dispatch.done("b", 1, 1.0) is calls[1]


def test_a_closed_worker_gets_no_more_calls_and_its_calls_come_first_again() -> None:
    dispatch: Dispatch[str] = Dispatch(concurrent=True)
    calls = [Call(number, b"", 1.0, 0) for number in range(4)]
    dispatch.open("a")
    dispatch.waiting.extend(calls[:2])
    while dispatch.next(0.0):
        pass
    dispatch.close("a")
    dispatch.waiting.extend(calls[2:])
    assert dispatch.next(0.0) is None
    assert dispatch.lost("a") == []
    assert list(dispatch.waiting) == calls


# real workers

FUNCTIONS = """
import asyncio, ctypes, os, signal, subprocess, sys, time
print("loaded")
kept = []

def echo(value): return value
def pid(_): return os.getpid()
def raises(value): raise KeyError(value)
def hangs(_):
    while True: time.sleep(0.1)
def hangs_in_c(_): return len(str(9 ** 9 ** 9))
def eats(_):
    got = []
    while True: got.append(bytearray(2 ** 24))
def keeps(mb):
    kept.append(bytearray(mb * 2 ** 20))
    return len(kept)
def calls_exit(_): sys.exit(3)
def ends(_): os._exit(3)
def ends_with(code): os._exit(code)
def segfaults(_): ctypes.string_at(0)
def prints(value):
    print("x" * 1000000)
    print("y" * 1000000, file=sys.stderr)
    return value
def garbage(_):
    os.write(int(sys.argv[1]), b'{"id": nonsense\\n')
    time.sleep(30)
def endless_line(_):
    while True: os.write(int(sys.argv[1]), b"x" * 65536)
def huge(_): return "x" * 2000000
def no_json(_): return object()
def unprintable(_):
    class Silent(Exception):
        def __str__(self): raise ValueError
    raise Silent
def starts_a_child(_): return subprocess.Popen(["sleep", "300"], start_new_session=True).pid
def once(path):
    if not os.path.exists(path):
        open(path, "w").close()
        os._exit(3)
    return "again"
def runs_a_loop(value): return asyncio.run(later(value))
async def later(value):
    await asyncio.sleep(0.01)
    return value
async def async_pid(_): return os.getpid()
def gives_a_coroutine(value): return later(value)
class Judge:
    async def __call__(self, value): return await later(value)
judge = Judge()
async def async_raises(value): raise KeyError(value)
async def async_hangs(_): await asyncio.sleep(300)
async def never_yields(_):
    while True: pass
async def stubborn(_):
    while True:
        try: await asyncio.sleep(300)
        except asyncio.CancelledError: pass
async def async_segfaults(_):
    await asyncio.sleep(0.02)
    ctypes.string_at(0)
async def async_eats(_):
    await asyncio.sleep(0.02)
    return eats(_)
async def async_exits(_): sys.exit(3)
async def meets(path):
    open(path, "a").write("x")
    while len(open(path).read()) < 50: await asyncio.sleep(0.01)
    return True
"""
NAMES = [line.split("(")[0].split()[-1] for line in FUNCTIONS.splitlines() if line.startswith(("def ", "async def "))]
MEMORY_MB = 300


def functions_of(file: Path, *names: str) -> dict[str, Function]:
    return {
        name: Function("vime.functions:user_function", {"path": f"{file}:{name}", "arguments": 1}) for name in names
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture(scope="module")
def pool(run: Any, file: Path) -> Iterator[Pool]:
    """Two workers for plain functions and two for coroutines."""
    made = Pool("test", functions_of(file, *NAMES, "judge"), 2, MEMORY_MB, file.parent / "logs")
    run(made.__aenter__())
    yield made
    run(made.__aexit__())


def failure(run: Any, pool: Pool, function: str, argument: Any = 0, deadline_s: float = 20, retries: int = 0) -> str:
    with pytest.raises(CallError) as caught:
        run(pool.call(function, [argument], deadline_s, retries))
    return str(caught.value)


ODD = [
    ("raises", "KeyError: 0"),
    ("calls_exit", "it called exit(3)"),
    ("ends", "its worker ended with exit code 3"),
    ("segfaults", "its worker was ended by SIGSEGV"),
    ("eats", f"MemoryError; it used all of its worker's memory_mb = {MEMORY_MB}"),
    ("garbage", "its worker said what is no answer"),
    ("endless_line", "its worker said what is no answer"),
    ("huge", "ValueError: its result has 20000"),
    ("no_json", "TypeError: Object of type object is not JSON serializable"),
    ("unprintable", "Silent"),
    ("async_raises", "KeyError: 0"),
    ("async_exits", "it called exit(3)"),
    ("async_segfaults", "its worker was ended by SIGSEGV"),
    ("async_eats", f"MemoryError; it used all of its worker's memory_mb = {MEMORY_MB}"),
]


@pytest.mark.parametrize(("function", "cause"), ODD, ids=[name for name, _ in ODD])
def test_a_call_that_fails_fails_alone_and_says_why(run: Any, pool: Pool, function: str, cause: str) -> None:
    good = "later" if "async" in function else "echo"

    async def beside_others() -> tuple[Any, list[Any]]:
        before = [asyncio.create_task(pool.call(good, [i], 20, 0)) for i in range(20)]
        bad = asyncio.create_task(pool.call(function, [0], 20, 0))
        after = [asyncio.create_task(pool.call(good, [i], 20, 0)) for i in range(20, 40)]
        return (await asyncio.gather(bad, return_exceptions=True))[0], await asyncio.gather(*before, *after)

    error, others = run(beside_others())
    assert isinstance(error, CallError) and str(error).startswith(cause)
    assert others == list(range(40))


CODES = [
    (1, "ended with exit code 1;"),
    (137, "was ended by SIGKILL;"),
    (160, "ended with exit code 160;"),
    (193, "ended with exit code 193;"),
    (255, "ended with exit code 255;"),
]


@pytest.mark.parametrize(("code", "cause"), CODES, ids=[str(code) for code, _ in CODES])
def test_a_worker_that_ends_with_whatever_code_is_replaced(
    run: Any, file: Path, pool: Pool, tmp_path: Path, code: int, cause: str
) -> None:
    async def ends() -> list[Any]:
        bad = [pool.call("ends_with", [code], 20, 0) for _ in range(2)]
        ended = await asyncio.wait_for(asyncio.gather(*bad, return_exceptions=True), 60)
        return [*ended, await asyncio.wait_for(pool.call("echo", [code], 20, 0), 60)]

    *errors, answer = run(ends())
    assert all(str(error).startswith(f"its worker {cause}") for error in errors) and answer == code
    (tmp_path / "ends.py").write_text(f"import os\nos._exit({code})")
    assert f"test-worker-0 {cause}" in refused(run, functions_of(tmp_path / "ends.py", "f"), tmp_path)


@pytest.mark.parametrize("place", ["keeper of a worker", "watch"])
def test_a_fault_of_the_pools_own_ends_all_calls_with_the_error(
    run: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fault(*_: Any) -> None:
        raise RuntimeError("unforeseen")

    async def faulty() -> list[Any]:
        async with Pool("test", functions_of(file, "ends", "hangs", "echo"), 2, MEMORY_MB, tmp_path) as pool:
            if place == "watch":
                monkeypatch.setattr(pool._dispatches["plain"], "recall", fault)
            else:
                monkeypatch.setattr(pool, "_lost", fault)
            calls = [pool.call(name, [0], 60, 0) for name in ("hangs", "ends")]
            ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
            return [*ended, *await asyncio.gather(pool.call("echo", [0], 20, 0), return_exceptions=True)]

    results = run(faulty())
    assert [str(result) for result in results] == ["the test workers cannot be kept: RuntimeError: unforeseen"] * 3


@pytest.mark.parametrize("function", ["hangs", "hangs_in_c", "async_hangs", "stubborn"])
def test_a_call_that_hangs_is_ended_at_its_deadline_while_others_are_answered(
    run: Any, pool: Pool, function: str
) -> None:
    good = "echo" if "hangs" in function[:5] else "later"

    async def beside_others() -> tuple[Any, list[Any]]:
        bad = asyncio.create_task(pool.call(function, [0], 1.5, 0))
        await asyncio.sleep(0.05)
        others = await asyncio.gather(*(pool.call(good, [i], 20, 0) for i in range(40)))
        return (await asyncio.gather(bad, return_exceptions=True))[0], others

    error, others = run(beside_others())
    assert isinstance(error, CallLate) and str(error) == "took over 1.5 s"
    assert others == list(range(40))


def test_a_coroutine_that_never_yields_is_found_among_those_beside_it(
    run: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "HEARD_S", 0.3)

    async def beside_others() -> list[Any]:
        calls = [pool.call("never_yields" if i == 20 else "later", [i], 0.5, 0) for i in range(40)]
        return await asyncio.gather(*calls, return_exceptions=True)

    results = run(beside_others())
    assert isinstance(results.pop(20), CallLate)
    assert results == [i for i in range(40) if i != 20]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("whose", "calls"), [("pid", "echo"), ("async_pid", "later")])
def test_calls_of_a_worker_that_is_killed_or_stopped_are_answered_by_another(
    run: Any, pool: Pool, sent: signal.Signals, whose: str, calls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "HEARD_S", 0.3)

    async def hit() -> tuple[list[Any], int]:
        begun = [asyncio.create_task(pool.call(calls, [i], 2, 2)) for i in range(2000)]
        process = await pool.call(whose, [0], 20, 2)
        os.kill(process, sent)
        results = await asyncio.gather(*begun, *(pool.call(calls, [i], 1, 2) for i in range(2000, 2100)))
        return results, process

    results, process = run(hit())
    assert results == list(range(2100))

    async def pids() -> set[int]:
        return set(await asyncio.gather(*(pool.call(whose, [0], 1, 2) for _ in range(50))))

    assert process not in run(pids())


def test_a_call_that_hangs_ends_in_time_even_where_the_supervisor_of_its_worker_hangs_too(
    run: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", -2.0)  # so that a supervisor is given up after 1 s, not after 25

    async def ended() -> list[Any]:
        async with Pool("test", functions_of(file, "pid", "hangs"), 1, MEMORY_MB, tmp_path) as pool:
            stopped = psutil.Process(await pool.call("pid", [0], 20, 0))
            stopped.parent().suspend()  # type: ignore[union-attr]
            hung = await asyncio.gather(pool.call("hangs", [0], 0.5, 0), return_exceptions=True)
            other = await pool.call("pid", [0], 20, 0)
            return [*hung, alive(stopped.pid), other == stopped.pid]

    late, running, same = run(ended())
    assert isinstance(late, CallLate) and not running and not same


def test_a_worker_whose_supervisor_is_killed_ends_with_it(run: Any, file: Path, tmp_path: Path) -> None:
    async def ended() -> list[Any]:
        async with Pool("test", functions_of(file, "pid", "hangs"), 1, MEMORY_MB, tmp_path) as pool:
            worker = psutil.Process(await pool.call("pid", [0], 20, 0))
            call = asyncio.create_task(pool.call("hangs", [0], 20, 0))
            await asyncio.sleep(0)
            worker.parent().kill()  # type: ignore[union-attr]
            return [
                *await asyncio.gather(call, return_exceptions=True),
                await pool.call("pid", [0], 20, 1) == worker.pid,
            ]

    error, same = run(ended())
    assert str(error).startswith("its worker was ended by SIGKILL") and not same


def test_arguments_that_are_no_json_are_refused(run: Any, pool: Pool) -> None:
    assert (
        failure(run, pool, "echo", {1, 2}) == "its arguments are no JSON: Object of type set is not JSON serializable"
    )


def test_a_call_whose_worker_ended_is_made_again_as_often_as_it_may(run: Any, pool: Pool, tmp_path: Path) -> None:
    assert "exit code 3" in failure(run, pool, "once", str(tmp_path / "a"), retries=0)
    assert run(pool.call("once", [str(tmp_path / "b")], 20, 1)) == "again"


def test_a_worker_that_fills_up_over_many_calls_is_replaced(run: Any, pool: Pool) -> None:
    kept = [run(pool.call("keeps", [60], 20, 1)) for _ in range(12)]
    assert max(kept) <= 5 and kept.count(1) >= 2


def test_what_functions_print_is_in_the_workers_logs_which_are_cut_short(
    run: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bytes_logged() -> int:
        return sum(log.stat().st_size for log in pool.logs.glob("test-worker-*.log"))

    assert run(pool.call("prints", ["done"], 20, 0)) == "done"
    assert bytes_logged() > 2_000_000
    monkeypatch.setattr(pool_module, "LOG_BYTES", 1_000_000)
    run(asyncio.sleep(0.3))
    assert bytes_logged() < 2_000_000


@pytest.mark.parametrize("function", ["runs_a_loop", "gives_a_coroutine", "judge"])
def test_a_plain_function_may_run_a_loop_or_give_a_coroutine_and_an_object_may_be_called(
    run: Any, pool: Pool, function: str
) -> None:
    assert run(pool.call(function, [{"a": [1, None, "ü\n"]}], 20, 0)) == {"a": [1, None, "ü\n"]}


def test_coroutines_run_side_by_side_in_one_worker(run: Any, pool: Pool, tmp_path: Path) -> None:
    async def all_of_them() -> list[bool]:
        return await asyncio.gather(*(pool.call("meets", [str(tmp_path / "met")], 20, 0) for _ in range(50)))

    assert all(run(all_of_them()))


def test_a_call_that_is_given_up_is_not_made_and_one_under_way_is_cancelled(run: Any, pool: Pool) -> None:
    async def given_up() -> list[int]:
        for function in ("hangs", "async_hangs"):
            calls = [asyncio.create_task(pool.call(function, [0], 0.5, 5)) for _ in range(600)]
            await asyncio.sleep(0.1)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        return await asyncio.gather(pool.call("echo", [1], 5, 1), pool.call("later", [2], 5, 1))

    assert run(given_up()) == [1, 2]


def test_ten_thousand_calls_that_wait_are_answered_in_order_and_do_not_hold_up_the_event_loop(
    run: Any, pool: Pool
) -> None:
    async def many() -> tuple[list[int], int]:
        calls = []
        for number in range(10_000):
            calls.append(asyncio.create_task(pool.call("echo", [number], 20, 0)))
            if number % 100 == 0:
                await asyncio.sleep(0)
        together, turns = asyncio.gather(*calls), 0
        while not together.done():
            turns += 1
            await asyncio.sleep(0)
        return await together, turns

    results, turns = run(many())
    assert results == list(range(10_000))
    assert turns > 50


@pytest.mark.parametrize("end", ["stop", "worker"])
def test_what_a_function_started_ends_with_its_worker(run: Any, file: Path, tmp_path: Path, end: str) -> None:
    async def start_and_end() -> int:
        async with Pool("test", functions_of(file, "starts_a_child", "ends"), 1, MEMORY_MB, tmp_path) as pool:
            child: int = await pool.call("starts_a_child", [0], 20, 0)
            assert Path(f"/proc/{child}").exists()
            if end == "worker":
                with pytest.raises(CallError):
                    await pool.call("ends", [0], 20, 0)
                assert not Path(f"/proc/{child}").exists()
        return child

    assert not Path(f"/proc/{run(start_and_end())}").exists()


OWNER = """
import asyncio, sys
from pathlib import Path
from vime.workers.pool import Pool
from vime.workers.worker import Function

async def main(file, logs):
    names = ("pid", "async_pid", "hangs", "starts_a_child")
    functions = {n: Function("vime.functions:user_function", {"path": f"{file}:{n}", "arguments": 1}) for n in names}
    async with Pool("test", functions, 1, 300, Path(logs)) as pool:
        print(*[await pool.call(name, [0], 20, 0) for name in ("pid", "async_pid", "starts_a_child")], flush=True)
        await pool.call("hangs", [0], 300, 0)

asyncio.run(main(*sys.argv[1:]))
"""


def test_workers_end_with_a_driver_that_is_killed_in_the_middle_of_a_call(file: Path, tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, file, tmp_path], stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    with owner.stdout:
        pids = list(map(int, owner.stdout.readline().split()))
        assert len(pids) == 3 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        owner.kill()
        owner.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived its driver"
        time.sleep(0.05)


def refused(run: Any, functions: dict[str, Function], logs: Path, memory_mb: int = MEMORY_MB) -> str:
    with pytest.raises(WorkerError) as caught:
        run(Pool("test", functions, 1, memory_mb, logs).__aenter__())
    return str(caught.value)


def test_a_function_that_cannot_be_loaded_is_refused_at_the_start(run: Any, file: Path, tmp_path: Path) -> None:
    assert "has no 'ecko'; did you mean echo?" in refused(run, functions_of(file, "ecko"), tmp_path)
    (tmp_path / "ends.py").write_text("import os\nprint('an error: no key', flush=True)\nos._exit(3)")
    text = refused(run, functions_of(tmp_path / "ends.py", "f"), tmp_path)
    assert "test-worker-0 ended with exit code 3; the end of" in text and "an error: no key" in text
    large = {"large": Function("builtins:bytearray", {"source": 2**30})}
    assert refused(run, large, tmp_path) == f"memory_mb = {MEMORY_MB} is too little to load large; raise it"


def test_when_no_worker_can_be_started_any_more_all_calls_end_with_the_cause(
    run: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "STARTS", 1)
    changed = tmp_path / "functions.py"
    changed.write_text(FUNCTIONS)

    async def broken() -> list[Any]:
        async with Pool("test", functions_of(changed, "ends", "echo"), 1, MEMORY_MB, tmp_path) as pool:
            changed.write_text("1 / 0")
            calls = [pool.call("ends", [0], 20, 9), *(pool.call("echo", [0], 20, 0) for _ in range(100))]
            results = await asyncio.gather(*calls, return_exceptions=True)
            return [*results, *await asyncio.gather(pool.call("echo", [0], 20, 0), return_exceptions=True)]

    results = run(broken())
    assert len(results) == 102 and all("ZeroDivisionError" in str(result) for result in results)
