"""Functions written for slime in the driver: what they are given, what becomes of what they return."""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny import make_config
from vime.config.load import ConfigError, dump, impossible, load
from vime.config.sections import Config
from vime.config.slime import Slime
from vime.contract import inputs
from vime.data.cursor import PromptCursor
from vime.data.journal import Journal, account
from vime.data.orders import Epochs
from vime.functions import FunctionError
from vime.job import check_functions
from vime.loop import plan_updates
from vime.rollout.evaluate import evaluate
from vime.rollout.outcome import Outcome
from vime.rollout.scheduler import RolloutError
from vime.sample import Task, VersionSpan
from vime.slime.args import COMPUTED, Args
from vime.slime.batch import collected
from vime.slime.calls import HookError
from vime.slime.driver import Hooks
from vime.slime.flags import OPTIONS
from vime.slime.hooks import HOOKS, load_function, wrong_hooks
from vime.slime.parts import make_scheduler, with_source
from vime.slime.rollout import evaluated_by
from vime.slime.sample import Sample, SampleError, from_native, to_native
from vime.slime.sources import PromptSource
from vime.store.shared_memory import SharedMemoryStore

slime_hooks: Any = importlib.import_module(load_function("tests.slime_hooks.tag").__module__)
HERE = "tests.slime_hooks."
TASKS = [Task(f"t{i}", ({"role": "user", "content": f"{i} + {i}?"},), "4", {"n": i}) for i in range(5)]


class Run:
    """A job without servers and trainer: the server says always the same."""

    def __init__(self, folder: Path, slime: dict[str, Any], **sections: Any) -> None:
        rollout = {"groups": 2, "samples_per_group": 4, "max_tokens": 32, **sections.pop("rollout", {})}
        run = {"steps": 9, "dir": str(folder / "run")}
        reward = {"workers": 1, **sections.pop("reward", {})}
        self.config = make_config(folder, rollout=rollout, run=run, reward=reward, slime=slime, **sections)
        assert not [fault for fault in impossible(self.config) if "config.json" not in fault]
        check_functions(self.config)
        self.folder = folder
        self.hooks = Hooks(self.config, folder / "logs")
        self.context = inputs.context(self.config, self.hooks)
        self.cursor = with_source(PromptCursor(TASKS, 0), self.config, self.hooks)
        self.journal, self.store = Journal(folder / "journal.jsonl"), SharedMemoryStore(folder / "store")
        self.job: Any = SimpleNamespace(
            config=self.config,
            context=self.context,
            cursor=self.cursor,
            journal=self.journal,
            store=self.store,
            step=0,
            metrics={},
            unsent=(),
            eval_tasks={"few": TASKS[:2]},
        )
        self.job.scheduler = make_scheduler(self.job)

    @property
    def version(self) -> int:
        return self.context.requests.front.version

    def batch(self, steps: int = 1) -> list[Outcome]:
        """The last of so many batches, as it would be trained."""

        async def made() -> list[Outcome]:
            async with self.hooks:
                for _ in range(steps):
                    self.context.requests.front.version += 1
                    batch = await asyncio.wait_for(self.job.scheduler.collect(), 60)
                    batch = await collected(self.hooks, self.job, batch)
                    self.journal.offset()
                    if _ < steps - 1:
                        self.job.scheduler.trained(batch, self.version)
                return batch

        return asyncio.run(made())

    def kept(self, batch: list[Outcome]) -> list[Outcome]:
        return [outcome for outcome in batch if outcome.filtered is None]


def hook(**paths: Any) -> dict[str, Any]:
    return {
        name: HERE + value if isinstance(value, str) and name.endswith("_path") and "." not in value else value
        for name, value in paths.items()
    }


# Samples and args


