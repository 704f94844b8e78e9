"""Child processes: none outlives its owner, its stop or its command; and what a log says of a failure."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vime.cluster import supervise
from vime.cluster.local import Process, ProcessError, free_port, useful_lines

DEADLINE_S = 15.0

# Writes its process id to a file of its own, then waits; with further names, starts a process for the next one first.
# A name that starts with "away" leaves session and group; one that starts with "deaf" ignores SIGTERM.
FAMILY = """
import os, signal, subprocess, sys, time
folder, name, *rest = sys.argv[1:]
if name.startswith("away"): os.setsid()
if name.startswith("deaf"): signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rest: subprocess.Popen([sys.executable, "-I", "-S", __file__, folder, *rest])
draft = os.path.join(folder, name + ".draft")
open(draft, "w").write(str(os.getpid()))
os.rename(draft, os.path.join(folder, name + ".pid"))
time.sleep(120)
"""

# Owns one supervised family, and waits to be killed.
OWNER = """
import sys, time
from pathlib import Path
from vime.cluster.local import Process
folder, *command = sys.argv[1:]
process = Process("family", command, Path(folder, "family.log"))
time.sleep(120)
"""


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """A process that runs; one that ended and only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # gone before the file is opened, or between that and reading it
        return False


class Family:
    """Processes that start one another in turn, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "family.py"
        self.script.write_text(FAMILY)
        self.pids: dict[str, int] = {}

    def command(self, *names: str) -> list[str]:
        return [sys.executable, "-I", "-S", str(self.script), str(self.folder), *names]

    def wait(self, *names: str) -> None:
        for name in names:
            file = self.folder / f"{name}.pid"
            eventually(file.exists, f"{name} starts")
            self.pids[name] = int(file.read_text())
        assert all(map(alive, self.pids.values()))

    def living(self) -> list[str]:
        return [name for name, pid in self.pids.items() if alive(pid)]


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    made = Family(tmp_path)
    yield made
    for name in made.living():
        with contextlib.suppress(ProcessLookupError):
            os.kill(made.pids[name], signal.SIGKILL)


@pytest.fixture
def short_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that waits half a second for SIGTERM to be heard."""
    source = Path(supervise.__file__).read_text()
    assert "GRACE_S = 10.0" in source
    copy = tmp_path / "supervise.py"
    copy.write_text(source.replace("GRACE_S = 10.0", "GRACE_S = 0.5"))
    monkeypatch.setattr(supervise, "__file__", str(copy))


def stop(process: Process) -> float:
    started = time.monotonic()
    asyncio.run(asyncio.wait_for(process.stop(), DEADLINE_S))
    return time.monotonic() - started


CHAINS = [("child", "grandchild"), ("child", "away1", "away2")]


@pytest.mark.parametrize("names", CHAINS, ids="-".join)
def test_all_descendants_end_when_the_owner_is_killed(family: Family, names: tuple[str, ...]) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(family.folder), *family.command(*names)])
    try:
        family.wait(*names)
    finally:
        owner.kill()
        owner.wait()
    eventually(lambda: not family.living(), "all end with their owner")


@pytest.mark.parametrize("names", CHAINS, ids="-".join)
def test_all_descendants_have_ended_when_stop_returns_and_at_once_where_they_listen(
    family: Family, names: tuple[str, ...]
) -> None:
    process = Process("family", family.command(*names), family.folder / "log")
    family.wait(*names)
    assert process.exit_code is None
    process.check()
    assert stop(process) < supervise.GRACE_S / 2
    assert family.living() == []


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize(
    "names", [("deaf child", "grandchild"), ("child", "deaf grandchild"), ("child", "away", "deaf")]
)
def test_who_does_not_hear_sigterm_is_killed_after_the_grace(family: Family, names: tuple[str, ...]) -> None:
    process = Process("family", family.command(*names), family.folder / "log")
    family.wait(*names)
    assert stop(process) >= 0.4
    assert family.living() == []


@pytest.mark.parametrize("names", CHAINS, ids="-".join)
def test_kill_asks_nobody_to_end_first_and_ends_even_those_that_are_stopped(
    family: Family, names: tuple[str, ...]
) -> None:
    process = Process("family", family.command(*names), family.folder / "log")
    family.wait(*names)
    os.kill(family.pids["child"], signal.SIGSTOP)
    started = time.monotonic()
    asyncio.run(asyncio.wait_for(process.kill(), DEADLINE_S))
    assert time.monotonic() - started < supervise.GRACE_S / 2
    assert family.living() == []
    asyncio.run(process.kill())


