"""``trace.jsonl`` and ``vime trace``: what is recorded of a sample, and what the page makes of it."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.traces import synthetic
from vime.cli import main
from vime.config.sections import Config, Rollout
from vime.inference.client import Completion, InferenceError, RequestRefused, Server
from vime.inference.commands import server_command
from vime.inference.gate import Gate
from vime.inference.requests import Requests
from vime.observe import trace
from vime.observe.metrics import ObserveError
from vime.observe.timeline import Timeline, places, read_timeline, spent, step_rows, trainer_idle, window
from vime.observe.trace_page import data_of, write_trace
from vime.rollout.admission import Load
from vime.rollout.generate import Context, samples_of
from vime.sample import Sample, Task, VersionSpan

TASK = Task("row-7", ({"role": "user", "content": "2+2?"},))


def rows_of(folder: Path) -> list[list]:
    return [json.loads(line) for line in (folder / trace.TRACE).read_text().splitlines()]


def made(tokens: int = 3) -> Sample:
    return Sample([1, 2], [5] * tokens, [-1.0] * tokens, (VersionSpan(4, 0, tokens),), "stop", "4")


def written(folder: Path, rows: list[list]) -> Timeline:
    (folder / trace.TRACE).write_text("".join(json.dumps(row) + "\n" for row in [["run", 1e9, "0"], *rows]))
    return read_timeline(folder)


def life(number: int, group: str, start: float, end: float) -> list[list]:
    return [
        ["begin", number, start, group, 0, "t"],
        ["span", number, "generate", start, end, "a:1", 10, []],
        ["end", number, end, 2, 10, 0, 0, "stop", 1.0],
    ]


class Front(Server):
    """Answers without a network; the first ``failures`` requests fail."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__("http://a:1", None, 1)  # type: ignore[arg-type]
        self.failures = failures

    async def _call(self, method, url, timeout_s, body=None, headers=None, parse=None):  # type: ignore[no-untyped-def]
        await asyncio.sleep(0.01)
        if self.failures:
            self.failures -= 1
            raise RequestRefused("no")
        content = [{"logprob": -1.0, "token_id": 5}] * 3
        choice = {"token_ids": [5] * 3, "finish_reason": "stop", "logprobs": {"content": content}}
        metrics = {"queue_time_ms": 2.0, "time_to_first_token_ms": 3.0}
        return parse(json.dumps({"choices": [choice], "model": "b:2", "metrics": metrics}).encode())


def context(front: Front) -> Context:
    async def score(_: Context, task: Task, sample: Sample) -> tuple[float, dict[str, float]]:
        asked = trace.now()
        await asyncio.sleep(0.01)
        trace.note_call("reward", asked, asked + 0.004, "reward-worker-1")
        return 1.0, {}

    requests = Requests(front, Gate(usable=True), Rollout())
    return Context(requests, None, score, {"max_tokens": 8}, session_id="g3", number=2)


async def generate(context: Context, task: Task) -> Sample:
    completion: Completion = await context.requests.generate([1, 2], context.sampling, context.key)
    await asyncio.sleep(0.01)  # a tool
    again = await context.requests.generate([1, 2], context.sampling, context.key)
    assert again.token_ids == completion.token_ids
    return made()


def test_a_sample_is_recorded_with_its_requests_tools_and_rewards(tmp_path: Path) -> None:
    async def run() -> None:
        with trace.opened(tmp_path / trace.TRACE):
            await asyncio.gather(*(samples_of(context(Front()), TASK, generate) for _ in range(2)))

    asyncio.run(run())
    timeline = read_timeline(tmp_path)
    assert len(timeline.samples) == 2
    for one in timeline.samples:
        wanted = ["server queue", "prefill", "decode", "own", "server queue", "prefill", "decode"]
        found = [span.phase for span in one.spans if span.phase != "queue" and span.seconds > 0]
        assert found[: len(wanted)] == wanted
        assert found[len(wanted) : len(wanted) + 2] == ["reward queue", "reward"]
        assert (one.group, one.number, one.task, one.tokens, one.newest, one.reward) == ("g3", 2, "row-7", 3, 4, 1.0)
        assert one.server == "b:2"  # who answered behind the router
        assert one.end is not None and one.begin <= one.spans[0].start and one.spans[-1].phase in ("group", "reward")


def test_a_request_that_failed_and_the_sample_that_it_ended_are_recorded(tmp_path: Path) -> None:
    async def run() -> None:
        with trace.opened(tmp_path / trace.TRACE), pytest.raises(InferenceError):
            await samples_of(context(Front(failures=1)), TASK, generate)

    asyncio.run(run())
    (one,) = read_timeline(tmp_path).samples
    assert one.fault == "no"
    assert "failed" in [span.phase for span in one.spans]