def test_a_sample_goes_there_and_back_whole() -> None:
    for made in inputs.group(0, [1.0, 0.0, None, 0.5]).samples:
        sample = from_native(inputs.TASK, "What?", 7, 29, made)
        assert sample.tokens == made.prompt_ids + made.response_ids and sample.label == "4" and sample.index == 29
        assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample
        back = to_native(sample, 9)
        assert (back.prompt_ids, back.response_ids, back.loss_mask) == (
            made.prompt_ids,
            made.response_ids,
            made.loss_mask,
        )
        assert (
            back.versions == made.versions and back.reward == made.reward and back.finish_reason == made.finish_reason
        )


def test_tokens_that_no_span_tells_of_count_as_those_of_the_served_version() -> None:
    sample = Sample(
        tokens=[1, *range(9)], response_length=9, rollout_log_probs=[0.0] * 9, status=Sample.Status.COMPLETED
    )
    sample.spans = [VersionSpan(7, 2, 4), VersionSpan(8, 6, 7)]
    spans = to_native(sample, 5).versions
    assert [(s.version, s.start, s.end) for s in spans] == [(5, 0, 2), (7, 2, 4), (5, 4, 6), (8, 6, 7), (5, 7, 9)]


def test_a_removed_sample_is_not_trained_and_one_that_failed_is_refused() -> None:
    sample = Sample(tokens=[1, 2], response_length=1, status=Sample.Status.COMPLETED, remove_sample=True)
    assert to_native(sample, 0).loss_mask == [0]
    with pytest.raises(SampleError, match="status is Status.FAILED"):
        to_native(Sample(tokens=[1, 2], response_length=1, status=Sample.Status.FAILED), 0)


def test_appended_tokens_keep_masks_and_logprobs_in_step() -> None:
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[2, 3], log_probs=[-1.0, -2.0], text="a")
    sample.append_response_tokens(tokens=[4], trainable=False, text="b")
    sample.append_response_tokens(tokens=[5], log_probs=[-3.0], meta_info={"finish_reason": {"type": "length"}})
    assert (sample.response, sample.response_length, sample.loss_mask) == ("ab", 4, [1, 1, 0, 1])
    assert sample.rollout_log_probs == [-1.0, -2.0, 0.0, -3.0] and sample.status is Sample.Status.TRUNCATED
    assert sample.effective_response_length == 3
    with pytest.raises(ValueError, match="2 tokens that are to be trained come with none"):
        sample.append_response_tokens(tokens=[1, 2])


def test_args_answer_to_both_names_and_say_what_they_do_not_know(tmp_path: Path) -> None:
    config = make_config(tmp_path, slime={"args": {"tool": "t"}}, rollout={"groups": 6, "samples_per_group": 2})
    args = Args(config, "http://10.0.0.1:8000")
    assert args.rollout_batch_size == args.rollout.groups == 6 and args.global_batch_size == 12 and args.tool == "t"
    assert (args.vllm_router_ip, args.sglang_router_port) == ("10.0.0.1", 8000)
    assert args.eps_clip == 0.2 and args.use_tis is False and args.custom_rm_path is None
    assert getattr(args, "nothing_such", 5) == 5 and copy.copy(args).rollout_batch_size == 6
    with pytest.raises(AttributeError, match=r"did you mean rollout_batch_size\?"):
        _ = args.rollout_batchsize
    with pytest.raises(AttributeError, match=r"read-only.*\[slime\.args\]"):
        args.rollout_batch_size = 3
    for name in (*OPTIONS, *COMPUTED, *Slime.model_fields):
        if name != "args":
            getattr(args, name)


# Found before a run


def test_functions_that_cannot_be_called_are_named_before_anything_starts(tmp_path: Path) -> None:
    slime = {
        "custom_generate_function_path": "tests.slime_hooks.plain_generate",
        "dynamic_sampling_filter_path": "tests.slime_hooks:not_all_eqal",
        "data_source_path": "tests.slime_hooks.Sourceless",
        "custom_tis_function_path": "tests.slime_hooks.rm",
    }
    faults = wrong_hooks(make_config(tmp_path, slime=slime))
    assert len(faults) == 4
    for fault, said in zip(
        faults,
        ["is a plain function", "did you mean not_all_equal?", "no method add_samples", "is an async function"],
        strict=True,
    ):
        assert fault.startswith("slime.") and said in fault
    with pytest.raises(ConfigError, match="slime.custom_generate_function_path"):
        check_functions(make_config(tmp_path, slime=slime))


