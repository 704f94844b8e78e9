"""How many connections this process may have open."""

from __future__ import annotations

import resource
from typing import Literal

from vime.config.load import ConfigError

RESERVED = 256
"""Files that are open beside the connections of requests: logs, metrics, pipes of child processes, control calls."""


def connections_allowed(wanted: int | Literal["auto"]) -> int:
    """``rollout.concurrency`` as a number, after the limit of open files is raised as far as it may be.

    ConfigError where the limit is too low for it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 1 << 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed = hard - RESERVED
    if wanted != "auto" and wanted > allowed:
        raise ConfigError(
            f"rollout.concurrency = {wanted}: each request in flight is an open connection, and this process may open {hard} "
            f"files; raise its hard limit (ulimit -Hn) or set rollout.concurrency <= {allowed}"
        )
    return allowed if wanted == "auto" else wanted
