"""Servers that run already are reached by URL; what they lack is found at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_config
from vime.inference.client import InferenceError, Server
from vime.inference.server import Fleet


def test_a_server_that_runs_already_is_used_by_its_url_and_left_running(
    run: Any, session: Any, fleets: Any, models: Any, tmp_path: Path
) -> None:
    running = fleets("tied").servers[0]
    config = make_config(models("tied"), inference={"urls": [running.url]}).model_copy(update={"vllm": {}})

    async def use() -> list[int]:
        fleet = Fleet(config, session, tmp_path)
        await fleet.start()
        completion = await fleet.servers[0].generate([1, 2, 3], {"max_tokens": 4, "ignore_eos": True}, 60, 0)
        await fleet.stop()
        return completion.token_ids

    assert len(run(use())) == 4
    assert run(running.healthy())


def test_a_server_without_the_needed_endpoints_is_refused_with_the_fix(run: Any, session: Any, fleets: Any) -> None:
    running = fleets("tied").servers[0]
    server = Server(running.url, session, 30)
    server.needed = ("/inference/v1/generate", "/no_such_endpoint")
    with pytest.raises(InferenceError, match="lacks /no_such_endpoint: start the server with VLLM_SERVER_DEV_MODE=1"):
        run(server.learn_paths())


def test_no_server_at_the_url_is_one_clear_message(run: Any, session: Any) -> None:
    with pytest.raises(InferenceError, match=r"GET http://127.0.0.1:9/openapi.json: .*Cannot connect"):
        run(Server("http://127.0.0.1:9", session, 30).learn_paths())
