"""Sample payloads: what is put is got back bit for bit, until it is dropped."""

from pathlib import Path

import numpy as np
import pytest

from vime.sample import Sample, VersionSpan
from vime.store.shared_memory import SharedMemoryStore, StoreError


def sample(prompt: int, response: int, seed: int) -> Sample:
    random = np.random.default_rng(seed)
    return Sample(
        random.integers(0, 200_000, prompt).tolist(),
        random.integers(0, 200_000, response).tolist(),
        np.float32(-random.exponential(size=response)).tolist(),
        (VersionSpan(0, 0, response),),
        "stop",
        "",
        loss_mask=random.integers(0, 2, response).tolist(),
    )


def test_rows_come_back_as_they_were_put(tmp_path: Path) -> None:
    store = SharedMemoryStore(tmp_path / "new" / "folder")
    samples = [sample(4, 3, 0), sample(4, 1, 1), sample(4, 9, 2)]
    store.put("7", samples)
    for row in (2, 0, 1):
        payload, wanted = store.get("7", row), samples[row]
        assert payload.prompt_ids.tolist() == wanted.prompt_ids and payload.prompt_ids.dtype == np.int32
        assert payload.response_ids.tolist() == wanted.response_ids and payload.response_ids.dtype == np.int32
        assert payload.logprobs.tolist() == wanted.logprobs and payload.logprobs.dtype == np.float32
        assert payload.loss_mask.tolist() == wanted.loss_mask and payload.loss_mask.dtype == np.uint8


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_experts_come_back_in_the_type_they_came_in_and_only_where_there_are_any(kind: type, tmp_path: Path) -> None:
    store = SharedMemoryStore(tmp_path)
    samples = [sample(2, 3, 0), sample(2, 4, 1)]
    samples[1].experts = np.arange(5 * 3 * 2).reshape(5, 3, 2).astype(kind)
    store.put("a", samples)
    assert store.get("a", 0).experts is None
    experts = store.get("a", 1).experts
    assert experts is not None and experts.dtype == kind and np.array_equal(experts, samples[1].experts)


def test_another_process_reads_the_same_folder(tmp_path: Path) -> None:
    SharedMemoryStore(tmp_path).put("a", [sample(2, 2, 0)])
    assert SharedMemoryStore(tmp_path).get("a", 0).prompt_ids.tolist() == sample(2, 2, 0).prompt_ids


def test_putting_a_key_again_replaces_it(tmp_path: Path) -> None:
    store = SharedMemoryStore(tmp_path)
    store.put("a", [sample(2, 2, 0)])
    store.put("a", [sample(3, 5, 1)])
    assert len(store.get("a", 0).response_ids) == 5


def test_a_dropped_payload_is_gone_and_others_stay(tmp_path: Path) -> None:
    store = SharedMemoryStore(tmp_path)
    for key in ("a", "b", "c"):
        store.put(key, [sample(1, 1, 0)])
    store.drop(["a", "c", "never put"])
    assert [path.name for path in tmp_path.iterdir()] == ["b.safetensors"]
    with pytest.raises(StoreError, match="payload a, row 0"):
        store.get("a", 0)


def test_nothing_but_whole_payloads_is_in_the_folder(tmp_path: Path) -> None:
    store = SharedMemoryStore(tmp_path)
    store.put("a", [sample(1, 1, 0)])
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_missing_row_is_named(tmp_path: Path) -> None:
    store = SharedMemoryStore(tmp_path)
    store.put("a", [sample(1, 1, 0)])
    with pytest.raises(StoreError, match=f"payload a, row 1, cannot be read from {tmp_path}"):
        store.get("a", 1)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\xff" * 64])
def test_a_corrupt_payload_is_named(tmp_path: Path, content: bytes) -> None:
    store = SharedMemoryStore(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(StoreError, match="payload a, row 0, cannot be read"):
        store.get("a", 0)


def test_a_payload_cut_short_is_refused(tmp_path: Path) -> None:
    store = SharedMemoryStore(tmp_path)
    store.put("a", [sample(50, 50, 0)])
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[:-10])
    with pytest.raises(StoreError, match="payload a, row 0"):
        store.get("a", 0)


def test_a_payload_that_cannot_be_written_is_named_with_the_fix(tmp_path: Path) -> None:
    store = SharedMemoryStore(tmp_path / "store")
    store.close()
    with pytest.raises(StoreError, match=r"payload a cannot be written to .*; free memory there"):
        store.put("a", [sample(1, 1, 0)])


def test_closing_removes_the_folder(tmp_path: Path) -> None:
    store = SharedMemoryStore(tmp_path / "store")
    store.put("a", [sample(1, 1, 0)])
    store.close()
    assert not (tmp_path / "store").exists()
