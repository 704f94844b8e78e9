"""Child processes on this machine: each supervised, with a log file, ended with us whatever happens to us."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import vime
from vime.cluster import supervise

_NOISE = re.compile(r"^\s*$|^\s+File |^\s*[\^~]+\s*$|DeprecationWarning|warnings\.warn|\bINFO\b")


class ProcessError(Exception):
    """A child process did not do what it was started for; the message holds the end of its log."""


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def python_path() -> str:
    """PYTHONPATH under which a child finds this package, and whatever we were given."""
    return os.pathsep.join(filter(None, [str(Path(vime.__file__).parents[1]), os.environ.get("PYTHONPATH")]))


def useful_lines(log: Path, count: int = 12) -> str:
    """The last lines of a log that say something: errors first, without frames of a traceback."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    telling = [line for line in lines if re.search(r"[Ee]rror|ERROR|[Ee]xception|refused|cannot|not found", line)]
    chosen = [line for line in (telling or lines) if not _NOISE.search(line)] or lines
    return "\n".join(f"  | {line[:300]}" for line in chosen[-count:]) or "  | (the log is empty)"


class Process:
    """One supervised child. ``name`` is for messages; output goes to ``log``; it gets the descriptors ``pass_fds``."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name, self.command, self.log = name, list(command), log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", supervise.__file__, *self.command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                pass_fds=pass_fds,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def check(self) -> None:
        """Raises ProcessError if the process has ended."""
        if self.exit_code is not None:
            raise ProcessError(
                f"{self.name} ended with exit code {self.exit_code}; the end of {self.log}:\n{useful_lines(self.log)}"
            )

    async def kill(self) -> None:
        """As ``stop``, but nobody is asked to end first: for what hangs."""
        if self._popen.stdin and not self._popen.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it has ended
                os.write(self._popen.stdin.fileno(), supervise.KILL)
        await self.stop()

    async def stop(self) -> None:
        """Ends the process and everything it started; returns when nothing is left."""
        if self._popen.stdin and not self._popen.stdin.closed:
            self._popen.stdin.close()
        deadline = time.monotonic() + 2 * supervise.GRACE_S + 5
        while self._popen.poll() is None:
            if time.monotonic() > deadline:  # the supervisor itself hangs; with it goes what it supervises
                self._popen.kill()
            await asyncio.sleep(0.02)