def test_nothing_is_recorded_without_a_trace(tmp_path: Path) -> None:
    assert asyncio.run(samples_of(context(Front()), TASK, generate))[0].reward == 1.0
    assert not list(tmp_path.iterdir())


def test_requests_that_belong_to_no_sample_are_not_recorded(tmp_path: Path) -> None:
    async def run() -> None:
        with trace.opened(tmp_path / trace.TRACE):
            await Front().generate([1], {}, 5)

    asyncio.run(run())
    assert [row[0] for row in rows_of(tmp_path)] == ["run"]


def test_a_sample_waits_for_its_group_then_for_its_batch_then_for_the_step(tmp_path: Path) -> None:
    rows = [*life(1, "g0", 0.0, 2.0), *life(2, "g0", 0.0, 5.0), ["group", "g0", 0.0, 5.0, None]]
    rows += [["batch", 6.0, 3, ["g0"]], ["phase", "train", 2, 6.0, None], ["phase", "train", 2, 6.0, 8.0]]
    first, second = written(tmp_path, rows).samples
    assert [(span.phase, span.start, span.end) for span in first.spans] == [
        ("generate", 0.0, 2.0),
        ("group", 2.0, 5.0),
        ("batch", 5.0, 6.0),
        ("training", 6.0, 8.0),
    ]
    assert (first.step, first.staleness, second.seconds) == (3, 2, 5.0)


def test_a_filtered_group_waits_for_no_batch(tmp_path: Path) -> None:
    (one,) = written(tmp_path, [*life(1, "g0", 0, 2), ["group", "g0", 0, 2, "zero_variance"]]).samples
    assert one.step is None and "zero_variance" in one.finish
    assert {span.phase for span in one.spans} == {"generate", "group"}


def test_evaluations_belong_to_the_step_that_they_follow(tmp_path: Path) -> None:
    rows = [["phase", "eval", 4, 1.0, None], *life(1, "eval-test-0", 1.0, 2.0), ["phase", "eval", 4, 1.0, 3.0]]
    (one,) = written(tmp_path, rows).samples
    assert one.evaluation and one.step == 4 and one.staleness is None


def test_a_broken_run_shows_what_it_had_not_finished(tmp_path: Path) -> None:
    rows = [["begin", 1, 1.0, "g0", 0, "t"], ["span", 1, "queue", 1.0, 2.0, "", 0, []], *life(2, "g1", 0, 9.0)]
    written(tmp_path, [*rows, ["phase", "rollout", 0, 0.0, None]])
    with (tmp_path / trace.TRACE).open("a") as file:
        file.write('["span", 1, "gener')  # killed while it wrote
    timeline = read_timeline(tmp_path)
    assert timeline.samples[0].end is None and "not finished" in timeline.samples[0].fault
    assert timeline.samples[0].seconds == 8.0  # until the last that is known
    assert timeline.phases[0].end is None
    assert "not finished" in write_trace(tmp_path).read_text()


def test_a_resumed_run_goes_on_behind_the_part_before_and_counts_its_samples_anew(tmp_path: Path) -> None:
    rows = [*life(1, "g0", 0, 2), ["begin", 2, 3.0, "g1", 0, "t"], ["run", 2e9, "0"], *life(1, "g1", 0.5, 1.0)]
    timeline = written(tmp_path, rows)
    assert timeline.resumes == [5.0]
    assert [one.begin for one in timeline.samples] == [0, 3.0, 5.5]
    assert [bool(one.fault) for one in timeline.samples] == [False, True, False]


def test_a_resume_cuts_the_trace_to_its_checkpoint_and_does_without_one_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / trace.TRACE
    with trace.opened(path) as one:
        one.row("batch", 1.0, 1, [])
        length = one.offset()
        one.row("batch", 2.0, 2, [])
    assert path.stat().st_size > length
    trace.rewind(path, length)
    assert [row[0] for row in rows_of(tmp_path)] == ["run", "batch"]
    path.unlink()
    trace.rewind(path, length)


def test_quantiles_are_over_the_samples_that_were_in_the_phase(tmp_path: Path) -> None:
    rows = [row for n in range(100) for row in life(n + 1, f"g{n}", 0.0, n + 1.0)]
    timeline = written(tmp_path, rows)
    (row,) = [row for row in spent(timeline.samples) if row.phase == "generate"]
    assert (row.samples, row.p50, row.p90, row.p99, row.longest) == (100, 50, 90, 99, 100)
    assert row.total == 5050 and row.slowest.group == "g99"


