"""Programs that nobody vouches for: what they can reach and use, and how they end."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import pytest

from vime.rewards import RewardError
from vime.rewards.load import load_reward
from vime.sandbox import box
from vime.sandbox.box import KINDS, Ended, Limits, run


def program(text: str, kind: Any = "bubblewrap", stdin: str = "", **limits: Any) -> Ended:
    return run(kind, Limits(**{"seconds": 60, **limits}), {"program.py": text, "stdin": stdin})


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_reads_its_input_and_ends_with_its_outputs_and_code(kind: str) -> None:
    text = "import sys\nprint(input() + '!')\nprint('bad', file=sys.stderr)\nsys.exit(3)"
    assert program(text, kind, "grüße\n") == Ended("grüße!\n", "bad\n", 3)
    assert program("print(__name__, __file__[-10:])\nimport jsonschema", kind).stdout == "__main__ program.py\n"


def test_python_is_found_where_it_lies_under_a_folder_that_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(folder, symlinks=True)
        monkeypatch.setattr(sys, "prefix", folder)
        monkeypatch.setattr(sys, "executable", f"{folder}/bin/python")
        assert program("import sys\nprint(sys.executable)").stdout == f"{folder}/bin/python\n"


def test_an_error_of_a_program_is_told_with_its_line() -> None:
    ended = program("x = 1\nx / 0")
    assert ended.exit_code == 1 and 'File "program.py", line 2' in ended.stderr and "ZeroDivisionError" in ended.stderr


def test_a_program_reads_no_file_of_ours_writes_none_and_sees_no_process(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    ours = [str(secret), str(Path(__file__)), "/etc/passwd", f"/proc/{os.getpid()}/cmdline"]
    text = f"""
import os
print([os.path.exists(path) for path in {ours!r}], [name for name in os.environ if "TOKEN" in name])
print(sum(name.isdigit() for name in os.listdir("/proc")) < 5)
for path in ("/x", "/box/x", "/dev/x", {str(tmp_path)!r} + "/x", os.__file__):
    try: open(path, "w").close(); print("wrote", path)
    except OSError: pass
open("/tmp/x", "w").close()
"""
    os.environ["VIME_TEST_TOKEN"] = "t"
    try:
        assert program(text) == Ended("[False, False, False, False] []\nTrue\n", "", 0)
    finally:
        del os.environ["VIME_TEST_TOKEN"]


def test_a_program_has_no_network() -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        connect = f"import socket\nsocket.create_connection({server.getsockname()!r}, 5)\nprint('connected')"
        assert "Error" in program(connect).stderr
        assert program(connect, "rlimits").stdout == "connected\n", "which is what rlimits cannot hinder"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("x = bytearray(200 * 2**20)", "MemoryError"),
        ("open('big', 'wb').write(b'x' * 9 * 2**20)", "OSError"),
        ("while True: print('x' * 100000)", "OSError"),
        ("import os\nwhile True: os.fork()", "had more than 4 processes"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_memory_files_output_and_processes_are_bounded(kind: str, text: str, fault: str) -> None:
    ended = program(text, kind, memory_mb=150, files_mb=8, processes=4)
    assert fault in ended.stderr + ended.cause and ended.exit_code != 0 and len(ended.stdout) <= 2**20


def test_many_files_are_bounded_together() -> None:
    text = "for i in range(20): open(f'/tmp/{i}', 'wb').write(b'x' * 2**20)"
    assert "No space left" in program(text, files_mb=8).stderr


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_does_not_end_is_ended_with_all_it_started_and_leaves_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(box.ENVIRONMENT, "MARK", str(tmp_path))
    text = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(600)"
    assert program(text, kind, seconds=0.5).cause == "took over 0.5 s"
    assert not list(tmp_path.iterdir())
    deadline = time.monotonic() + 60
    while alive := [path for path in Path("/proc").glob("[0-9]*/environ") if str(tmp_path).encode() in read(path)]:
        assert time.monotonic() < deadline, alive


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_where_no_namespaces_can_be_made_the_reward_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(box, "bwrap", lambda: str(broken))
    with pytest.raises(RewardError) as caught:
        load_reward("code")
    for part in ("No permissions to create new namespace", "user namespaces", 'sandbox = "rlimits"'):
        assert part in str(caught.value)
    assert load_reward("code", {"sandbox": "rlimits"})


def test_a_sandbox_of_another_name_is_refused() -> None:
    with pytest.raises(RewardError, match="sandbox = 'docker'; it is bubblewrap or rlimits"):
        load_reward("code", {"sandbox": "docker"})