def test_a_supervisor_that_hangs_is_killed_and_its_command_with_it(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", -2.0)  # so that stop waits for 1 s, not for 25
    process = Process("family", family.command("child"), family.folder / "log")
    family.wait("child")
    process._popen.send_signal(signal.SIGSTOP)
    stop(process)
    eventually(lambda: not family.living(), "the command ends with its supervisor")


def test_a_descriptor_that_is_passed_on_reaches_the_command(tmp_path: Path) -> None:
    read, write = os.pipe()
    source = f"import os; os.write({write}, b'here')"
    process = Process("writer", [sys.executable, "-I", "-S", "-c", source], tmp_path / "log", pass_fds=[write])
    os.close(write)
    with open(read, "rb") as end:
        assert end.read() == b"here", "and the pipe ends with it"
    stop(process)


def test_what_a_command_leaves_behind_ends_with_it(family: Family) -> None:
    """A server that dies must not leave workers that hold its memory."""
    process = Process("family", family.command("child", "grandchild", "away"), family.folder / "log")
    family.wait("child", "grandchild", "away")
    os.kill(family.pids["child"], signal.SIGKILL)
    eventually(lambda: process.exit_code is not None, "the supervisor ends with its command")
    assert process.exit_code == 128 + signal.SIGKILL
    eventually(lambda: not family.living(), "nothing is left")


def test_the_command_ends_when_its_supervisor_is_killed(family: Family) -> None:
    process = Process("family", family.command("child"), family.folder / "log")
    family.wait("child")
    process._popen.kill()
    eventually(lambda: not family.living(), "the command ends with its supervisor")


def test_sigterm_to_the_supervisor_ends_the_family(family: Family) -> None:
    process = Process("family", family.command("child", "grandchild"), family.folder / "log")
    family.wait("child", "grandchild")
    process._popen.terminate()
    eventually(lambda: process.exit_code is not None, "the supervisor ends")
    assert process.exit_code == 143
    assert family.living() == []


def test_stop_may_be_called_twice_and_after_the_end(tmp_path: Path) -> None:
    process = Process("short", [sys.executable, "-I", "-S", "-c", "pass"], tmp_path / "log")
    stop(process)
    stop(process)


@pytest.mark.parametrize(("source", "code"), [("pass", 0), ("raise SystemExit(7)", 7), ("import os; os.abort()", 134)])
def test_the_exit_code_is_passed_through(tmp_path: Path, source: str, code: int) -> None:
    process = Process("short", [sys.executable, "-I", "-S", "-c", source], tmp_path / "log")
    eventually(lambda: process.exit_code is not None, "a short command ends")
    assert process.exit_code == code
    stop(process)


def test_a_process_that_ended_is_reported_with_name_code_and_its_error(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "server.log"
    source = "import os; print(os.environ['GREETING']); raise ValueError('the port is taken')"
    process = Process("server 0", [sys.executable, "-I", "-S", "-c", source], log, {"GREETING": "hello"})
    eventually(lambda: process.exit_code is not None, "a short command ends")
    with pytest.raises(ProcessError) as caught:
        process.check()
    text = str(caught.value)
    assert text.startswith(f"server 0 ended with exit code 1; the end of {log}:\n")
    assert text.endswith("  | ValueError: the port is taken")
    assert "hello" in log.read_text()
    stop(process)


def test_a_log_is_added_to_not_replaced(tmp_path: Path) -> None:
    for word in ("first", "second"):
        process = Process("echo", [sys.executable, "-I", "-S", "-c", f"print({word!r})"], tmp_path / "log")
        eventually(lambda process=process: process.exit_code is not None, "a short command ends")
    assert (tmp_path / "log").read_text() == "first\nsecond\n"


def test_a_free_port_is_one_nobody_listens_on() -> None:
    import socket

    with socket.create_server(("127.0.0.1", free_port())):
        pass


LOG = """\
INFO 10:00 starting
Traceback (most recent call last):
  File "/x/server.py", line 3, in main
    run()
    ^^^^^
INFO 10:01 no ERROR yet
RuntimeError: CUDA out of memory
INFO 10:02 shutting down
done
"""


def lines_of(tmp_path: Path, text: str, count: int = 12) -> list[str]:
    (tmp_path / "log").write_text(text)
    return useful_lines(tmp_path / "log", count).splitlines()


def test_the_useful_lines_of_a_log_with_an_error_are_its_error_lines(tmp_path: Path) -> None:
    assert lines_of(tmp_path, LOG) == ["  | RuntimeError: CUDA out of memory"]


def test_the_useful_lines_are_the_last_ones(tmp_path: Path) -> None:
    text = "".join(f"ValueError: {n}\n" for n in range(20))
    assert lines_of(tmp_path, text, 2) == ["  | ValueError: 18", "  | ValueError: 19"]


def test_a_log_without_errors_shows_its_end_and_one_of_noise_only_shows_that(tmp_path: Path) -> None:
    assert lines_of(tmp_path, "one\n\ntwo\n") == ["  | one", "  | two"]
    assert lines_of(tmp_path, "INFO one\nINFO two\n") == ["  | INFO one", "  | INFO two"]
    assert lines_of(tmp_path, "error " + "x" * 400) == ["  | error " + "x" * 294]


def test_an_empty_or_absent_log_is_said_to_be_empty(tmp_path: Path) -> None:
    assert lines_of(tmp_path, "") == ["  | (the log is empty)"]
    assert useful_lines(tmp_path / "none") == "  | (the log is empty)"