def test_paths_are_dotted_or_with_a_colon_or_of_a_file() -> None:
    assert load_function("tests.slime_hooks.tag") is load_function("tests.slime_hooks:tag") is slime_hooks.tag
    assert load_function(f"{slime_hooks.__file__}:tag").__name__ == "tag"
    for path in ("tag", "hooks.py"):
        with pytest.raises(FunctionError, match="names no function"):
            load_function(path)


IMPOSSIBLE = [
    ({"custom_generate_function_path": "a.b"}, {"rollout": {"generate": "c:d"}}, "remove one of them"),
    ({"group_rm": True}, {}, "needs slime.custom_rm_path"),
    ({"custom_rm_path": "a.b"}, {"reward": {"function": "exact"}}, "stands instead of [reward]"),
    ({"custom_reward_post_process_path": "a.b"}, {}, 'set algorithm.advantage = "reward"'),
    ({"buffer_filter_path": "a.b"}, {"rollout": {"max_staleness": 1}}, 'set rollout.stale = "drop" or "mask"'),
    ({"rollout_function_path": "a.b", "dynamic_sampling_filter_path": "a.b"}, {}, "chooses its groups itself"),
    ({"custom_tis_function_path": "a.b"}, {"algorithm": {"corrections": {"tis": {}}}}, "both correct"),
    ({"custom_loss_function_path": "a.b"}, {"trainer": {"ranks": 2, "tensor_parallel": 2}}, "set both to 1"),
    ({"custom_loss_function_path": "a.b"}, {"algorithm": {"router_aux_coef": 0.1}}, "set it to 0"),
    ({"eval_function_path": "a.b"}, {}, "add an [eval.sets.NAME]"),
]


