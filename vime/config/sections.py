"""The typed configuration: one class a section, every option explained where it is defined.

Imports no torch, so that ``--help`` and ``--dry-run`` are instant. The model's shape is not written here: it is read from
the model folder's own ``config.json``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Flag = str | int | float | bool | list[str | int | float]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Run(Section):
    """Where the run lives and how long it is."""

    dir: str = "runs/default"
    """folder of everything the run writes: config, logs, metrics, samples, checkpoints, report"""
    steps: Positive = 100
    """training steps; one step is one batch of groups, one or more optimizer steps, one weight sync"""
    seed: NonNegative = 0
    """seeds the prompt order and the servers' sampling; a generated data set has its own"""
    time_limit_minutes: Annotated[float, Field(gt=0)] | None = None
    """stop cleanly (evaluate, checkpoint, report) after the step in which this much time has passed"""


class Model(Section):
    """The policy: a Hugging Face folder."""

    path: str
    """folder with config.json, safetensors and tokenizer; `vime model smollm2 DIR` makes a small one"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """dtype of the forward and backward passes and of the served weights; master weights are always float32"""


class DataSet(Section):
    """Where prompts come from."""

    source: str
    """`reasoning-gym:NAME`, a .jsonl, .json or .parquet file, or a folder that `datasets` can load"""
    size: Positive | None = None
    """number of prompts; needed by generated sources, cuts the others"""
    seed: NonNegative = 0
    """seed of a generated source; train and evaluation must differ"""
    options: dict[str, Any] = {}
    """options of a generated source, by its own names; `split` for what `datasets` loads"""
    prompt_key: str = "prompt"
    """column with the prompt: text, or a list of chat messages"""
    answer_key: str = "answer"
    """column with the reference answer, where there is one"""
    system: str | None = None
    """system message put before prompts that have none"""
    template: str | None = None
    """format string around a text prompt, e.g. `"{prompt} Reply with a number."`"""


class EvalSet(DataSet):
    """A held-out set and how it is sampled."""

    samples: Positive = 1
    """responses a prompt; k of pass@k"""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy"""
    max_tokens: Positive | None = None
    """response tokens at most; default: rollout.max_tokens"""


class Evaluation(Section):
    """Evaluation at the start, on an interval and at the end."""

    every: NonNegative = 0
    """steps between evaluations; 0: only at the start and the end"""
    pass_reward: float = 1.0
    """a response passes when its reward is at least this"""
    sets: dict[str, EvalSet] = {}
    """evaluation sets by name: `[eval.sets.NAME]`"""


class Rollout(Section):
    """How responses are sampled."""

    groups: Positive = 16
    """prompts a step"""
    samples_per_group: Positive = 8
    """responses a prompt; advantages are formed over them"""
    max_tokens: Positive = 256
    """response tokens at most"""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """sampling temperature; the trainer divides its logits by the same"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """only 1: the trainer's log-probabilities are over the whole vocabulary"""
    top_k: int = -1
    """only -1: as top_p"""
    stop_token_ids: list[int] = []
    """further tokens that end a response, beside the model's own"""
    max_staleness: NonNegative = 0
    """versions a trained token may be behind; 0 is the synchronous loop"""
    filter: Literal["none", "zero_variance"] = "none"
    """zero_variance: a group whose rewards are all equal is dropped, counted, and replaced by another prompt"""
    max_refills: NonNegative = 4
    """batches' worth of extra prompts a step may take to replace filtered groups before it trains on fewer"""
    concurrency: Positive = 256
    """requests in flight at most"""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600
    """deadline of one response"""
    retries: NonNegative = 2
    """how often a sample that failed (server error, missing log-probabilities) is asked for again"""


class RewardSection(Section):
    """What a response is worth."""

    function: str = "exact"
    """a built-in name, `package.module:function` or `file.py:function`; called as f(task, response_text)"""
    options: dict[str, Any] = {}
    """options of the built-in"""
    timeout_s: Annotated[float, Field(gt=0)] = 30
    """deadline of one call"""


