"""Which flags a server program knows, asked of the program itself, so that a misspelt one is refused before anything starts."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from vime.config.load import ConfigError
from vime.config.nearest import nearest
from vime.config.sections import Flag

HELP_TIMEOUT_S = 180


def installed_version(*distributions: str) -> str:
    """``name==version`` of the first of these distributions that is installed; ConfigError when none is."""
    for name in distributions:
        try:
            return f"{name}=={metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    raise ConfigError(
        f"none of {', '.join(distributions)} is installed; run `make setup`, or pip install {distributions[0]}"
    )


def known_flags(command: Sequence[str], version: str) -> list[str]:
    """Long flags in the program's help, without the dashes; kept in the user's cache for each version."""
    key = hashlib.sha256(f"{command} {version}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "vime", f"flags-{key}.json")
    if cache.exists():
        return json.loads(cache.read_text())
    result = subprocess.run(command, capture_output=True, text=True, timeout=HELP_TIMEOUT_S, check=False)
    flags = sorted(set(re.findall(r"(?<![\w-])--([a-z][a-z0-9.-]*[a-z0-9])", result.stdout)))
    if result.returncode or not flags:
        raise ConfigError(f"{' '.join(command)} did not list its flags:\n{result.stderr[-600:]}")
    cache.parent.mkdir(parents=True, exist_ok=True)
    draft = cache.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(flags))
    draft.rename(cache)
    return flags


def check_flags(section: str, given: Mapping[str, Flag], known: Sequence[str], ours: Mapping[str, str]) -> None:
    """Refuses an unknown flag with the nearest right one, and a flag that vime sets itself with its own option."""
    faults = []
    for name in given:
        flag = name.replace("_", "-")
        if flag in ours:
            faults.append(f"{section}.{name} is set by vime; use {ours[flag]}")
        elif flag not in known and flag.removeprefix("no-") not in known:
            faults.append(
                f"{section}.{name} is no flag of this program{nearest(flag, known)}"
                if len(known) < 40
                else f"{section}.{name} is no flag of this program{_did_you_mean(flag, known)}"
            )
    if faults:
        raise ConfigError("\n".join(faults))


def _did_you_mean(flag: str, known: Sequence[str]) -> str:
    hint = nearest(flag, known)
    return hint if "did you mean" in hint else "; see its --help"


def command_line(flags: Mapping[str, Flag]) -> list[str]:
    """``{"max-model-len": 512, "enforce-eager": True}`` as command-line words; False becomes ``--no-...``."""
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if value is True:
            words.append(f"--{flag}")
        elif value is False:
            words.append(f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", str(value)]
    return words