@pytest.mark.parametrize(("slime", "sections", "said"), IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_what_cannot_work_is_refused_with_its_fix(slime: Any, sections: Any, said: str, tmp_path: Path) -> None:
    faults = impossible(make_config(tmp_path, slime=slime, **sections))
    assert [fault for fault in faults if said in fault and "slime." in fault]


def test_an_option_of_slimes_that_is_none_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[model]\npath="m"\n[data]\nsource="x"\n[slime]\ncustom_rm_pth="a.b"\n')
    with pytest.raises(ConfigError, match="did you mean custom_rm_path"):
        load(tmp_path / "c.toml")


def test_every_hook_is_an_option_and_every_option_of_a_function_a_hook() -> None:
    paths = {name for name in Slime.model_fields if name.endswith("_path")}
    assert {one.option for one in HOOKS.values()} == paths


# In the driver


def test_a_generate_function_of_two_turns_is_trained_on_what_the_policy_said(tmp_path: Path) -> None:
    run = Run(tmp_path, hook(custom_generate_function_path="two_turns"))
    batch = run.batch()
    payload = run.store.get(batch[0].rows[0].key, 0)
    told = len(payload.loss_mask) - int(payload.loss_mask.sum())
    assert told == len(inputs.tokenizer().encode("<|end|><|user|>Sure?<|end|><|assistant|>"))
    assert batch[0].log_rows[0]["metadata"] == {"turns": 2}, "the task's own metadata is not repeated"
    assert batch[0].versions[0][0].version == run.version


def test_a_group_whose_function_asks_the_servers_itself_is_as_old_as_its_call(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "async def f(args, sample, sampling_params):\n"
        "    sample.tokens = [1, 2]\n"
        "    sample.append_response_tokens(tokens=[5], log_probs=[-1.0], text='x')\n"
        "    sample.status = sample.Status.COMPLETED\n"
        "    return sample\n"
    )
    run = Run(tmp_path, {"custom_generate_function_path": f"{tmp_path}/own.py:f"})
    run.context.requests.front.version = 4
    requests = run.context.requests.of_group()

    async def generate() -> None:
        async with run.hooks:
            await run.hooks.generate(replace(run.context, requests=requests), TASKS[0])

    asyncio.run(generate())
    assert requests.begun == 4


def test_samples_of_one_call_are_one_rollout_and_keep_their_rewards(tmp_path: Path) -> None:
    batch = Run(tmp_path, hook(custom_generate_function_path="split")).batch()
    assert [row.rollout for row in batch[0].rows] == [0, 0, 1, 1, 2, 2, 3, 3] and set(batch[0].rewards) == {0.25}
    assert batch[0].log_rows[0]["metadata"] == {"evaluation": False}


def test_a_sample_that_cannot_be_trained_fails_alone_with_its_reason(tmp_path: Path) -> None:
    run = Run(tmp_path, hook(custom_generate_function_path="short_mask"))
    with pytest.raises(RolloutError, match=r"loss_mask has 8 entries for response_length = 9.*on task t"):
        run.batch()
    assert account(tmp_path / "journal.jsonl")["twice"] == []


def test_sample_hooks_go_one_after_the_other_before_the_reward(tmp_path: Path) -> None:
    run = Run(tmp_path, hook(rollout_sample_hook_path=[HERE + "tag", HERE + "shout", HERE + "tag"]))
    row = run.batch()[0].log_rows[0]
    assert row["metadata"] == {"tags": [run.version, run.version]} and row["response"] == inputs.REPLY.upper()


def test_rewards_come_from_workers_with_args_and_the_whole_sample(tmp_path: Path) -> None:
    run = Run(tmp_path, hook(custom_rm_path="tests.slime_rewards.rm", reward_key="score", args={"scale": 3.0}))
    batch = run.batch()
    assert set(batch[0].rewards) == {3.0} and batch[0].log_rows[0]["reward_parts"] == {"length": 9.0}


def test_a_groups_rewards_come_from_one_call(tmp_path: Path) -> None:
    assert set(
        Run(tmp_path, hook(custom_rm_path="tests.slime_rewards.group_rm", group_rm=True)).batch()[0].rewards
    ) == {1.0}


def test_a_group_whose_rewards_fail_ends_as_failed(tmp_path: Path) -> None:
    run = Run(tmp_path, hook(custom_rm_path="tests.slime_rewards.short_group_rm", group_rm=True))
    with pytest.raises(RolloutError, match="it returned 1 rewards for 4 samples"):
        run.batch()


def test_a_dynamic_filter_drops_with_its_reason_and_others_are_made(tmp_path: Path) -> None:
    run = Run(tmp_path, hook(dynamic_sampling_filter_path="not_all_equal"), rollout={"max_refills": 1})
    batch = run.batch()
    assert {outcome.filtered for outcome in batch} == {"all_equal"} and len(batch) > 2
    assert account(tmp_path / "journal.jsonl")["filtered"] == {"all_equal": len(batch)}


def test_a_buffer_filter_chooses_which_ready_groups_are_trained(tmp_path: Path) -> None:
    rollout = {"max_staleness": 1, "stale": "drop"}
    run = Run(tmp_path, hook(buffer_filter_path="newest_first"), rollout=rollout)

    async def ready() -> list[int]:
        run.context.requests.front.version = 0
        first = await run.job.scheduler.collect()
        run.job.scheduler.trained(first, 1)
        run.context.requests.front.version = 1
        while run.job.scheduler.running:
            await asyncio.sleep(0.01)
        held = sorted(run.job.scheduler.ready)
        second = await run.job.scheduler.collect()
        assert [outcome.group_id for outcome in second if not outcome.filtered] == held[-2:]
        await run.job.scheduler.close()
        return held

    assert len(asyncio.run(ready())) >= 2


def test_removed_samples_count_in_the_group_and_are_not_trained(tmp_path: Path) -> None:
    run = Run(tmp_path, hook(rollout_sample_filter_path="no_truncated", args={"longest": 6}))
    batch = run.batch()
    assert [row.trained_tokens for row in batch[0].rows] == [0] * 4
    assert not run.store.get(batch[0].rows[0].key, 0).loss_mask.any()


def test_all_samples_are_seen_with_the_groups_that_were_filtered(tmp_path: Path) -> None:
    slime_hooks.CALLS.clear()
    hooks = hook(rollout_all_samples_process_path="count_all", dynamic_sampling_filter_path="not_all_equal")
    batch = Run(tmp_path, hooks, rollout={"max_refills": 0}).batch()
    assert [("all", [4] * len(batch), len(TASKS))] == slime_hooks.CALLS


def test_post_processed_rewards_are_the_advantages_and_the_raw_ones_are_logged(tmp_path: Path) -> None:
    hooks = hook(custom_reward_post_process_path="centred", custom_generate_function_path="split")
    run = Run(tmp_path, hooks, algorithm={"advantage": "reward"})
    batch = run.batch()
    assert {row.reward for row in batch[0].rows} == {0.0} and set(batch[0].rewards) == {0.25}


def test_converted_samples_are_trained_instead(tmp_path: Path) -> None:
    hooks = hook(custom_convert_samples_to_train_data_path="first_half", custom_generate_function_path="two_turns")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    run = Run(tmp_path, hooks, algorithm={"advantage": "reward"})
    batch = run.batch()
    assert [len(outcome.rows) for outcome in batch] == [2, 2]
    row = batch[0].rows[1]
    assert row.trained_tokens == row.response_tokens == len(run.store.get(row.key, 1).response_ids)
    assert row.reward == 2 * batch[0].rewards[1] and len(batch[0].log_rows) == 2
    (update,) = plan_updates(batch, run.config)
    assert sum(len(micro) for rank in update for micro in rank) == 4


def test_what_a_log_function_adds_is_logged_and_true_keeps_ours_from_sinks(tmp_path: Path) -> None:
    run = Run(tmp_path, hook(custom_rollout_log_function_path="log_rollout"))
    run.batch()
    assert run.job.metrics == {"mine/samples": 8.0} and run.job.unsent == ("rollout/", "reward/")


def test_a_hook_that_fails_or_is_late_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        HookError, match=r"slime.rollout_sample_filter_path failed: AttributeError: args has no 'longest'"
    ):
        Run(tmp_path, hook(rollout_sample_filter_path="no_truncated")).batch()
    (tmp_path / "late.py").write_text("import time\ndef f(args, samples):\n    time.sleep(3)\n")
    with pytest.raises(HookError, match="rollout_sample_filter_path took over 0.1 s"):
        Run(tmp_path, {"rollout_sample_filter_path": f"{tmp_path}/late.py:f", "timeout_s": 0.1}).batch()
    cancels = "import asyncio\ndef f(args, samples):\n    raise asyncio.CancelledError\n"
    (tmp_path / "cancels.py").write_text(cancels)
    with pytest.raises(HookError, match="rollout_sample_filter_path failed: it cancelled itself"):
        Run(tmp_path, {"rollout_sample_filter_path": f"{tmp_path}/cancels.py:f"}).batch()


