"""The configuration of ``vime sft`` and ``vime reward-model``: training on given conversations, without servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vime.config.base import NonNegative, Positive, Section
from vime.config.data import Source, TrainingData
from vime.config.sections import (
    Algorithm,
    Checkpoint,
    Config,
    Log,
    Lora,
    Model,
    Rollout,
    Run,
    RunFolder,
    Trainer,
)


class Passes(RunFolder):
    """Where the run lives and how long it is."""

    epochs: Positive = 1
    """passes over the data; each in another order"""
    steps: Positive | None = None
    """optimizer steps; default: those of `epochs`"""


class Conversations(Source):
    """Where conversations come from. A row is a list of messages, or a prompt and its response; for a reward model a chosen
    and a rejected one."""

    messages_key: str = "messages"
    """sft: column with whole conversations, lists of {role, content}; rows without it have a prompt and a response"""
    response_key: str = "response"
    """sft: column with the response to the prompt: text, or a list of messages; `answer` for reasoning-gym"""
    chosen_key: str = "chosen"
    """reward model: column with the better response to the prompt, or, in rows without a prompt, the better conversation"""
    rejected_key: str = "rejected"
    """reward model: the same for the worse"""
    tools_key: str = "tools"
    """column with the tools that the chat template is given, where there is one: a list, or JSON text"""


class HeldOutSet(Conversations):
    """Conversations that are not trained on."""

    every: NonNegative | None = None
    """steps between its evaluations; default: eval.every"""


class HeldOut(Section):
    """Mean loss on held-out conversations at the start, on an interval and at the end."""

    every: NonNegative = 0
    """steps between evaluations; 0: only at the start and the end"""
    at_start: bool = True
    """before the first step"""
    sets: dict[str, HeldOutSet] = Field(default_factory=dict)
    """evaluation sets by name: `[eval.sets.NAME]`; training rows with the prompt of one of theirs are left out"""


class Batches(Section):
    """How conversations become optimizer steps."""

    size: Positive = 32
    """sequences an optimizer step; pairs for a reward model"""
    max_length: Positive = 2048
    """tokens of a sequence at most; none is ever cut"""
    too_long: Literal["drop", "refuse"] = "drop"
    """longer sequences are left out and counted, or stop the run before it starts"""
    reduction: Literal["token", "sequence"] = "token"
    """sft: mean over the step's trained tokens, or over its sequences of their token means"""


class Supervised(Section):
    """All sections of ``vime sft`` and ``vime reward-model``."""

    run: Passes = Passes()
    model: Model
    data: Conversations
    batch: Batches = Batches()
    trainer: Trainer = Trainer()
    lora: Lora = Lora()
    eval: HeldOut = HeldOut()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()

    def engine(self, objective: str) -> Config:
        """The same for the trainer: ``objective`` is "sft" or "bradley_terry"."""
        return Config(
            model=self.model,
            data=TrainingData(source=self.data.source),
            algorithm=Algorithm(advantage="constant", objective=objective, reduction=self.batch.reduction),
            trainer=self.trainer,
            lora=self.lora,
            run=Run(seed=self.run.seed),
            rollout=Rollout(max_tokens=self.batch.max_length),  # from which memory is predicted
        )
