"""A model's weights stay in their files until each rank reads its own pieces: what is read is what transformers reads, and the
host's memory does not grow by the whole model on any rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3Config

from tests.architectures import make_architecture
from tests.engines import load_policy, plain_model, world
from tests.ranks import on_ranks
from tests.tiny import make_config
from vime.training.mesh import Mesh
from vime.training.parallel import parallelize
from vime.training.policy import Policy, load_critic, load_model
from vime.training.selfcheck import ModelRefused
from vime.training.stored import Stored, stored_weights

CPU = torch.device("cpu")


def values(module: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers, those that are not read yet read."""
    found = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return {name: tensor.read() if isinstance(tensor, Stored) else tensor for name, tensor in found}


# Tied, renamed and fused from single experts, with a router's correction that stays in float32, with a factor as a buffer.
@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "qwen3-moe", "glm4-moe", "gpt-oss", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_what_transformers_loads(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain = plain_model(make_architecture(tmp_path, name), dtype)
    torch.testing.assert_close(values(load_model(tmp_path, dtype)), values(plain), rtol=0, atol=0)


def test_a_box_of_a_tensor_is_read_alone(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    save_file({"matrix": matrix, "number": torch.tensor(2.0)}, tmp_path / "model.safetensors")
    stored = stored_weights(tmp_path)
    box = (slice(1, 3), slice(0, 2))
    assert torch.equal(stored["matrix"].detach().to(torch.bfloat16).read(box), matrix[box].bfloat16())
    assert torch.equal(torch.stack([stored["matrix"].T, stored["matrix"].T]).read((slice(1, 2),)), matrix.T[None])
    assert stored["number"].read() == 2.0


def test_weights_in_several_files_are_those_that_the_index_names(tmp_path: Path) -> None:
    folder = make_architecture(tmp_path, "qwen3")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="200KB")
    save_file({"model.norm.weight": torch.zeros(128)}, folder / "consolidated.safetensors")
    (folder / "model.safetensors").unlink()
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    torch.testing.assert_close(values(load_policy(folder).model), values(plain_model(folder)), rtol=0, atol=0)


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_that_is_saved_beside_the_embedding_is_tied_to_it_where_it_is_the_same(
    equal: bool, tmp_path: Path
) -> None:
    folder = make_architecture(tmp_path, "llama-tied")
    state = load_file(folder / "model.safetensors")
    head = state["model.embed_tokens.weight"] + (0.0 if equal else 1.0)
    save_file({**state, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    model = load_policy(folder).model
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == equal
    torch.testing.assert_close(values(model), values(plain_model(folder)), rtol=0, atol=0)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    folder = make_architecture(tmp_path, "llama")
    world()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match=r"holds no model.safetensors.*save_pretrained"):
        load_model(folder)


def test_a_reward_models_head_is_read(tmp_path: Path) -> None:
    world()
    folder = make_architecture(tmp_path / "policy", "qwen3")
    torch.manual_seed(1)
    plain: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    plain.save_pretrained(tmp_path / "reward")
    critic = load_critic(tmp_path / "reward")
    assert torch.equal(critic.head.weight, plain.score.weight)
    torch.testing.assert_close(values(critic.model), values(plain.model), rtol=0, atol=0)


# Memory


class Peak:
    """The most bytes of its own (no files' pages) that this process has had beyond those at the start, looked at every 2 ms."""

    def __enter__(self) -> Peak:
        self.start = self.bytes = self.now()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.bytes = max(self.bytes, self.now()) - self.start

    def watch(self) -> None:
        while not self.ended.wait(0.002):
            self.bytes = max(self.bytes, self.now())

    @staticmethod
    def now() -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) << 10


def load_watched(rank: int, folder: str, sizes: dict[str, int]) -> tuple[int, int]:
    """Bytes of the rank's own parameters in float32, and its peak while it loads them."""
    load_model(Path(folder) / "small")  # what loading takes for the first time is not the model's
    config = make_config(Path(folder), trainer=sizes)
    mesh = Mesh(config.trainer, "cpu")
    with Peak() as peak:
        policy = parallelize(Policy(load_model(Path(folder) / "large")), mesh, CPU, torch.float32)
    dist.barrier()
    return sum(parameter.to_local().nbytes for parameter in policy.parameters()), peak.bytes  # type: ignore[attr-defined]


@pytest.mark.parametrize("sizes", [{"ranks": 4}, {"ranks": 4, "tensor_parallel": 2}], ids=["fsdp4", "fsdp2-tp2"])
def test_a_rank_takes_little_more_than_its_own_parameters_while_it_loads(sizes: dict[str, int], tmp_path: Path) -> None:
    """Stored in bfloat16, loaded in float32, so that no rank can leave them in the file's pages; rank 0 checks the model too, a
    layer at a time."""
    for name, layers in (("small", 1), ("large", 16)):
        shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": layers, "vocab_size": 1024}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
        config = Qwen3Config(**shape, **heads, bos_token_id=None, eos_token_id=None)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        drawn = {
            key: torch.randn(tensor.shape, dtype=torch.bfloat16) / 30 for key, tensor in model.state_dict().items()
        }
        (tmp_path / name).mkdir()
        config.save_pretrained(tmp_path / name)
        save_file(drawn, tmp_path / name / "model.safetensors", {"format": "pt"})
    whole = sum(2 * tensor.nbytes for tensor in drawn.values())
    layer = whole // 16
    for own, peak in on_ranks(4, load_watched, str(tmp_path), sizes):
        assert own < 0.6 * whole
        assert own / 2 < peak < own + layer + (16 << 20), (own, peak, whole)