def test_a_data_source_gives_prompts_and_its_place_is_in_the_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, hook(data_source_path="Counting"))
    batch = run.batch(steps=2)
    assert [outcome.log_rows[0]["prompt"] for outcome in batch] == ["2 + 2?", "3 + 3?"]
    state = json.loads(json.dumps(run.cursor.state()))
    assert state["source"] == {"n": 4} and [group for group, _ in state["buffer"]] == [2, 3]
    again = with_source(PromptCursor(TASKS, 0), run.config, run.hooks)
    again.load(state)
    assert [again.take()[1].messages[0]["content"] for _ in range(3)] == ["2 + 2?", "3 + 3?", "4 + 4?"]


def test_a_rollout_function_makes_batches_and_every_prompt_is_accounted_for(tmp_path: Path) -> None:
    run = Run(tmp_path, hook(rollout_function_path="rollout"))
    batch = run.batch(steps=2)
    assert [outcome.rewards for outcome in batch] == [[0.0, 1.0, 0.0, 1.0]] * 2
    assert batch[0].versions[0][0].version == run.version
    assert run.job.scheduler.metrics == {"mine/rollout": float(run.version)}
    counted = account(tmp_path / "journal.jsonl")
    assert counted["trained"] == 2 and counted["twice"] == [] and len(run.cursor.buffer) == 1