class Algorithm(Section):
    """GRPO and its pieces."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """grpo: (r - mean)/(std + 1e-6) of the group; dr_grpo: r - mean; rloo: r - mean of the others"""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """the ratio is clipped below 1 - clip_low"""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """the ratio is clipped above 1 + clip_high"""
    old_logprobs: Literal["proximal", "behaviour"] = "proximal"
    """denominator of the ratio: the trainer's own before the step, or the server's"""
    reduction: Literal["token", "sequence"] = "token"
    """token: mean over all trained tokens of the batch; sequence: mean over sequences of their token means"""
    updates: Positive = 1
    """optimizer steps a batch; groups are split evenly between them"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus"""


class Trainer(Section):
    """The torch engine."""

    ranks: Positive = 1
    """trainer processes; parameters, gradients and optimizer state are sharded over them (FSDP2)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one"""
    tokens_per_micro_batch: Positive = 4096
    """budget of a packed micro-batch in tokens; a longer sequence is alone in its own"""
    logprob_chunk: Positive = 512
    """response tokens whose logits exist at once"""
    activation_checkpointing: bool = False
    """recompute each layer in the backward pass: less memory, about a third more time"""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """peak learning rate"""
    schedule: Literal["constant", "cosine"] = "constant"
    """after the warm-up"""
    warmup_steps: NonNegative = 0
    """optimizer steps of linear warm-up"""
    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """where the cosine ends"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """of matrices; vectors (norms, biases) have none"""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's"""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's"""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """gradients are scaled down to this global norm"""
    threads: NonNegative = 0
    """CPU threads a rank; 0: the machine's cores divided by the ranks"""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300
    """deadline of the start of the ranks, model included"""
    step_timeout_s: Annotated[float, Field(gt=0)] = 3600
    """deadline of one command to the trainer"""


class Inference(Section):
    """Which servers generate. Their flags are in [vllm] and [router]."""

    servers: Positive = 1
    """servers to start on this machine; more than one get a router in front"""
    urls: list[str] = []
    """servers that run already (control and requests go there); then none is started"""
    gpus_per_server: NonNegative = 1
    """devices given to each server on a machine with GPUs; 0: all see all"""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600
    """deadline of readiness"""
    control_timeout_s: Annotated[float, Field(gt=0)] = 300
    """deadline of one control call: pause, update, resume"""
    env: dict[str, str] = {}
    """further environment variables of the servers"""


class Weights(Section):
    """How new weights reach the servers, and how that is proved."""

    channel: Literal["shared_memory"] = "shared_memory"
    """shared_memory: safetensors in a memory-backed folder of the same host"""
    dir: str = "/dev/shm"
    """the memory-backed folder"""
    probe_prompts: Positive = 4
    """prompts of the probe after each sync"""
    probe_tokens: Positive = 8
    """tokens sampled for each of them"""
    probe_max_mean_diff: Annotated[float, Field(gt=0)] | None = None
    """bound on the mean absolute log-probability difference; default 1e-3 in float32 (1e-2 on GPUs), 0.15 in bfloat16"""


class Checkpoint(Section):
    """What survives."""

    every: NonNegative = 20
    """steps between checkpoints; 0: only at the end"""
    keep: Positive = 2
    """newest checkpoints kept, beside the best"""
    best_metric: str | None = None
    """evaluation metric whose best checkpoint is kept, e.g. `eval/test/pass@1`; default: the first set's pass@1"""


class Log(Section):
    """Where metrics go, beside metrics.jsonl and TensorBoard."""

    sinks: list[Literal["wandb", "trackio"]] = []
    """further sinks"""
    samples_per_step: NonNegative = 8
    """training samples whose text is kept each step; evaluation samples are all kept"""


class Config(Section):
    """All sections."""

    run: Run = Run()
    model: Model
    data: DataSet
    rollout: Rollout = Rollout()
    reward: RewardSection = RewardSection()
    algorithm: Algorithm = Algorithm()
    trainer: Trainer = Trainer()
    inference: Inference = Inference()
    vllm: dict[str, Flag] = {}
    """any flag of the vLLM server, by its own name"""
    router: dict[str, Flag] = {}
    """any flag of vllm-router, by its own name"""
    weights: Weights = Weights()
    eval: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
