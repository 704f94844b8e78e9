"""Servers that run already are reached by URL; what they lack is found at the start."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_config
from vime.cli import main
from vime.cluster import supervise
from vime.inference.client import InferenceError, Server
from vime.inference.fleet import Fleet
from vime.inference.life import Answer
from vime.inference.requests import Requests
from vime.inference.roster import Roster, Wish, wish


def test_a_server_that_runs_already_is_used_by_its_url_and_left_running(
    run: Any, session: Any, fleets: Any, models: Any, tmp_path: Path
) -> None:
    running = fleets("tied").servers[0]
    config = make_config(models("tied"), inference={"urls": [running.url]}).model_copy(update={"vllm": {}})

    async def use() -> list[int]:
        fleet = Fleet(config, session, tmp_path)
        await fleet.start()
        completion = await fleet.servers[0].generate([1, 2, 3], {"max_tokens": 4, "ignore_eos": True}, 60)
        await fleet.stop()
        return completion.token_ids

    assert len(run(use())) == 4
    assert run(running.answer()) is Answer.YES


def below(pid: int) -> list[int]:
    own = supervise.children(pid)
    return own + [pid for child in own for pid in below(child)]


def test_processes_of_a_server_may_use_every_core(run: Any, fleets: Any) -> None:
    """vLLM's own binding puts the main thread of each server's worker, and all that it starts, on the first core."""
    (member,) = fleets("tied").members
    run(member.server.generate([1, 2, 3], {"max_tokens": 4, "ignore_eos": True}, 60))
    processes = below(member.process._popen.pid)
    assert len(processes) >= 3  # API server, engine, worker
    assert {frozenset(os.sched_getaffinity(pid)) for pid in processes} == {frozenset(os.sched_getaffinity(0))}


def test_with_a_second_server_requests_go_through_a_router(
    run: Any, session: Any, fleets: Any, models: Any, tmp_path: Path
) -> None:
    """Also while the second does not answer; and the last that is left cannot be removed."""
    running, roster = fleets("tied").servers[0], Roster(tmp_path)
    config = make_config(models("tied"), inference={"urls": [running.url]}).model_copy(update={"vllm": {}})
    fleet = Fleet(config, session, tmp_path, roster)

    async def wished(*words: str) -> str:
        return await asyncio.to_thread(wish, tmp_path, Wish(*words))  # type: ignore[arg-type]

    async def use() -> None:
        requests = Requests(fleet.front, fleet.gate, config.rollout)
        await fleet.start()
        async with fleet.watched(fleet.admit):
            while not roster.listing.exists():
                await asyncio.sleep(0.05)
            assert "is the only one left" in await wished("remove", running.url)
            await wished("add", "http://127.0.0.1:9")
            assert fleet.router and fleet.front.url == fleet.router.url
            assert (await requests.generate([1, 2, 3], {"max_tokens": 4, "ignore_eos": True})).token_ids
            assert "is removed" in await wished("remove", "http://127.0.0.1:9")
        await fleet.stop()
        roster.close()

    run(asyncio.wait_for(use(), 120))
    assert not list(tmp_path.glob("servers.*"))


def test_a_run_that_does_not_go_on_lists_no_servers(tmp_path: Path, capsys: Any) -> None:
    assert main(["servers", str(tmp_path)]) == 2
    assert "no training run goes on there" in capsys.readouterr().err


def test_a_deterministic_run_takes_no_server_more(run: Any, session: Any, models: Any, tmp_path: Path) -> None:
    fleet = Fleet(make_config(models("tied"), run={"deterministic": True}), session, tmp_path)
    assert "run.deterministic needs one server" in run(fleet._add("http://127.0.0.1:9")) and not fleet.members


def test_a_server_without_the_needed_endpoints_is_refused_with_the_fix(run: Any, session: Any, fleets: Any) -> None:
    running = fleets("tied").servers[0]
    server = Server(running.url, session, 30)
    server.needed = ("/inference/v1/generate", "/no_such_endpoint")
    with pytest.raises(InferenceError, match="lacks /no_such_endpoint: start the server with VLLM_SERVER_DEV_MODE=1"):
        run(server.learn_paths())


def test_no_server_at_the_url_is_one_clear_message(run: Any, session: Any) -> None:
    with pytest.raises(InferenceError, match=r"GET http://127.0.0.1:9/openapi.json: .*Cannot connect"):
        run(Server("http://127.0.0.1:9", session, 30).learn_paths())
