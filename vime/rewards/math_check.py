"""math-verify in child processes, which can be killed. A reply such as ``$9^{9^{9}}$`` makes one computation in C that
holds the interpreter's lock: in a thread it would freeze the whole driver, and neither math-verify's signal-based
time-outs (which also need the main thread) nor a deadline of ours would get a turn.

Wire: one JSON line each way. To the child ``{"answer": text, "response": text, "timeout_s": seconds}``, back
``{"equal": bool}`` or ``{"error": text}``.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from multiprocessing.connection import wait
from typing import Any

START_S = 60
"""deadline of a child's start: it imports sympy"""


class MathChecker:
    """Up to ``processes`` children, each started when first needed; safe to call from many threads."""

    def __init__(self, timeout_s: float, processes: int) -> None:
        self.timeout_s = timeout_s
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        for _ in range(processes):
            self._idle.put(None)  # a place, without a child yet

    def equal(self, answer: str, response: str) -> bool:
        """Whether math-verify finds them equal. TimeoutError after ``timeout_s``, ValueError for an unusable answer."""
        child = self._idle.get()
        try:
            if child is None or child.poll() is not None:
                child = None
                child = start()
            reply = ask(child, answer, response, self.timeout_s)
        except BaseException:
            if child is not None:
                end(child)
            child = None
            raise
        finally:
            self._idle.put(child)
        if "error" in reply:
            raise ValueError(reply["error"])
        return bool(reply["equal"])


def start() -> subprocess.Popen[bytes]:
    """A child that has said it is ready."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-m", "vime.rewards.math_check"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
    )
    try:
        receive(child, START_S)
    except BaseException:
        end(child)
        raise
    return child


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def ask(child: subprocess.Popen[bytes], answer: str, response: str, timeout_s: float) -> dict[str, Any]:
    assert child.stdin
    question = {"answer": answer, "response": response, "timeout_s": timeout_s}
    child.stdin.write(json.dumps(question).encode() + b"\n")
    child.stdin.flush()
    return receive(child, timeout_s)


def receive(child: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
    """The child's next line; TimeoutError, or RuntimeError where it is dead."""
    assert child.stdout
    if not wait([child.stdout.fileno()], timeout_s):
        raise TimeoutError(f"math-verify took over {timeout_s:g} s (option timeout_s); its process was ended")
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"the math-verify process ended with code {child.wait()}; its output is in this one's")
    return json.loads(line)


def check(answer: str, response: str) -> dict[str, Any]:
    """One comparison, in the child. An answer without ``$`` or a box is read as LaTeX as a whole."""
    from math_verify import parse, verify

    wanted = parse(answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}", parsing_timeout=0)
    if not wanted:
        return {"error": f"math-verify cannot read the answer {answer!r:.80}"}
    return {"equal": bool(verify(wanted, parse(response, parsing_timeout=0), timeout_seconds=0))}


def serve() -> None:
    """The child: questions from stdin until it is closed. Whatever else prints goes to stderr."""
    import logging
    import signal

    import math_verify  # noqa: F401  (its import is part of the start, not of the first question)

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the time-outs that the parent keeps
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt lets the driver end its step, which needs us
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        signal.alarm(int(question["timeout_s"]) + 5)  # unhandled, it ends this process even when the driver is gone
        try:
            reply = check(question["answer"], question["response"])
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.alarm(0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    serve()
