"""Runs one command and never outlives, nor lets it outlive, the process that asked for it.

    python supervise.py COMMAND ...     standard input: a pipe whose other end the owner holds

The command gets a process group of its own, and the descriptors that the owner passed on. When the pipe closes (the owner
ended, even by ``kill -9``), on SIGTERM, or when the command ends, the whole group is ended: SIGTERM, then SIGKILL after
GRACE_S; SIGKILL at once when KILL comes through the pipe. Children that left the group are adopted (sub-reaper) and killed
too. If this process is itself killed, the kernel kills the command (parent-death signal). Standard library only: it must
start in milliseconds.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 10.0
KILL = b"k"
TERM_THEN_KILL = (signal.SIGTERM, signal.SIGKILL)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Living direct children of a process."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as listing:
            return [int(word) for word in listing.read().split()]
    except OSError:
        return []


def end_group(group: int, signals: tuple[int, ...] = TERM_THEN_KILL) -> None:
    """Each signal to the group and to our children, also those adopted meanwhile; the next to what is left after GRACE_S."""
    for sent in signals:
        try:
            os.killpg(group, sent)
        except ProcessLookupError:
            pass
        told: set[int] = set()
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            for pid in set(children(os.getpid())) - told:  # an adopted one may have children that left its group too
                told.add(pid)
                try:
                    os.kill(pid, sent)
                except ProcessLookupError:
                    pass
            try:
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            except ChildProcessError:
                return
            time.sleep(0.02)


def main() -> int:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    ended_read, ended_write = os.pipe()
    os.set_blocking(ended_write, False)
    signal.set_wakeup_fd(ended_write)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent, close_fds=False
    )
    code = None
    signals: tuple[int, ...] = TERM_THEN_KILL
    while code is None:
        ready, _, _ = select.select([0, ended_read], [], [])
        if ended_read in ready:
            numbers = os.read(ended_read, 64)
            if any(n != signal.SIGCHLD for n in numbers):
                break
            code = child.poll()
        if 0 in ready:
            if os.read(0, 1) == KILL:
                signals = (signal.SIGKILL,)
            break
    end_group(child.pid, signals)
    if code is None:
        return 143
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
