"""Launch scripts of slime and vime become configurations: what bash would make of them, and what becomes of each flag."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from vime.cli import main
from vime.config.load import options
from vime.config.sections import Config
from vime.migrate import rules, table
from vime.migrate.convert import MAPPED, MISSING, NOTHING, UNKNOWN, Migration, migrate
from vime.migrate.script import Script, ScriptError
from vime.slime.flags import OPTIONS

SCRIPTS = Path(__file__).parent / "scripts"


def of(text: str, folder: Path, **files: str) -> Migration:
    for name, content in files.items():
        (folder / name).write_text(content)
    (folder / "run.sh").write_text(text)
    return migrate(folder / "run.sh")


def flags_of(text: str, folder: Path) -> dict[str, list[str]]:
    (folder / "run.sh").write_text(text)
    return {flag.name: flag.values for flag in Script(folder / "run.sh").flags()}


@pytest.fixture(scope="module")
def dense() -> Migration:
    return migrate(SCRIPTS / "grpo-dense.sh")


def test_a_dense_model_with_shared_devices(dense: Migration) -> None:
    found = tomllib.loads(dense.toml)
    assert dense.faults == []
    assert found["run"] == {"dir": "runs/dense-run", "steps": 400}
    assert found["rollout"] | {"concurrency": 256} == {
        "groups": 64, "samples_per_group": 8, "max_tokens": 4096, "temperature": 0.9, "concurrency": 256,
    }  # fmt: skip
    algorithm = found["algorithm"]
    assert algorithm["updates"] == 4 and algorithm["clip_low"] == algorithm["clip_high"] == 0.2
    assert algorithm["kl_coef"] == 0.001 and algorithm["kl_in"] == "loss"
    assert algorithm["kl_estimator"] == "low_variance" and algorithm["reduction"] == "rollout"
    assert found["trainer"]["ranks"] == 4 and found["trainer"]["tensor_parallel"] == 2
    assert found["trainer"]["betas"] == [0.9, 0.98] and found["trainer"]["activation_checkpointing"] == "full"
    assert found["inference"] == {"servers": 2, "gpus_per_server": 2}
    assert found["vllm"]["gpu-memory-utilization"] == 0.7
    assert found["vllm"]["cudagraph-capture-sizes"] == [1, 2, 4, 8, 16, 32, 48, 64]
    assert [*found["eval"]["sets"]] == ["aime", "hard"]
    assert found["eval"]["sets"]["hard"]["samples"] == 4 and found["eval"]["sets"]["hard"]["max_tokens"] == 8192
    assert found["reward"] == {"function": "math_verify"}


def test_turns_with_tools_one_batch_ahead(tmp_path: Path) -> None:
    made = migrate(SCRIPTS / "async-tools.sh")
    found = tomllib.loads(made.toml)
    rows = {row.flag: row for row in made.rows}
    assert found["slime"] == {
        "custom_generate_function_path": "my_agent.turns.generate",
        "custom_rm_path": "my_agent.judge.score",
        "reward_key": "score",
        "rollout_sample_hook_path": ["my_agent.hooks.trim", "my_agent.hooks.tag"],
        "args": {"max_turns": 6, "tool_url": "http://localhost:9000", "limits": [1, 2]},
        "dynamic_sampling_filter_path": "my_agent.filters.hard_enough",
    }
    assert found["rollout"]["max_staleness"] == 1 and found["rollout"]["stop_token_ids"] == [151645, 151643]
    assert found["algorithm"]["corrections"] == {"tis": {"low": 0.1, "high": 2.5}}
    assert found["algorithm"]["kl_in"] == "reward" and found["algorithm"]["advantage"] == "reinforce_pp_baseline"
    assert found["trainer"]["learning_rate"] == 5e-7 and found["trainer"]["warmup_steps"] == 40
    assert found["inference"]["servers"] == 4 and found["trainer"]["ranks"] == 4
    assert (
        rows["--rollout-temprature"].verdict == UNKNOWN and "rollout-temperature" in rows["--rollout-temprature"].note
    )
    assert rows["--prompt-data"].verdict == MISSING and "data.source is missing" in made.faults[0]
    assert "2 times" in rows["--lr"].note and "not shown" in rows["--wandb-key"].value
    assert rows["--vllm-dtype"].verdict == MISSING and "model.dtype" in rows["--vllm-dtype"].note


def test_a_mixture_of_experts_with_the_parts_of_dapo() -> None:
    made = migrate(SCRIPTS / "moe-dapo.sh")
    found = tomllib.loads(made.toml)
    rows = {row.flag: row for row in made.rows}
    assert made.faults == []
    algorithm = found["algorithm"]
    assert (algorithm["advantage"], algorithm["objective"], algorithm["reduction"]) == ("dr_grpo", "gspo", "token")
    assert algorithm["router_replay"] == "server" and algorithm["router_aux_coef"] == 1e-3 and algorithm["mask_stale"]
    assert algorithm["corrections"] == {"icepop": {"low": 0.5, "high": 5.0}, "opsm": {"high": 0.05}}
    assert found["rollout"]["filter"] == "zero_variance" and "num-rollout" not in made.toml
    assert rows["--num-experts"].verdict == NOTHING and "config.json" in rows["--num-experts"].note
    assert rows["--rollout-top-p"].verdict == MISSING and rows["--fp8-format"].verdict == MISSING
    assert rows["--expert-model-parallel-size"].verdict == MISSING and rows["--group-rm"].verdict == MISSING
    assert rows["--num-epoch"].verdict == MISSING and "rows x 2 // 32" in rows["--num-epoch"].note
    assert found["vllm"]["enable-prefix-caching"] is False


@pytest.mark.parametrize("script", ["grpo-dense", "async-tools", "moe-dapo"])
def test_every_flag_is_in_the_table_once_and_what_it_sets_is_in_the_file(script: str) -> None:
    made = migrate(SCRIPTS / f"{script}.sh")
    given = [flag.name for flag in Script(SCRIPTS / f"{script}.sh").flags()]
    assert [row.flag[2:].replace("-", "_") for row in made.rows] == given and len(given) > 30
    assert {row.verdict for row in made.rows} <= {MAPPED, NOTHING, MISSING, UNKNOWN}
    assert all(row.ours if row.verdict == MAPPED else row.note for row in made.rows)


BASH = [
    ('A=3\nB="${A}x$A"\npython train.py --a $B "--b=$A y"', {"a": ["3x3"], "b": ["3 y"]}),
    ("python train.py --a 1 \\\n  --b 2  # --c 3\n", {"a": ["1"], "b": ["2"]}),
    ("X=()\nX+=(--a 1)\nX+=(--b '$HOME')\npython train.py \"${X[@]}\"", {"a": ["1"], "b": ["$HOME"]}),
    ("A=${A:-7}\nB=${B-${A}0}\npython train.py --a $A --b ${B}", {"a": ["7"], "b": ["70"]}),
    ("N=4\npython train.py --a $((N * (2 + 1) - 5 % 3))", {"a": ["10"]}),
    ("python train.py --a ${NOT_SET} --b ${EMPTY:-} --c", {"a": ["${NOT_SET}"], "b": [], "c": []}),
    ("if [ 3 -gt 2 ]; then A=1; else A=2; fi\npython train.py --a $A", {"a": ["1"]}),
    ('if [[ "x" == "y" ]]; then A=1; elif [ -z "" ]; then A=2; else A=3; fi\npython train.py --a $A', {"a": ["2"]}),
    ("for i in 1 2; do\n A=$i\ndone\nA=${A:-0}\npython train.py --a $A", {"a": ["0"]}),
    ("ray job submit --x 1 -- python3 -m y slime/train.py --a -1 > out.log 2>&1", {"a": ["-1"]}),
    ("python train.py --a $(seq 2 2 6) --b $(hostname)", {"a": ["2", "4", "6"], "b": ["$(hostname)"]}),
    ("X=(\n --a 1 # one\n # --b 2\n\n --c 3)\npython train.py ${X[*]} ${NONE[@]}", {"a": ["1"], "c": ["3"]}),
]


@pytest.mark.parametrize(("script", "flags"), BASH, ids=range(len(BASH)))
def test_bash_is_read_as_bash_reads_it(script: str, flags: dict[str, list[str]], tmp_path: Path) -> None:
    assert flags_of(script, tmp_path) == flags


def test_nothing_is_run(tmp_path: Path) -> None:
    of(f"touch {tmp_path}/a\nB=$(touch {tmp_path}/b)\npython train.py --lr `touch {tmp_path}/c`", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sh"]


def test_a_sourced_file_that_is_not_there_is_noted(tmp_path: Path) -> None:
    made = of(
        'source "$(dirname "$0")/no.sh"\nsource ./yes.sh\npython train.py ${M[@]}', tmp_path, **{"yes.sh": "M=(--lr 1)"}
    )
    assert [note for note in made.notes if "no.sh is not there" in note] and made.rows[
        0
    ].ours == "trainer.learning_rate = 1.0"


def test_a_script_without_train_py_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"runs no train\.py"):
        of("echo hello", tmp_path)
    with pytest.raises(ScriptError, match="of line 2 has no end"):
        of("\nA=(1 2", tmp_path)


VALUES = [
    ("--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 8", {"algorithm.updates": 4}),
    ("--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 12", {}),
    ("--rollout-batch-size 6 --n-samples-per-prompt 4 --global-batch-size 6", {}),
    ("--eps-clip 0.1 --eps-clip-high 0.3", {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3}),
    ("--use-tis", {"algorithm.corrections.tis.low": 0.0, "algorithm.corrections.tis.high": 2.0}),
    ("--kl-loss-coef 0.1", {}),
    ("--kl-coef 0", {}),
    ("--advantage-estimator cispo", {"algorithm.objective": "cispo", "algorithm.advantage": "grpo"}),
    ("--advantage-estimator ppo --value-clip 0.3", {"algorithm.advantage": "gae", "critic.value_clip": 0.3}),
    ("--advantage-estimator grpo --value-clip 0.3", {"algorithm.advantage": "grpo"}),
    ("--custom-reward-post-process-path a.b", {"algorithm.advantage": "reward"}),
    (
        "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        {"rollout.max_staleness": 1},
    ),
    ("--rollout-function-path slime.rollout.sglang_rollout.generate_rollout", {}),
    (
        "--rollout-external-engine-addrs 10.0.0.1:80 10.0.0.2:80",
        {"inference.urls": ["http://10.0.0.1:80", "http://10.0.0.2:80"]},
    ),
    ("--vllm-compilation-config '{\"level\": 3}'", {"vllm.compilation-config": '{"level": 3}'}),
    ("--recompute-granularity selective", {"trainer.activation_checkpointing": "selective"}),
    ("--attention-dropout 0.1", {}),
    (
        "--colocate --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 2",
        {"trainer.ranks": 4, "inference.servers": 2},
    ),
    ("--colocate --actor-num-gpus-per-node 1", {"trainer.ranks": 1, "inference.servers": 1}),
    ("--save-interval 5", {"checkpoint.every": 5}),
    ("--skip-eval-before-train", {"eval.at_start": False}),
    (
        "--eval-prompt-data a b.jsonl --eval-top-p 0.7 --eval-top-k 20 --rollout-top-p 0.9",
        {"eval.sets.a.top_p": 0.7, "eval.sets.a.top_k": 20},
    ),
    ("--eval-prompt-data a b.jsonl --rollout-top-p 0.9", {"eval.sets.a.top_p": 0.9}),
    ("--use-tis --tis-level token --tis-clip 3", {"algorithm.corrections.tis.high": 3.0}),
]


@pytest.mark.parametrize(("words", "options"), VALUES, ids=range(len(VALUES)))
def test_values_are_converted(words: str, options: dict[str, object], tmp_path: Path) -> None:
    found = tomllib.loads(of(f"python train.py {words}", tmp_path).toml)
    for name, value in options.items():
        section, _, rest = name.partition(".")
        here = found[section]
        for part in rest.split(".") if section != "vllm" else [rest]:
            here = here[part]
        assert here == value, name
    if not options:
        assert found.keys() <= {"data", "algorithm", "rollout"} and "updates" not in found["algorithm"]
        assert not {"kl_coef", "kl_in"} & found["algorithm"].keys()


def test_a_kind_of_importance_ratio_that_is_not_there_is_told_with_what_is_near(tmp_path: Path) -> None:
    (row,) = [
        row for row in of("python train.py --use-tis --tis-level geometric", tmp_path).rows if row.flag == "--tis-level"
    ]
    assert row.verdict == MISSING and "mask_geometric" in row.note


def test_what_flags_are_mapped_to_is_there() -> None:
    known = {name for name, _, _ in options(Config)}
    assert {*OPTIONS.values()} <= known
    named = re.findall(
        r'"((?:algorithm|rollout|trainer|run|eval|log|inference)\.[a-z_.]+)"', Path(rules.__file__).read_text()
    )
    named += [native[0] for native in table.NATIVE_FUNCTIONS.values() if native]
    stars = {name.replace("NAME.low", "X").replace("NAME.high", "X") for name in known}
    for name in named:
        plain = re.sub(r"corrections\.\w+(\.\w+)?$", "corrections.X", name)
        assert plain in known or plain in stars, name


def test_no_flag_has_two_fates() -> None:
    reasons = [name for names in (*table.REASONS.values(), *table.MISSING.values()) for name in names]
    assert len(reasons) == len(set(reasons))
    others = {*OPTIONS, *rules.RULES, *table.SGLANG, *table.SGLANG_SWITCHES}
    assert not others & set(reasons)


def test_the_command_writes_the_file_and_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "c.toml"
    assert main(["migrate", str(SCRIPTS / "grpo-dense.sh"), "-o", str(target)]) == 0
    assert (
        target.read_text() == migrate(SCRIPTS / "grpo-dense.sh").toml and "--hf-checkpoint" in capsys.readouterr().out
    )
    assert main(["migrate", str(SCRIPTS / "async-tools.sh")]) == 1
    out, err = capsys.readouterr()
    assert tomllib.loads(out)["run"]["steps"] == 200 and "to do: data.source is missing" in err
    assert main(["migrate", str(tmp_path / "none.sh")]) == 2
    capsys.readouterr()
    assert main(["migrate", str(SCRIPTS / "grpo-dense.sh"), "-o", "/dev/full"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("vime: No space left on device; free some")
