"""The data of ``vime sft`` and ``vime reward-model`` in tokens, and what there is to say of it before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime.config.supervised import Supervised
from vime.data.conversations import load_conversations
from vime.data.examples import Example, make_examples
from vime.data.sources import split_held_out
from vime.data.turns import Turns


class Data:
    """The training examples, ``train``, the evaluation sets, ``held_out``, by name, and the tokenizer that made them."""

    def __init__(self, config: Supervised, tokenizer: Any, pairs: bool) -> None:
        self.config, self.tokenizer, self.pairs = config, tokenizer, pairs
        sets = {name: load_conversations(section, pairs) for name, section in config.eval.sets.items()}
        train = split_held_out(load_conversations(config.data, pairs), [t for tasks in sets.values() for t in tasks])
        turns = Turns(tokenizer)
        found = {
            name: make_examples(tasks, turns, pairs, config.batch)
            for name, tasks in ({"data": train} | {f"eval.sets.{name}": tasks for name, tasks in sets.items()}).items()
        }
        self.train = found["data"][0]
        self.held_out = {name: found[f"eval.sets.{name}"][0] for name in sets}
        self.sizes = {name: (len(examples), dropped) for name, (examples, dropped) in found.items()}

    @property
    def dropped(self) -> int:
        return sum(dropped for _, dropped in self.sizes.values())

    @property
    def drawn(self) -> int:
        """How many examples the whole run takes."""
        run, size = self.config.run, self.config.batch.size
        return run.steps * size if run.steps else run.epochs * len(self.train)

    @property
    def steps(self) -> int:
        return -(-self.drawn // self.config.batch.size)

    def notes(self) -> list[str]:
        """How much there is of what, and what is amiss."""
        unit, limit = "pairs" if self.pairs else "sequences", self.config.batch.max_length
        lines = [
            f"{name}: {size} {unit}" + (f", {dropped} more dropped, over {limit} tokens" if dropped else "")
            for name, (size, dropped) in self.sizes.items()
        ]
        return lines if self.pairs else [*lines, *no_end(self.config.model.path, self.tokenizer, self.train)]

    def padding(self) -> int | None:
        """Makes a token with which no conversation ends the tokenizer's padding, its own if possible; None without one."""
        last = {int(ids[-1]) for example in self.train for ids, _ in example.responses}
        tokenizer = self.tokenizer
        candidates = [tokenizer.pad_token_id, tokenizer.unk_token_id, *tokenizer.all_special_ids]
        found = next((token for token in candidates if token is not None and token not in last), None)
        tokenizer.pad_token = None if found is None else tokenizer.convert_ids_to_tokens(found)
        return found


def no_end(model: str, tokenizer: Any, examples: Sequence[Example]) -> list[str]:
    """A line where responses end with a token at which a server of this model does not stop."""
    from transformers import AutoConfig, GenerationConfig

    own = Path(model, "generation_config.json").exists()
    stops = (GenerationConfig if own else AutoConfig).from_pretrained(model, local_files_only=True).eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    last = sorted({int(example.responses[0][0][-1]) for example in examples} - set(stops))
    named = ", ".join(f"{token} ({tokenizer.decode([token])!r})" for token in last[:5])
    warning = (
        f"responses end with token {named} and a server of this model stops at {stops}: set rollout.stop_token_ids"
    )
    return [f"{warning} in vime train, or eos_token_id in generation_config.json"] if last else []


def marked(example: Example, tokenizer: Any) -> str:
    """An example as text, with what is learned between »« marks."""
    ids, mask = (array.tolist() for array in example.responses[0])
    text, start = tokenizer.decode(example.prompt_ids), 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or mask[place] != mask[start]:
            part = tokenizer.decode(ids[start:place])
            text += f"»{part}«" if mask[start] else part
            start = place
    return text
