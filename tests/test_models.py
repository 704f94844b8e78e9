"""Each architecture: packed log-probabilities, entropies and gradients are the plain model's; what cannot be is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config

from tests.architectures import ARCHITECTURES, BASE, WINDOW, make_architecture
from tests.engines import (
    SIZES,
    engine_config,
    load_engine,
    load_policy,
    plain_model,
    plan_each,
    put,
    random_groups,
    world,
)
from tests.test_packed import assert_equal, gradients, groups_of, separately, together
from vime.store.shared_memory import SharedMemoryStore
from vime.training.policy import load_model
from vime.training.selfcheck import ModelRefused

GROUPS = groups_of((5, [3, 2 * WINDOW, 1]), (WINDOW + 3, [WINDOW + 4, 2]), (1, [6]))  # also past the window


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_log_probabilities_and_gradients_are_the_plain_models(name: str, tmp_path: Path) -> None:
    plain = plain_model(make_architecture(tmp_path, name))
    policy = load_policy(tmp_path).train()
    mine, theirs = together(policy, GROUPS), separately(plain, GROUPS)
    assert_equal(mine, theirs)
    found, wanted = gradients(policy.model, *mine), gradients(plain, *theirs)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=3e-5)


def saved(folder: Path, kind: str, **options: Any) -> Path:
    world()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(BASE | options))).save_pretrained(folder)
    return folder


MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
OUTSIDE = "has layers (of|whose tokens meet outside transformers' attention interface, made of)"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "recurrent layers in between": ("qwen3_next", {"num_experts": 4}, f"{OUTSIDE} .*(linear_attention|GatedDeltaNet)"),
    "recurrent state beside attention": ("falcon_h1", MAMBA, f"{OUTSIDE} hybrid|packed differs .*FalconH1Mixer"),
    "no attention at all": ("mamba", {"state_size": 8}, f"{OUTSIDE} .*(linear_attention|MambaMixer)"),
    "attention of its own": ("bloom", {"n_layer": 2, "n_head": 4}, f"{OUTSIDE} BloomAttention"),
    "a window that only the mask knows": ("phimoe", {"sliding_window": 64, "num_local_experts": 4}, "packed differs"),
    "attention that selects keys": ("glm_moe_dsa", {"index_topk": 4}, "indexed_attention|cannot be computed packed"),
    "layers that keep what they are given": ("nemotron", {}, "does not pass on"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_model_that_packing_would_make_wrong_is_refused_when_it_is_loaded(case: str, tmp_path: Path) -> None:
    kind, options, message = REFUSED[case]
    with pytest.raises(ModelRefused, match=message):
        load_model(saved(tmp_path, kind, **options))


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="t5 is an encoder-decoder"):
        load_model(tmp_path)


def test_remote_code_and_quantised_weights_are_refused(tmp_path: Path) -> None:
    make_architecture(tmp_path, "llama")
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ModelRefused, match=r"its weights are quantised \(mxfp4\).*dequantize"):
        load_model(tmp_path)
    change_config(tmp_path, model_type="nobodys", auto_map={"AutoConfig": "its_own.Config"})
    with pytest.raises(ModelRefused, match="code from the model's folder is not run"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_row_so_long_that_rotary_frequencies_would_change_is_refused(kind: str, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16} if kind == "longrope" else {}
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 20, **factors}
    folder = saved(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=40 if kind == "longrope" else 20)
    policy, plain = load_policy(folder), plain_model(folder)
    short = groups_of((12, [8, 3]), (4, [5]))
    assert_equal(together(policy, short), separately(plain, short))
    with pytest.raises(ModelRefused, match=r"has 21 tokens; beyond 20 .* vllm.max-model-len = 20"):
        together(policy, groups_of((12, [10]), (4, [5])))


def multimodal(folder: Path) -> Path:
    world()
    text = BASE | ARCHITECTURES["gemma3"][1]
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text,
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=280,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_of_a_model_that_also_sees_the_text_is_trained(tmp_path: Path) -> None:
    folder = multimodal(tmp_path / "model")
    plain, policy = plain_model(folder), load_policy(folder)
    assert_equal(together(policy, GROUPS), separately(plain, GROUPS))

    store = SharedMemoryStore(tmp_path / "store")
    config = engine_config(folder)
    engine = load_engine(config, store)
    engine.train(plan_each(config, [put(store, random_groups(0, SIZES[0]))]), 1)
    engine.export(str(tmp_path / "trained"), "float32")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "trained"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "vision" not in name and "multi_modal" not in name}
