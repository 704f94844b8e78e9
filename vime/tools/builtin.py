"""Built-in tools. Each maker takes its options and returns the function, and is a line in BUILTIN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from vime.sandbox.box import Limits, check, run


def python(
    *,
    memory_mb: int = 1024,
    processes: int = 16,
    files_mb: int = 32,
    output_kb: int = 64,
    sandbox: str = "bubblewrap",
    deadline_s: float,
) -> Callable[..., dict[str, Any]]:
    """Runs a Python program in a sandbox: ``{"stdout", "stderr", "exit_code", "cause"}``. ``cause`` says why it was ended,
    where it did not end by itself; then ``exit_code`` is None."""
    kind = check(sandbox)
    limits = Limits(0.8 * deadline_s, memory_mb, processes, files_mb)

    def tool(code: str, stdin: str = "") -> dict[str, Any]:
        return asdict(run(kind, limits, {"program.py": code, "stdin": stdin}, output_kb))

    return tool


BUILTIN: dict[str, Callable[..., Callable[..., Any]]] = {"python": python}
