"""The configuration: what is refused and how it is said, what a file means, what the help shows."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from vime.config import algorithms
from vime.config.load import ConfigError, dump, help_text, load, options, parse_overrides, parse_value
from vime.config.sections import Algorithm, Config, CorrectionName
from vime.config.supervised import Supervised
from vime.training.advantages import ESTIMATORS, TOKEN_LEVEL


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The smallest file that is a whole configuration."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    path = tmp_path / "config.toml"
    path.write_text(f'[model]\npath = "{tmp_path}/model"\n[data]\nsource = "reasoning-gym:chain_sum"\nsize = 9\n')
    return path


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, overrides)
    return str(caught.value)


def test_a_file_with_the_model_and_the_data_is_enough(file: Path) -> None:
    config = load(file)
    assert config.data.size == 9
    assert config.rollout == Config.model_fields["rollout"].default


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("rollout.temprature", "did you mean temperature?"),
        ("eval.sets.test.sampels", "did you mean samples?"),
        ("trainer.learning_rat", "did you mean learning_rate?"),
        ("rolout.groups", "did you mean rollout?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(file: Path, key: str, nearest: str) -> None:
    text = refusal(file, "--eval.sets.test.source", "test.jsonl", f"--{key}", "1")
    assert f"is not an option; {nearest}" in text
    assert key.split(".", maxsplit=1)[0] in text


def test_an_unknown_key_near_nothing_is_refused_with_all_known_ones(file: Path) -> None:
    assert "log.zzzz is not an option; known: dump_every, samples_per_step, sinks" in refusal(file, "--log.zzzz", "1")


def test_a_wrong_value_is_named_with_its_key_and_what_is_expected(file: Path) -> None:
    assert 'rollout.groups = "many": input should be a valid integer' in refusal(file, "--rollout.groups", "many")
    assert "rollout.groups = 0: input should be greater than 0" in refusal(file, "--rollout.groups", "0")
    text = refusal(file, "--algorithm.reduction", "mean")
    assert 'algorithm.reduction = "mean"' in text and "'token', 'sequence', 'rollout', 'group' or 'fixed'" in text


def test_a_missing_key_is_named_with_the_way_to_set_it(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[model]\npath = "m"\n[data]\n')
    assert refusal(path).splitlines()[0] == "data.source is missing; set it in the file or with --data.source VALUE"


def test_several_faults_are_said_at_once_a_line_each(file: Path) -> None:
    wrong = ["--rollout.temprature", "1", "--rollout.groups", "-1", "--model.dtype", "float8", "--run.steps", "0"]
    text = refusal(file, *wrong)
    assert len(text.splitlines()) == 4
    for key in ("rollout.temprature", "rollout.groups", "model.dtype", "run.steps"):
        assert sum(line.startswith(key) for line in text.splitlines()) == 1


IMPOSSIBLE = [
    (["--rollout.samples_per_group", "1"], "set rollout.samples_per_group >= 2"),
    (
        ["--run.deterministic", "true", "--rollout.max_staleness", "1"],
        "run.deterministic with rollout.max_staleness = 1: set it to 0",
    ),
    (
        ["--run.deterministic", "true", "--inference.servers", "2"],
        "run.deterministic with inference.servers = 2: set it to 1",
    ),
    (["--rollout.top_p", "0.9"], "set top_p = 1.0 and top_k = -1"),
    (["--rollout.top_k", "50"], "set top_p = 1.0 and top_k = -1"),
    (["--algorithm.updates", "3"], "does not divide rollout.groups = 16"),
    (["--eval.sets.t.source", "reasoning-gym:chain_sum"], "set eval.sets.t.seed to another number"),
    (["--eval.sets.t.source", "t.jsonl", "--eval.sets.t.samples", "4"], "set eval.sets.t.temperature > 0"),
    (["--model.path", "/nowhere"], "'/nowhere' holds no config.json"),
    (["--algorithm.advantage", "grop"], "did you mean grpo?"),
    (["--algorithm.objective", "cipso"], "did you mean cispo?"),
    (["--algorithm.objective", "dpo"], 'set advantage = "pair" and reduction = "sequence"'),
    (
        ["--algorithm.objective", "dpo", "--algorithm.advantage", "pair", "--algorithm.reduction", "sequence"],
        'set rollout.filter = "zero_variance"',
    ),
    (["--algorithm.objective", "sft"], "run `vime sft CONFIG.toml`"),
    (["--data.response_keys", '["chosen", "rejected"]'], 'set algorithm.objective = "dpo"'),
    (["--data.response_keys", '["chosen"]', "--algorithm.objective", "dpo"], "set two keys"),
    (["--data.response_keys", '["a"]', "--rollout.filter", "zero_variance"], 'set rollout.filter = "none"'),
    (["--algorithm.dual_clip", "3", "--algorithm.objective", "sapo"], "which has none; remove it"),
    (["--algorithm.fixed_length", "64"], 'set reduction = "fixed"'),
    (["--algorithm.advantage", "reverse_kl"], "set teacher.path or teacher.url"),
    (["--teacher.path", "m"], 'set algorithm.advantage = "reverse_kl"'),
    (["--reference.path", "m"], "set algorithm.kl_coef > 0"),
    (
        ["--algorithm.kl_coef", "0.1", "--reference.path", "m", "--reference.url", "http://localhost:1"],
        "reference.path and reference.url are both set",
    ),
    (
        [*["--algorithm.kl_coef", "0.1", "--reference.url", "http://localhost:1"], "--rollout.temperature", "0.8"],
        "set rollout.temperature = 1.0",
    ),
    (
        ["--algorithm.kl_coef", "0.1", "--reference.url", "http://localhost:1", "--reference.refresh_every", "5"],
        "reference.refresh_every needs the reference in the trainer",
    ),
    (["--critic.warmup_steps", "3"], 'set algorithm.advantage = "gae"'),
    (["--algorithm.kl_in", "reward", "--algorithm.kl_estimator", "unbiased"], 'set it to "k1"'),
    (["--algorithm.corrections.tis.high", "2", "--algorithm.corrections.icepop.high", "2"], "keep one of them"),
    (
        ["--algorithm.corrections.tis.high", "2", "--algorithm.old_logprobs", "behaviour"],
        'set old_logprobs = "proximal"',
    ),
    (["--algorithm.corrections.mis.low", "3", "--algorithm.corrections.mis.high", "2"], "swap them"),
    (["--reward.function", "exact", "--reward.parts.a.function", "regex"], "set it as reward.parts.NAME.function"),
    (["--reward.options.x", "1", "--reward.parts.a.function", "exact"], "set it as reward.parts.NAME.options"),
    (["--reward.overlong_buffer", "256"], "is not below rollout.max_tokens = 256"),
    (["--rollout.filter", "accuracy_band", "--rollout.accuracy_low", "0.6", "--rollout.accuracy_high", "0.5"], "swap"),
    (["--rollout.accuracy_low", "0.2"], 'set rollout.filter = "accuracy_band"'),
    (["--reward.parts.raw.function", "exact", "--reward.length_penalty", "0.1"], "give yours another"),
    (
        [
            *["--data.response_keys", '["chosen", "rejected"]', "--algorithm.objective", "dpo"],
            *["--algorithm.advantage", "pair", "--reward.length_penalty", "0.1"],
        ],
        "given responses are not shaped",
    ),
    (["--algorithm.advantage", "maxrl", "--reward.overlong_buffer", "9"], "set reward.overlong_buffer = 0"),
    (["--lora.alpha", "8"], "lora.alpha with lora.rank = 0, which trains no adapter; set lora.rank"),
    (["--lora.rank", "8", "--lora.target_modules", '["q_proj", "lm_head"]'], "lm_head cannot have an adapter"),
    (["--lora.rank", "8", "--lora.target_modules", "model.embed_tokens"], "cannot have an adapter"),
    (["--lora.rank", "8", "--lora.target_modules", "[]"], 'set it to "all-linear"'),
    (["--trainer.ranks", "6", "--trainer.tensor_parallel", "4"], "= 1 x 1 x 4 = 4; set it to a multiple of 4"),
    (["--lora.rank", "600"], "vLLM serves ranks up to 512"),
    (["--lora.rank", "8", "--vllm.api_server_count", "2"], "set inference.servers instead"),
    (
        ["--lora.rank", "8", "--algorithm.kl_coef", "1", "--reference.path", "m", "--reference.refresh_every", "2"],
        "a refresh copies the adapter",
    ),
    (["--algorithm.router_replay", "trainer"], "the only update routes as itself; set updates >= 2"),
    (
        [
            *["--data.response_keys", '["chosen"]', "--algorithm.objective", "sft"],
            *["--algorithm.advantage", "constant", "--algorithm.router_replay", "server"],
        ],
        'no server samples given responses, so none tells their experts; set router_replay = "none"',
    ),
]

POSSIBLE = [
    ["--rollout.samples_per_group", "1", "--algorithm.advantage", "reinforce_pp"],
    ["--algorithm.advantage", "gae", "--critic.warmup_steps", "3"],
    ["--algorithm.advantage", "my.module:advantage", "--algorithm.objective", "my_loss.py:loss"],
    [
        *["--data.response_keys", '["chosen", "rejected"]', "--algorithm.objective", "dpo"],
        *["--algorithm.advantage", "pair", "--algorithm.reduction", "sequence"],
    ],
    ["--algorithm.corrections.tis.high", "2", "--algorithm.corrections.opsm.high", "0.1"],
    ["--algorithm.advantage", "reverse_kl", "--teacher.url", "http://localhost:1"],
    ["--algorithm.kl_coef", "0.1", "--algorithm.kl_in", "reward", "--algorithm.kl_estimator", "k1"],
    ["--reward.overlong_buffer", "255", "--reward.length_penalty", "0.1"],
    ["--rollout.filter", "accuracy_band", "--rollout.accuracy_low", "0.5", "--rollout.accuracy_high", "0.5"],
    ["--reward.parts.raw.function", "exact", "--reward.parts.b.function", "regex", "--reward.parts.b.weight", "-0.5"],
    ["--reward.function", "regex", "--reward.options.pattern", "x", "--algorithm.advantage", "maxrl"],
    ["--lora.rank", "8", "--lora.target_modules", '["q_proj"]', "--vllm.api-server-count", "1"],
    ["--lora.rank", "600", "--lora.sync", "merged", "--vllm.data-parallel-size", "2"],
    ["--lora.rank", "8", "--algorithm.kl_coef", "1", "--reference.refresh_every", "2"],
    ["--algorithm.router_replay", "server", "--algorithm.router_aux_coef", "1e-3"],
    ["--algorithm.router_replay", "trainer", "--algorithm.updates", "2"],
]


@pytest.mark.parametrize("words", POSSIBLE)
def test_a_combination_that_works_is_not_refused(file: Path, words: list[str]) -> None:
    load(file, words)


def test_the_names_that_are_known_to_the_configuration_are_those_that_exist() -> None:
    from vime.training.corrections import CORRECTIONS
    from vime.training.losses import OBJECTIVES

    assert tuple(name for name in OBJECTIVES if name != "sft") == algorithms.OBJECTIVES  # a command of its own
    assert set(CORRECTIONS) == set(get_args(CorrectionName))


@pytest.mark.parametrize(("words", "fix"), IMPOSSIBLE)
def test_an_impossible_combination_is_refused_with_its_fix(file: Path, words: list[str], fix: str) -> None:
    assert fix in refusal(file, *words)


def test_running_ahead_without_a_correction_is_warned_of(file: Path) -> None:
    ahead = "--rollout.max_staleness", "2"
    (warning,) = algorithms.warnings(load(file, ahead))
    assert "rollout.max_staleness = 2 without a correction" in warning
    for corrected in (
        "algorithm.corrections.tis.high=2",
        "algorithm.old_logprobs=behaviour",
        "algorithm.mask_stale=true",
    ):
        assert algorithms.warnings(load(file, [*ahead, f"--{corrected}"])) == []
    assert algorithms.warnings(load(file, [])) == []


def test_several_impossible_combinations_are_said_at_once(file: Path) -> None:
    text = refusal(file, "--rollout.samples_per_group", "1", "--rollout.top_k", "5", "--model.path", "/nowhere")
    assert len(text.splitlines()) == 3


def test_an_evaluation_set_of_another_seed_or_sampled_warm_is_fine(file: Path) -> None:
    words = ["--eval.sets.t.source", "reasoning-gym:chain_sum", "--eval.sets.t.seed", "1"]
    words += ["--eval.sets.t.samples", "4", "--eval.sets.t.temperature", "0.7"]
    assert load(file, words).eval.sets["t"].samples == 4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-6", 1e-6),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('"3"', "3"),
        ("runs/a b", "runs/a b"),
        ("{a = 1}", {"a": 1}),
        ("True", "True"),
        ("", ""),
        ("-1", -1),
    ],
)
def test_a_value_on_the_command_line_reads_as_toml_else_as_text(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert parsed == value and type(parsed) is type(value)


def test_overrides_are_written_with_a_space_or_an_equals_sign() -> None:
    words = ["--run.steps", "5", "--run.dir=a=b", "--rollout.top_k", "-1"]
    expected = [(["run", "steps"], 5), (["run", "dir"], "a=b"), (["rollout", "top_k"], -1)]
    assert parse_overrides(words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps"], "unexpected argument 'steps'"),
        (["--steps", "5"], "unexpected argument '--steps'"),
        (["-run.steps", "5"], "unexpected argument '-run.steps'"),
        (["--run.steps"], "--run.steps has no value"),
    ],
)
def test_a_word_that_is_no_override_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_overrides(words)


def test_an_override_wins_over_the_file_and_the_last_one_over_the_first(file: Path) -> None:
    assert load(file, ["--data.size", "7", "--data.size=8"]).data.size == 8


def test_an_override_below_a_value_is_refused(file: Path) -> None:
    assert "--data.size.x: size is a value, not a section" in refusal(file, "--data.size.x", "1")


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    assert "none.toml does not exist; name a TOML file" in refusal(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[run\n")
    assert "bad.toml is no valid TOML" in refusal(tmp_path / "bad.toml")


def test_what_dump_writes_load_reads_as_the_same_configuration(file: Path, tmp_path: Path) -> None:
    words = ["--vllm.max-model-len", "512", "--vllm.enforce_eager", "true", "--vllm.allowed-origins", '["a", "b"]']
    words += ["--trainer.betas", "[0.8, 0.9]", "--run.time_limit_minutes", "2.5", "--data.options.max_terms", "3"]
    words += ["--eval.sets.t.source", "t.jsonl", "--data.template", '{prompt} "now"\nÜber', "--log.sinks", '["wandb"]']
    words += ["--inference.env.A_B", "x=y", "--rollout.stop_token_ids", "[5]", "--trainer.learning_rate", "3e-7"]
    config = load(file, words)
    assert config.vllm["max-model-len"] == 512 and config.trainer.betas == (0.8, 0.9)
    again = tmp_path / "again.toml"
    again.write_text(dump(config))
    assert load(again) == config


def test_a_dump_with_several_rewards_is_read_again_as_the_same(file: Path, tmp_path: Path) -> None:
    config = load(file, ["--reward.parts.a.function", "exact", "--reward.parts.b", '{function = "m:f", weight = 0}'])
    again = tmp_path / "again.toml"
    again.write_text(dump(config))
    assert load(again) == config and list(load(again).reward.parts) == ["a", "b"]


@pytest.mark.parametrize("weight", ["inf", "nan", '"much"'])
def test_the_weight_of_a_reward_is_a_finite_number(file: Path, weight: str) -> None:
    assert "reward.parts.a.weight" in refusal(
        file, "--reward.parts.a.function", "exact", "--reward.parts.a.weight", weight
    )


def test_the_resolved_configuration_has_every_option_written_out(file: Path) -> None:
    written = dump(load(file))
    for name, field, _ in options(Config):
        if "NAME" not in name and (field.is_required() or field.get_default() not in (None, {})):
            assert f"{name.rpartition('.')[2]} = " in written, name


def test_a_configuration_cannot_be_changed_after_it_was_checked(file: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(file).run.steps = 5  # type: ignore[misc]


def test_every_option_is_explained() -> None:
    assert [name for kind in (Config, Supervised) for name, _, text in options(kind) if not text] == []


def test_the_help_shows_kind_and_default_of_an_option() -> None:
    text = help_text(Config)
    assert '--model.dtype (float32 | bfloat16; "bfloat16")\n' in text
    assert "--model.path (str; required)\n" in text
    assert "--run.time_limit_minutes (float | none; null)\n" in text


HELP = """
import contextlib, io, json, sys
import vime.config.load
from vime.cli import main
out = io.StringIO()
with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
    main(["train", "--help"])