def test_an_evaluation_by_a_function_gives_the_usual_metrics(tmp_path: Path) -> None:
    sets = {"few": {"source": "x.jsonl"}}
    run = Run(tmp_path, hook(eval_function_path="evaluation"), eval={"sets": sets})
    metrics, rows = asyncio.run(evaluated_by(run.hooks, run.job, ["few"]))
    assert metrics["eval/few/pass@1"] == 0.5 and metrics["eval/few/truncated_fraction"] == 0.5 and rows == []


def test_an_evaluation_of_ours_uses_the_functions_too_and_is_logged(tmp_path: Path) -> None:
    hooks = hook(
        custom_generate_function_path="split",
        custom_eval_rollout_log_function_path="log_eval",
        custom_rm_path="tests.slime_rewards.rm",
        reward_key="score",
    )
    run = Run(tmp_path, hooks, eval={"sets": {"few": {"source": "x.jsonl", "samples": 2, "temperature": 1.0}}})

    async def both() -> dict[str, float]:
        async with run.hooks:
            metrics, _ = await evaluate(run.config, {"few": TASKS[:2]}, run.context)
            assert await run.hooks.log_evaluation(run.job, 0, metrics) == ()
            return metrics

    metrics = asyncio.run(both())
    assert metrics["eval/few/reward_mean"] == 0.25 and metrics["mine/few"] == 1.0


def test_without_functions_nothing_is_made(tmp_path: Path) -> None:
    from vime.slime.parts import make_hooks

    assert make_hooks(make_config(tmp_path), tmp_path) is None
    assert isinstance(with_source(PromptCursor(TASKS, 0), make_config(tmp_path), None), PromptCursor)
    assert Config.model_fields["slime"].default == Slime()


def test_the_page_of_hooks_has_each_as_it_is_called() -> None:
    page = (Path(__file__).parents[1] / "docs" / "hooks.md").read_text()
    for kind, one in HOOKS.items():
        assert f"| {kind} | `{one.option}` | `{one.signature}` | {one.when} | {one.returns} |" in page


def test_what_a_run_writes_down_can_be_loaded_again(tmp_path: Path) -> None:
    slime = {"custom_rm_path": "a.b", "args": {"deep": {"er": [1, "x"]}}, "rollout_sample_hook_path": ["a.b", "c.d"]}
    config = make_config(tmp_path, slime=slime)
    (tmp_path / "config.toml").write_text(dump(config))
    (tmp_path / "config.json").write_text("{}")
    assert load(tmp_path / "config.toml").slime == config.slime


def test_a_rollout_function_takes_prompts_by_the_weights_of_its_step(tmp_path: Path) -> None:
    sources = {name: Epochs([task], 0) for name, task in zip("ab", TASKS, strict=False)}
    cursor = PromptCursor(sources, 0, lambda name, step: float(name == "ab"[step]))
    step = [0]
    source = PromptSource(cursor, Journal(tmp_path / "journal.jsonl"), str, lambda: step[0], 1)
    taken = []
    for step[0] in (0, 1, 0):
        source.get_samples(1)
        taken.append(next(reversed(cursor.open.values()))[0])
    assert taken == ["a", "b", "a"]
