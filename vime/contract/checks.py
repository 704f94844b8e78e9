"""What is checked of a function of each kind. A check is a line in the table that ``vime contract`` prints."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vime.config.sections import Config
from vime.contract import inputs
from vime.data.cursor import PromptCursor
from vime.data.journal import Journal
from vime.functions import FunctionError, user_function
from vime.rewards.load import load_reward, numbers_of
from vime.rollout.generate import load_generate
from vime.sample import Sample as Native
from vime.slime.batch import entries_of, processed, taken
from vime.slime.calls import call, cause_of, in_thread
from vime.slime.driver import Hooks, dropped_for
from vime.slime.hooks import HOOKS, load_hook
from vime.slime.sample import prompt_of, reward_of, to_native
from vime.slime.sources import PromptSource, SourceCursor
from vime.slime.trainer import TrainerHooks, response_log_probs, sum_of_sample_mean, take, view
from vime.slime.worker import scorer
from vime.store.shared_memory import SharedMemoryStore
from vime.training.advantages import ESTIMATORS, Scored
from vime.training.losses import OBJECTIVES


@dataclass(frozen=True)
class Check:
    what: str
    ok: bool
    found: str = ""


class Broken(Exception):
    """A check failed, and what follows has no sense."""


class Trial:
    """One function under test: what has been checked, and the means to check more."""

    def __init__(self, kind: str, path: str, given: Config, timeout_s: float, folder: Path) -> None:
        self.kind, self.path, self.config, self.timeout_s, self.folder = kind, path, given, timeout_s, folder
        self.checks: list[Check] = []

    def check(self, what: str, ok: bool, found: str = "") -> None:
        self.checks.append(Check(what, ok, found))
        if not ok:
            raise Broken

    def agrees(self, what: str, test: Callable[[], Any]) -> Any:
        """The test's result; a check that fails where it raises."""
        try:
            result = test()
        except Exception as error:
            self.check(what, False, str(error) or type(error).__name__)
        self.check(what, True)
        return result

    async def answers(self, what: str, made: Coroutine[Any, Any, Any]) -> Any:
        """The coroutine's result, which must come in time."""
        started = time.perf_counter()
        try:
            result = await asyncio.wait_for(made, self.timeout_s)
        except TimeoutError:
            self.check(what, False, f"took over {self.timeout_s:g} s")
        except Exception as error:
            self.check(what, False, str(error) or type(error).__name__)
        self.check(what, True, f"{time.perf_counter() - started:.2f} s")
        return result

    async def called(self, what: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        option = HOOKS[self.kind].option if self.kind in HOOKS else self.kind
        return await self.answers(what, call(option, self.timeout_s, function, *arguments, **named))

    def kept(self, made: list[Native], prompt: list[int]) -> None:
        """Tokens, masks, log-probabilities and rewards of samples that a function made."""
        self.check("samples are returned", bool(made), f"{len(made)}")
        self.check("tokens begin with the prompt", all(one.prompt_ids[: len(prompt)] == prompt for one in made))
        trained = sum(sum(one.loss_mask) for one in made)
        self.check("some tokens are trained", trained > 0, f"{trained} of {sum(len(one.response_ids) for one in made)}")
        whole = all(not math.isnan(p) for one in made for p, m in zip(one.logprobs, one.loss_mask, strict=True) if m)
        self.check("each trained token has its log-probability", whole)
        self.check(
            "rewards are finite or left to the run",
            all(one.reward is None or math.isfinite(one.reward) for one in made),
        )


Checker = Callable[[Trial], Coroutine[Any, Any, None]]


def hooks_of(trial: Trial) -> Hooks:
    option = HOOKS[trial.kind].option
    value: Any = [trial.path] if option == "rollout_sample_hook_path" else trial.path
    section = trial.config.slime.model_copy(update={option: value, "timeout_s": trial.timeout_s})
    rollout = trial.config.rollout.model_copy(update={"generate_timeout_s": trial.timeout_s})
    return Hooks(trial.config.model_copy(update={"slime": section, "rollout": rollout}), trial.folder)


# Responses


async def generate(trial: Trial) -> None:
    hooks = hooks_of(trial)
    context = inputs.context(hooks.config, hooks)
    for number, evaluation in ((0, False), (1, True)):
        one = replace(context, number=number, group=None if evaluation else 0)
        what = "it makes a response in evaluation" if evaluation else "it makes a response"
        made = await trial.answers(what, hooks.generate(one, inputs.TASK))
        trial.kept(made, context.prompt_ids(inputs.TASK))


async def native_generate(trial: Trial) -> None:
    function = load_generate(trial.path, trial.timeout_s)
    context = inputs.context(trial.config)
    found = await trial.answers("it makes a response", function(context, inputs.TASK))  # type: ignore[arg-type]
    trial.kept(found if isinstance(found, list) else [found], context.prompt_ids(inputs.TASK))


async def sample(trial: Trial) -> None:
    hooks = hooks_of(trial)
    context = inputs.context(hooks.config, hooks)
    for made in inputs.group(0, [None] * inputs.SAMPLES).samples:
        after = await trial.answers("it takes a sample and keeps it whole", hooks.hooked(context, inputs.TASK, made))
        trial.kept([after], made.prompt_ids)


# Rewards


async def reward(trial: Trial) -> None:
    of_group = trial.kind == "group_reward"
    score = scorer(trial.path, of_group, trial.config.model_dump(mode="json"))
    hooks = Hooks(trial.config, trial.folder)
    context = inputs.context(trial.config, hooks)
    samples = [hooks.seen(context, inputs.TASK, one) for one in inputs.group(0, [None] * inputs.SAMPLES).samples]
    fields = [one.to_dict() for one in samples]
    key = trial.config.slime.reward_key
    trial.agrees("what it is given is JSON", lambda: json.dumps(fields))
    for rows in [fields] if of_group else [[row] for row in fields]:
        what = f"it scores {f'a group of {len(rows)}' if of_group else repr(rows[0]['response'][:20])}"
        found = await trial.called(what, score, inputs.Front.url, rows)
        trial.agrees("rewards are finite numbers", lambda found=found: [reward_of(one, key) for one in found])  # type: ignore[misc]


async def native_reward(trial: Trial) -> None:
    function = load_reward(trial.path)
    for one in inputs.group(0, [None] * inputs.SAMPLES).samples:
        found = await trial.called(f"it scores {one.text[:20]!r}", function, inputs.TASK, one.text)

        def finite(found: Any = found) -> None:
            for name, value in (numbers_of(found) or {}).items():
                if not math.isfinite(value):
                    raise ValueError(f"{name} is {value}")

        trial.agrees("its value is a finite number, numbers with 'reward', or None", finite)


# Groups and batches


def groups_of(trial: Trial, rewards: list[list[float]]) -> tuple[Hooks, Any, list[list[Any]]]:
    hooks = hooks_of(trial)
    context = inputs.context(hooks.config, hooks)
    made = [inputs.group(number, list(one)) for number, one in enumerate(rewards)]
    return (
        hooks,
        hooks.args(context),
        [
            [hooks.seen(replace(context, group=g.id, number=i), g.task, s) for i, s in enumerate(g.samples)]
            for g in made
        ],
    )


DIFFERENT, EQUAL = [1.0, 0.0, 0.5, 0.0], [1.0] * 4


async def dynamic_filter(trial: Trial) -> None:
    hooks, args, groups = groups_of(trial, [DIFFERENT, EQUAL])
    for about, samples in zip(("different", "equal"), groups, strict=True):
        found = await trial.called(
            f"it judges a group of {about} rewards", hooks.functions[trial.kind][0], args, samples
        )
        reason = trial.agrees("it says whether to keep it", lambda found=found: dropped_for(found))  # type: ignore[misc]
        trial.check(
            "a reason is text", reason is None or isinstance(reason, str), "kept" if reason is None else f"{reason}"
        )


async def buffer_filter(trial: Trial) -> None:
    hooks, args, groups = groups_of(trial, [DIFFERENT, EQUAL, DIFFERENT])
    found = await trial.called("it chooses 2 of 3 groups", hooks.functions[trial.kind][0], args, None, groups, 2)
    chosen, dropped = trial.agrees("they are groups of the buffer", lambda: taken(found, groups, [0, 1, 2], 2))
    trial.check("it chooses at most as many as asked", len(found) <= 2, f"{len(chosen)}, {len(dropped)} dropped")


async def sample_filter(trial: Trial) -> None:
    hooks, args, groups = groups_of(trial, [DIFFERENT, EQUAL])
    before = [[list(one.tokens) for one in samples] for samples in groups]
    await trial.called("it sees a batch", hooks.functions[trial.kind][0], args, groups)
    trial.check("all samples are still there", [[list(s.tokens) for s in one] for one in groups] == before)
    marks = [one.remove_sample for samples in groups for one in samples]
    trial.check("remove_sample is true or false", all(mark in (True, False) for mark in marks), f"{sum(marks)} removed")


async def all_samples(trial: Trial) -> None:
    hooks, args, groups = groups_of(trial, [DIFFERENT, EQUAL])
    await trial.called("it sees a batch", hooks.functions[trial.kind][0], args, groups, source_of(trial, hooks))


async def reward_post_process(trial: Trial) -> None:
    hooks, args, groups = groups_of(trial, [DIFFERENT, EQUAL])
    flat = [one for samples in groups for one in samples]
    found = await trial.called("it sees a batch", hooks.functions[trial.kind][0], args, flat)
    trial.agrees("two lists, one finite number a sample", lambda: processed(found, len(flat)))


async def convert(trial: Trial) -> None:
    hooks, args, groups = groups_of(trial, [DIFFERENT, EQUAL])
    flat = [one for samples in groups for one in samples]
    found = await trial.called("it sees a batch", hooks.functions[trial.kind][0], args, flat)
    made = trial.agrees("a dict whose entries can be trained", lambda: entries_of(found))
    known = {one.index for one in flat}
    trial.check("sample_indices are of the batch", set(map(int, found["sample_indices"])) <= known, f"{len(made)} rows")


async def log(trial: Trial) -> None:
    hooks, args, groups = groups_of(trial, [DIFFERENT, EQUAL])
    flat, metrics = [one for samples in groups for one in samples], {"rollout/groups": 2.0}
    rewards = [one.reward for one in flat]
    data = {"contract": {"rewards": rewards, "truncated": [False] * len(flat), "samples": flat}}
    evaluation: tuple[Any, ...] = (0, args, data, metrics)
    arguments = evaluation if trial.kind == "eval_log" else (0, args, flat, metrics, 1.5)
    found = await trial.called("it logs", hooks.functions[trial.kind][0], *arguments)
    trial.check("it returns true, false or nothing", found in (True, False, None), f"{found}")
    trial.agrees("what it adds to the metrics are numbers", lambda: [float(value) for value in metrics.values()])


async def data_source(trial: Trial) -> None:
    hooks = hooks_of(trial)
    kind, args = hooks.functions[trial.kind][0], hooks.args(inputs.context(hooks.config))
    source = await trial.answers("it can be made", in_thread(lambda: kind(args)))
    cursor = SourceCursor(source)
    _, task = trial.agrees("get_samples(1) gives a group with a prompt", cursor.take)
    trial.check("the prompt is text or messages", all("content" in one for one in task.messages), f"{task.messages[0]}")
    trial.agrees("len() is a number", lambda: len(source))
    state = trial.agrees("its state can be saved", lambda: json.loads(json.dumps(cursor.state())))
    trial.agrees("and loaded again", lambda: SourceCursor(kind(args)).load(state))


def source_of(trial: Trial, hooks: Hooks) -> PromptSource:
    cursor, journal = PromptCursor([inputs.TASK], 0), Journal(trial.folder / "journal.jsonl")
    context = inputs.context(hooks.config, hooks)
    return PromptSource(cursor, journal, lambda task: hooks.prompt(context, task), lambda: 3, inputs.SAMPLES)


async def rollout(trial: Trial) -> None:
    hooks = hooks_of(trial)
    source = source_of(trial, hooks)
    args = hooks.args(inputs.context(hooks.config, hooks))
    found = await trial.called("it makes a batch", hooks.functions[trial.kind][0], args, 0, source, evaluation=False)
    groups = getattr(found, "samples", found)
    shaped = isinstance(groups, list) and bool(groups) and all(isinstance(one, list) and one for one in groups)
    trial.check("it returns groups", shaped, f"{type(found).__name__}")
    trial.check("each was taken from data_source", all(one[0].group_index in source.begun for one in groups))
    made = trial.agrees("samples can be trained", lambda: [to_native(s, 3) for one in groups for s in one])
    trial.kept(made, inputs.context(hooks.config).prompt_ids(inputs.TASK))


async def evaluation(trial: Trial) -> None:
    hooks = hooks_of(trial)
    context = inputs.context(hooks.config, hooks)
    prompt = hooks.prompt(context, inputs.TASK)
    source = SimpleNamespace(sets={"contract": [[prompt_of(inputs.TASK, prompt, 0, 0)]]})
    found = await trial.called(
        "it evaluates", hooks.functions[trial.kind][0], hooks.args(context), 0, source, evaluation=True
    )
    data = getattr(found, "data", None)
    trial.check("it returns data by set", isinstance(data, dict) and bool(data), f"{type(found).__name__}")
    numbers = all(math.isfinite(float(value)) for one in (data or {}).values() for value in one["rewards"])
    trial.check("rewards are finite numbers", numbers)


# Trainer


def in_trainer(trial: Trial) -> tuple[TrainerHooks, Any, Any]:
    store = SharedMemoryStore(trial.folder / "store")
    made = inputs.batch(store)
    engine: Any = SimpleNamespace(store=store, device=torch.device("cpu"))
    return TrainerHooks(trial.config, {trial.kind: load_hook(trial.kind, trial.path)}), engine, made


async def advantage(trial: Trial) -> None:
    hooks, engine, made = in_trainer(trial)
    data = view(engine, made)
    arguments: tuple[Any, ...] = (hooks.args, data)
    if trial.kind == "postprocess":
        arguments = (hooks.args, 0, data)
    await trial.called("it sees a batch", hooks.functions[trial.kind], *arguments)
    trial.agrees("advantages and loss_masks have one entry a response token", lambda: take(made, data))
    trial.check("advantages are finite", bool(torch.isfinite(made.advantages).all()))


async def tis(trial: Trial) -> None:
    hooks, _, made = in_trainer(trial)
    tokens = inputs.seen(made)
    losses = -tokens.advantages * torch.exp(tokens.log_ratio)
    found = await trial.answers("it corrects losses", in_thread(lambda: hooks.corrected(made, tokens, losses, {})))
    gradient(trial, torch.where(made.mask, found[0], 0.0).sum(), tokens.logprobs)
    trial.check("metrics are numbers of tokens", all(one.shape == losses.shape for one in found[1].values()))


async def reducer(trial: Trial) -> None:
    hooks, _, made = in_trainer(trial)
    tokens = inputs.seen(made)
    losses = -tokens.advantages * torch.exp(tokens.log_ratio)
    found = await trial.answers("it sums losses up", in_thread(lambda: hooks.reduced(made, losses)))
    gradient(trial, found[1], tokens.logprobs)


async def loss(trial: Trial) -> None:
    hooks, engine, made = in_trainer(trial)
    data = view(engine, made)
    size = len(inputs.tokenizer())
    logits = torch.randn(1, sum(data["total_lengths"]), size, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()

    def mean(values: torch.Tensor) -> torch.Tensor:
        return sum_of_sample_mean(values, data["loss_masks"], per_token=False)

    response_log_probs(hooks.args, data, logits.detach())
    found = await trial.called("it makes a loss", hooks.functions[trial.kind], hooks.args, data, logits, mean)
    trial.check("it returns (loss, metrics)", isinstance(found, tuple) and len(found) == 2, f"{type(found).__name__}")
    gradient(trial, found[0], logits)
    numbers = all(torch.as_tensor(value).numel() == 1 for value in found[1].values())
    trial.check("metrics are single numbers", numbers, ", ".join(found[1]))


def gradient(trial: Trial, total: Any, leaf: torch.Tensor) -> None:
    trial.check(
        "the loss is one finite number", bool(torch.isfinite(total).all()) and total.numel() == 1, f"{total:.4g}"
    )
    trial.agrees("it has a gradient", total.backward)
    trial.check("the gradient is finite", leaf.grad is not None and bool(torch.isfinite(leaf.grad).all()))


async def around(trial: Trial) -> None:
    """Functions that are only called: with a model, an optimizer."""
    hooks, _, _ = in_trainer(trial)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    arguments = {
        "init": (hooks.args,),
        "before_log_prob": (hooks.args, [model], ""),
        "before_step": (hooks.args, 0, 0, [model], optimizer, None),
    }[trial.kind]
    await trial.called("it can be called", hooks.functions[trial.kind], *arguments)


async def native_advantage(trial: Trial) -> None:
    function = ESTIMATORS.get(trial.path) or user_function(trial.path, 1)
    rollouts = [Scored(f"g{g}", float(r), 5 + r) for g in range(2) for r in range(inputs.SAMPLES - g)]
    found = await trial.called("it compares groups of different sizes", function, rollouts)
    trial.check("one number a rollout", len(found) == len(rollouts), f"{len(found)} for {len(rollouts)}")
    trial.check("they are finite", all(math.isfinite(float(value)) for value in found))


async def native_objective(trial: Trial) -> None:
    function = OBJECTIVES.get(trial.path) or user_function(trial.path, 2)
    made = inputs.batch(SharedMemoryStore(trial.folder / "store"))
    tokens = inputs.seen(made)
    found = await trial.called("it makes losses", function, tokens, trial.config.algorithm)
    trial.check("it returns (losses, logs)", isinstance(found, tuple) and len(found) == 2, f"{type(found).__name__}")
    losses, logs = found
    trial.check("one loss a response token", getattr(losses, "shape", None) == made.mask.shape)
    trial.check(
        "logs have one entry a token", all(value.shape == losses.shape for value in logs.values()), ", ".join(logs)
    )
    gradient(trial, torch.where(made.mask, losses * made.weights, 0.0).sum(), tokens.logprobs)


CHECKERS: dict[str, Checker] = {
    "generate": generate,
    "sample": sample,
    "reward": reward,
    "group_reward": reward,
    "dynamic_filter": dynamic_filter,
    "buffer_filter": buffer_filter,
    "sample_filter": sample_filter,
    "all_samples": all_samples,
    "reward_post_process": reward_post_process,
    "convert": convert,
    "rollout_log": log,
    "eval_log": log,
    "data_source": data_source,
    "rollout": rollout,
    "eval": evaluation,
    "advantage": advantage,
    "postprocess": advantage,
    "tis": tis,
    "reducer": reducer,
    "loss": loss,
    "init": around,
    "before_log_prob": around,
    "before_step": around,
    "rollout.generate": native_generate,
    "reward.function": native_reward,
    "algorithm.advantage": native_advantage,
    "algorithm.objective": native_objective,
}
NATIVE = {  # parameters by which a function of ours is known
    ("context", "task"): "rollout.generate",
    ("task", "response"): "reward.function",
    ("rollouts",): "algorithm.advantage",
    ("tokens", "options"): "algorithm.objective",
    ("tokens", "algorithm"): "algorithm.objective",
}


def kinds_of(function: Any) -> list[str]:
    """The kinds of function that it may be, by its parameters' names, or its methods."""
    if inspect.isclass(function):
        return ["data_source"]
    parameters = inspect.signature(function).parameters.values()
    names = tuple(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    found = [NATIVE[names]] if names in NATIVE else []
    for kind, hook in HOOKS.items():
        by_position = tuple(name for name in names if name not in (*hook.keywords, *hook.optional))
        named = set(names) & {*hook.keywords}
        told = len(named) > (not hook.arguments) if hook.keywords else True  # "args" alone tells nothing
        if hook.kind != "class" and by_position == hook.arguments and told:
            found.append(kind)
    return found


async def tried(kind: str, path: str, given: Config, timeout_s: float) -> list[Check]:
    """All checks of the function of that kind, up to the first that fails."""
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(kind, path, given, timeout_s, Path(folder))
        try:
            await CHECKERS[kind](trial)
        except Broken:
            pass
        except FunctionError as error:
            trial.checks.append(Check("it can be loaded and called", False, str(error)))
        except Exception as error:
            trial.checks.append(Check("it can be checked", False, cause_of(error)))
    return trial.checks