def test_the_tail_of_a_step_is_what_passes_after_95_of_100_samples(tmp_path: Path) -> None:
    rows = [row for n in range(100) for row in life(n + 1, f"g{n}", 0.0, 90.0 if n == 99 else 1.0 + n / 100)]
    rows += [["group", f"g{n}", 0, 90.0 if n == 99 else 1.0 + n / 100, None] for n in range(100)]
    rows += [["batch", 90.0, 1, [f"g{n}" for n in range(100)]]]
    (row,) = step_rows(written(tmp_path, rows))
    assert row.samples == 100 and row.tail == pytest.approx(90 - 1.94) and row.slowest.group == "g99"


def test_idle_shares_of_servers_and_trainer(tmp_path: Path) -> None:
    rows = [["load", t, {"a:1": [t % 2, 0, 1.0 * t, 2.0 * t, 3.0 * t]}] for t in range(4)]
    rows += [
        ["phase", name, 0, *span] for name, a, b in (("rollout", 0, 6), ("train", 6, 8)) for span in ((a, None), (a, b))
    ]
    timeline = written(tmp_path, [*rows, *life(1, "g0", 0, 2)])
    (server,) = places(timeline, servers=True)
    assert (server.idle, server.running, server.phases, server.calls, server.tokens) == (0.5, 0.5, (3, 6, 9), 1, 10)
    assert trainer_idle(timeline) == 0.75


def test_loads_are_recorded_by_address(tmp_path: Path) -> None:
    with trace.opened(tmp_path / trace.TRACE):
        trace.loads({"http://a:1": Load(3, 1, 0.5, 0, 0, (1.0, 2.0, 3.0))})
    assert rows_of(tmp_path)[1][2] == {"a:1": [3, 1, 1.0, 2.0, 3.0]}


def test_a_page_of_ten_thousand_samples_holds_them_all(tmp_path: Path) -> None:
    text = write_trace(synthetic(tmp_path, 10_000)).read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])  # type: ignore[index]
    assert len(data["samples"]) >= 10_000
    assert all(0 <= one[0] <= one[1] <= one[15] <= data["end"] for one in data["samples"])
    assert all((len(one) - 16) % 4 == 0 for one in data["samples"])
    links = [int(number) for number in re.findall(r'href="#sample-(\d+)"', text)]
    assert len(links) > 50 and max(links) < len(data["samples"])
    slowest = max(data["samples"], key=lambda one: one[1] - one[0])
    assert data["samples"].index(slowest) in links
    assert "<b>engine</b>" not in text  # what a server said is no markup


def test_the_page_runs_its_own_script_alone(tmp_path: Path) -> None:
    text = write_trace(synthetic(tmp_path, 300)).read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy and "http" not in policy


def test_steps_choose_a_part_of_the_trace(tmp_path: Path) -> None:
    whole = read_timeline(synthetic(tmp_path, 1500))
    part = window(whole, 2, 3)
    assert part.steps() == [2, 3] and len(part.samples) < len(whole.samples)
    assert window(whole) is whole
    with pytest.raises(ObserveError, match="it has 0 to"):
        window(whole, 70, 71)


def test_a_long_trace_shows_its_newest_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_timeline(synthetic(tmp_path, 1500))
    monkeypatch.setattr("vime.observe.timeline.MOST_SAMPLES", 600)
    part = window(whole)
    assert part.steps()[-1] == whole.steps()[-1] and len(part.steps()) < len(whole.steps())


def test_the_command_names_the_page_and_refuses_a_folder_without_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synthetic(tmp_path / "run", 300)
    assert main(["trace", str(tmp_path / "run"), "--steps", "1"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "trace.html")
    assert main(["trace", str(tmp_path)]) == 2
    assert "log.trace" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "run"), "--steps", "a:b"]) == 2
    assert "such as 10:12" in capsys.readouterr().err


def test_an_empty_trace_makes_a_page(tmp_path: Path) -> None:
    assert data_of(written(tmp_path, []), 0.0)["samples"] == []
    assert "none yet" in write_trace(tmp_path).read_text()


def test_servers_of_ours_bear_their_address_and_are_asked_for_the_policy() -> None:
    config = Config.model_validate({"model": {"path": "m"}, "data": {"source": "x.jsonl"}})
    command = server_command(config, 4321, 0, [])
    at = command.index("--served-model-name")
    assert command[at + 1 : at + 3] == ["127.0.0.1:4321", "policy"] and command[at + 3].startswith("--")

    class Listed(Front):
        async def _call(self, method, url, timeout_s, **_):  # type: ignore[no-untyped-def]
            return {"data": [{"id": "127.0.0.1:4321"}, {"id": self.listed}]}

    server = Listed()
    server.timeout_s, server.listed = 1.0, "policy"  # type: ignore[attr-defined]
    assert asyncio.run(server.model_name()) == "policy"
    server.listed = "theirs"  # type: ignore[attr-defined]
    assert asyncio.run(server.model_name()) == "127.0.0.1:4321"