print(json.dumps([out.getvalue(), sorted(sys.modules)]))
"""


def test_vime_train_help_lists_every_option_and_loads_no_heavy_library() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True, timeout=60)
    text, modules = json.loads(done.stdout)
    missing = [name for name, _, _ in options(Config) if f"--{name} (" not in text]
    assert missing == []
    assert "--resume" in text and "--dry-run" in text
    assert {"torch", "transformers", "vllm", "datasets", "numpy"}.isdisjoint(modules)


ALGORITHMS = Path(__file__).parents[1] / "docs" / "algorithms.md"
BESIDE = {  # what a row of the table needs beside its [algorithm] settings
    "DPO": ["--data.response_keys", '["chosen", "rejected"]'],
    "on-policy distillation": ["--teacher.path", "m"],
}


def published() -> list[tuple[str, list[str]]]:
    """The rows of the page's table of published algorithms, as overrides."""
    table = ALGORITHMS.read_text().split("## Published algorithms as settings")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ") and "`" in line]
    parsed = []
    for name, settings in rows[1:]:
        words = [*BESIDE.get(name.strip(), [])]
        for key, value in re.findall(r"`([a-z_]+) = ([^`]+)`", settings):
            words += [f"--algorithm.{key}", value]
        parsed.append((name.strip(), words))
    return parsed


@pytest.mark.parametrize(("name", "words"), published())
def test_a_published_algorithms_settings_on_the_page_are_a_configuration(
    file: Path, name: str, words: list[str]
) -> None:
    if name == "LUSPO":  # said as a difference to GSPO
        words = [*dict(published())["GSPO"], *words]
    assert load(file, words).algorithm != Algorithm() or name == "GRPO"


def test_every_name_stands_on_the_algorithms_page() -> None:
    names = [*ESTIMATORS, *TOKEN_LEVEL, *algorithms.OBJECTIVES, *get_args(CorrectionName)]
    page = ALGORITHMS.read_text()
    assert [name for name in names if f"`{name}`" not in page] == []
