"""The typed configuration: one class a section, every option explained where it is defined.

Imports no torch, so that ``--help`` and ``--dry-run`` are instant. The model's shape is not written here: it is read from
the model folder's own ``config.json``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vime.config.base import Fraction, NonNegative, Positive, Section
from vime.config.data import EvalSet, TrainingData
from vime.config.slime import Slime

Flag = str | int | float | bool | list[str | int | float]


class RunFolder(Section):
    """Where a run lives."""

    dir: str = "runs/default"
    """folder of everything the run writes: config, logs, metrics, samples, checkpoints, report"""
    seed: NonNegative = 0
    """seeds the order of the data and the servers' sampling; a generated data set has its own"""
    time_limit_minutes: Annotated[float, Field(gt=0)] | None = None
    """stop cleanly (evaluate, checkpoint, report) after the step in which this much time has passed"""


class Run(RunFolder):
    """Where the run lives and how long it is."""

    deterministic: bool = False
    """the same samples, losses and weights each time, on the CPUs of one machine, also after a resume; only for the synchronous
    loop with one server (docs/rollout.md)"""
    steps: Positive = 100
    """training steps; one step is one batch of groups, one or more optimizer steps, one weight sync"""


class Model(Section):
    """The policy: a Hugging Face folder."""

    path: str
    """folder with config.json, safetensors and tokenizer; `vime model smollm2 DIR` makes a small one"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """dtype of the forward and backward passes and of the served weights; master weights have trainer.master_dtype"""


class Evaluation(Section):
    """Evaluation at the start, on an interval and at the end."""

    every: NonNegative = 0
    """steps between evaluations; 0: only at the start and the end"""
    at_start: bool = True
    """before the first step; without it there is nothing to compare the end with"""
    background: bool = False
    """training goes on meanwhile; what is measured are the weights of the evaluation's step all the same (docs/evaluation.md)"""
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
    generate: str = "single_turn"
    """what makes a response: single_turn, or your own `package.module:function` or `file.py:function`, called as
    f(context, task); docs/generate.md"""
    generate_timeout_s: Annotated[float, Field(gt=0)] = 3600
    """deadline of one call of your own"""
    max_tokens: Positive = 256
    """response tokens at most; of many turns, of all of them together and what the policy is told between them"""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """sampling temperature; the trainer divides its logits by the same"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """only 1: the trainer's log-probabilities are over the whole vocabulary"""
    top_k: int = -1
    """only -1: as top_p"""
    stop_token_ids: list[int] = []
    """further tokens that end a response, beside the model's own"""
    max_staleness: NonNegative = 0
    """versions a trained token may be behind; 0 is the synchronous loop, with more groups are made while the trainer learns"""
    stale: Literal["wait", "drop", "mask"] = "wait"
    """responses that max_staleness is too small for; wait: a batch waits for them, so that none is lost; drop: their groups are
    dropped and counted, which leans to short responses; mask: their too old tokens are not trained"""
    in_flight: Literal["recompute", "keep_cache", "abort", "finish"] = "recompute"
    """what becomes of responses under way when new weights come: recompute: they go on, their cache computed anew; keep_cache:
    they go on with the cache of the old weights; abort: they stop and are continued as new requests; finish: they end first"""
    incomplete_groups: Literal["train", "drop"] = "train"
    """groups of which some samples failed; train: on those that are left, two at least where the advantage compares them;
    drop: counted as failed and replaced, as all smaller ones are"""
    filter: Literal["none", "zero_variance", "accuracy_band"] = "none"
    """groups that are dropped, counted, and replaced by other prompts; zero_variance: all rewards are equal; accuracy_band:
    the share of responses that pass is outside accuracy_low and accuracy_high"""
    accuracy_low: Fraction = 0.01
    """accuracy_band: a group is kept when at least this share of its responses passes (eval.pass_reward, before shaping)"""
    accuracy_high: Fraction = 0.99
    """accuracy_band: and at most this share"""
    max_refills: NonNegative = 4
    """batches' worth of extra prompts a step may take to replace filtered groups before it trains on fewer"""
    concurrency: Positive | Literal["auto"] = "auto"
    """requests in flight at most; how many there are follows the servers' load (docs/inference.md); auto: as many as they take"""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600
    """deadline of one response"""
    retries: NonNegative = 2
    """how often a sample that failed (server error, missing log-probabilities) is asked for again; not counting failures at
    the loss of a server"""


class RewardFunction(Section):
    """A reward under a name that rows may give in their reward column."""

    function: str
    """as reward.function; a task to which it does not apply gets None from it"""
    options: dict[str, Any] = {}
    """options of the built-in"""
    group: bool = False
    """as reward.group"""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """deadline of one call; default: reward.timeout_s"""


class RewardPart(RewardFunction):
    """One of several rewards."""

    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """factor in the sum; 0: the part is only logged"""


class RewardSection(Section):
    """What a response is worth."""

    @property
    def shaped(self) -> bool:
        """Whether training rewards are shaped by length."""
        return self.overlong_buffer > 0 or self.length_penalty > 0

    function: str = "exact"
    """a built-in name, `package.module:function` or `file.py:function`; called as f(task, response_text). Several rewards are
    `[reward.parts.NAME]` instead"""
    options: dict[str, Any] = {}
    """options of the built-in"""
    group: bool = False
    """the function is called once a group, as f(task, responses), when all of it is there, and returns a list"""
    timeout_s: Annotated[float, Field(gt=0)] = 30
    """deadline of one call"""
    retries: NonNegative = 1
    """how often a call is made again that was late or whose worker ended; one that raises is not"""
    workers: Positive = 2
    """processes in which rewards run; plain functions one at a time in each, and as many more for async ones"""
    concurrency: Annotated[int, Field(gt=0, le=256)] = 256
    """calls of async functions that run side by side in one process; for a judge or a reward server that bears fewer"""
    memory_mb: Positive = 4096
    """memory that one of them may use, its imports included"""
    overlong_buffer: NonNegative = 0
    """in training, the reward falls linearly over the last so many tokens before rollout.max_tokens; 0: not"""
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """how far it falls"""
    length_penalty: Annotated[float, Field(ge=0)] = 0.0
    """in training, weight of a term from 0.5 for the shortest response of a group to -0.5 for its longest; 0: none"""
    parts: dict[str, RewardPart] = {}
    """instead of function: several rewards, whose weighted sum is the reward: `[reward.parts.NAME]`"""
    named: dict[str, RewardFunction] = {}
    """further rewards, for the rows that name them: `[reward.named.NAME]`"""


class Tool(Section):
    """What generate functions call as `await context.tool(NAME, ...)`; it runs in worker processes."""

    function: str
    """the built-in `python`, or your own `package.module:function` or `file.py:function`, of any JSON arguments and result"""
    options: dict[str, Any] = {}
    """options of the built-in"""
    timeout_s: Annotated[float, Field(gt=0)] = 30
    """deadline of one call"""
    retries: NonNegative = 0
    """how often a call is made again that was late or whose worker ended; only for tools that may run twice"""
    workers: Positive = 2
    """processes in which it runs; a plain function one call at a time in each"""
    memory_mb: Positive = 4096
    """memory that one of them may use, its imports included"""


class Correction(Section):
    """Bounds of one off-policy correction; the defaults are its own (docs/algorithms.md)."""

    low: Annotated[float, Field(ge=0)] | None = None
    """lower bound of the importance ratio"""
    high: Annotated[float, Field(gt=0)] | None = None
    """upper bound of the importance ratio; of opsm: of the mean log-probability drift"""


CorrectionName = Literal["tis", "tis_sequence", "mis", "icepop", "mask_geometric", "mask_worst", "opsm"]


class Algorithm(Section):
    """How rewards become a loss. Every name with its formula and source: docs/algorithms.md."""

    advantage: str = "grpo"
    """grpo, dr_grpo, rloo, maxrl, grpo_batch_std, batch_norm, reinforce_pp, reinforce_pp_baseline, gae (needs [critic]),
    reverse_kl (needs [teacher]), pair (for dpo), constant, reward, or your own `module:function`"""
    objective: str = "ppo"
    """ppo, gspo, cispo, sapo, policy_gradient, dppo_tv, dppo_kl, clip_cov, kl_cov, dpo, or your own `module:function`"""
    reduction: Literal["token", "sequence", "rollout", "group", "fixed"] = "token"
    """mean over the update's trained tokens; or over its sequences, rollouts or groups of their token means; fixed: token sum
    over sequences times fixed_length"""
    fixed_length: Positive | None = None
    """tokens that reduction = "fixed" divides each sequence by; default: rollout.max_tokens"""
    updates: Positive = 1
    """optimizer steps a batch; groups are split evenly between them"""
    old_logprobs: Literal["proximal", "behaviour"] = "proximal"
    """denominator of the ratio: the trainer's own before the step, or the server's"""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """the ratio is clipped below 1 - clip_low"""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """the ratio is clipped above 1 + clip_high"""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """ppo, gspo: the surrogate of a negative advantage A is at least dual_clip * A; often 3"""
    sapo_tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """sapo: steepness of the gate for positive advantages"""
    sapo_tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """sapo: the same for the others"""
    dppo_delta: Annotated[float, Field(gt=0)] = 0.2
    """dppo_tv, dppo_kl: largest divergence of a token before it is masked; for dppo_kl rather 0.05"""
    cov_fraction: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """clip_cov, kl_cov: fraction of the update's tokens that are chosen"""
    cov_low: float = 1.0
    """clip_cov: tokens are chosen among those whose covariance is at least this"""
    cov_high: float = 5.0
    """clip_cov: and at most this"""
    cov_coef: Annotated[float, Field(ge=0)] = 1.0
    """kl_cov: weight of the penalty on the chosen tokens"""
    dpo_beta: Annotated[float, Field(gt=0)] = 0.1
    """dpo: how strongly the reference holds"""
    gamma: Fraction = 1.0
    """gae, reinforce_pp: discount a token"""
    gae_lambda: Fraction = 1.0
    """gae: lambda"""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """weight of KL(policy || reference); over 0 a reference is loaded, see [reference]"""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: a term of each token's loss; reward: subtracted from the reward before advantages are formed"""
    kl_estimator: Literal["k1", "k2", "k3", "low_variance", "unbiased"] = "k3"
    """unbiased: k3 weighted by the ratio, in the loss only; in the reward k1 is usual"""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """weight of the entropy bonus; with entropy_target its start"""
    entropy_target: Annotated[float, Field(ge=0)] | None = None
    """adaptive bonus: the weight rises by entropy_delta after each step whose entropy is at most this and falls after others;
    it acts only after steps at or under the target"""
    entropy_delta: Annotated[float, Field(gt=0)] = 1e-4
    """step of the adaptive weight"""
    entropy_coef_max: Annotated[float, Field(gt=0)] = 1e-2
    """the adaptive weight stays within 0 and this"""
    mask_stale: bool = False
    """response tokens of older weights than the step's are not trained (rollout.max_staleness over 0)"""
    max_mismatch_kl: Annotated[float, Field(gt=0)] | None = None
    """stop the run, before the weights change, when the k3 KL between server and trainer is over this"""
    router_aux_coef: Annotated[float, Field(ge=0)] = 0.0
    """mixture of experts: weight of the load-balancing loss; 1e-3 is usual"""
    router_replay: Literal["none", "server", "trainer"] = "none"
    """mixture of experts: what the policy's routers choose in training; server: the experts that each token was sampled with;
    trainer: those of the trainer's own weights before the batch's first update; none: their present ones"""
    corrections: dict[CorrectionName, Correction] = {}
    """off-policy corrections between server and trainer, multiplied: `[algorithm.corrections.NAME]` with low and high"""


class Reference(Section):
    """The frozen model of the KL term and of dpo."""

    path: str | None = None
    """Hugging Face folder, loaded by the trainer; default: model.path. With [lora] the default loads no second model: it is
    the policy without its adapter"""
    url: str | None = None
    """a vLLM server with this model, which scores the responses instead"""
    refresh_every: NonNegative = 0
    """batches the policy has learned from, after which it becomes the reference; 0: never"""


class Teacher(Section):
    """The model that is distilled; same vocabulary as the policy."""

    path: str | None = None
    """Hugging Face folder, loaded by the trainer"""
    url: str | None = None
    """a vLLM server with this model"""


class Critic(Section):
    """The value model of advantage = "gae": the policy's architecture with a scalar head."""

    path: str | None = None
    """Hugging Face folder it starts from; a reward model's (`vime reward-model`) with its head, else the head is zero; default:
    model.path"""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """peak learning rate; schedule and warm-up are [trainer]'s"""
    value_clip: Annotated[float, Field(gt=0)] = 0.2
    """values may move this far from those before the step without the loss being clipped"""
    warmup_steps: NonNegative = 0
    """first steps in which only the critic learns"""


class Trainer(Section):
    """The torch engine."""

    @property
    def shards(self) -> int:
        return self.ranks // (self.replicas * self.context_parallel * self.tensor_parallel)

    @property
    def data_ranks(self) -> int:
        """Parts that each update's micro-batches are dealt to."""
        return self.replicas * self.shards

    ranks: Positive = 1
    """trainer processes: replicas x shards x context_parallel x tensor_parallel; what the other three leave are shards, over
    which parameters, gradients, optimizer state and the batch are split (FSDP2)"""
    replicas: Positive = 1
    """copies of the sharded model, each with its own part of the batch (HSDP)"""
    context_parallel: Positive = 1
    """ranks that share every packed row, for long sequences (Ulysses); they also shard the parameters"""
    tensor_parallel: Positive = 1
    """ranks that share every weight matrix, by the plan in the model's configuration"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one"""
    tokens_per_micro_batch: Positive = 4096
    """budget of a packed micro-batch in tokens a rank (context ranks add theirs); a longer sequence is alone in its own"""
    attention: Literal["auto", "sdpa", "flash"] = "auto"
    """flash: kernels of variable length, without padding; sdpa: PyTorch's attention, padded; auto: flash on GPUs in bfloat16"""
    compile: Literal["auto"] | bool = "auto"
    """torch.compile each decoder layer, once for all row lengths; auto: on GPUs, unless kernels are liger's,
    tensor_parallel is over 1, checkpointing is selective, or LoRA trains; layers with experts never are"""
    kernels: Literal["torch", "liger"] = "torch"
    """liger: fused norms, MLPs and rotary embeddings of liger-kernel, on GPUs; instead of compile"""
    logprob_chunk: Positive = 512
    """response tokens whose logits exist at once"""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """full: each layer is computed again in the backward pass; selective: attention and every second
    matrix product are kept, the rest is computed again"""
    cpu_offload: Literal["none", "optimizer", "all"] = "none"
    """optimizer: AdamW's moments lie in the host's memory between steps; all: parameters, gradients and moments do, and the step
    is taken there"""
    optimizer: Literal["adamw", "adamw_8bit", "adamw_fp8"] = "adamw"
    """adamw_8bit, adamw_fp8: moments of one byte each, in blocks with a scale; they are torchao's, which is installed apart"""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of weights, gradients and moments in the trainer; bfloat16: no float32 copy, updates are rounded stochastically"""
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


class Lora(Section):
    """Low-rank adapters by peft: only they train, the model's own weights stay (docs/lora.md)."""

    rank: NonNegative = 0
    """r: columns of each adapter's two matrices; 0: no adapter, all parameters train"""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """lora_alpha: an adapter is scaled by alpha / rank"""
    use_rslora: bool = False
    """scale by alpha / sqrt(rank) instead (arXiv 2312.03732)"""
    target_modules: str | list[str] = "all-linear"
    """the Linear modules that get one: names, a regular expression of the whole name, or `all-linear`: all but the output head"""
    seed: NonNegative = 0
    """of the adapters' start: lora_A random, lora_B zero"""
    sync: Literal["adapter", "merged"] = "adapter"
    """what the servers get: the adapter, which they serve beside the model; or the model's weights with the adapter added"""

    @property
    def by_adapter(self) -> bool:
        """Whether servers serve the adapter itself."""
        return self.rank > 0 and self.sync == "adapter"


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
    health_timeout_s: Annotated[float, Field(gt=0)] = 60
    """a server that answers nothing for so long counts as hanging: it is killed and started again"""
    max_restarts: NonNegative = 5
    """how often a server may fall, within restart_window_minutes, before it is given up; the run ends when none is left"""
    restart_window_minutes: Annotated[float, Field(gt=0)] = 30
    """see max_restarts"""
    outage_timeout_s: Annotated[float, Field(gt=0)] = 1800
    """the run ends after so long without an answer of any of the servers in urls"""
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


class Store(Section):
    """Where sample payloads lie between rollout and trainer."""

    kind: Literal["shared_memory"] = "shared_memory"
    """shared_memory: files in the memory-backed folder weights.dir of one host"""


class Checkpoint(Section):
    """What survives."""

    every: NonNegative = 20
    """steps between checkpoints; 0: only at the end"""
    model: bool = True
    """whether each holds `model/`, a Hugging Face folder, which a resume does not need; false: only the last of the run"""
    keep: Positive = 2
    """newest checkpoints kept, beside the best"""
    best_metric: str | None = None
    """evaluation metric whose best checkpoint is kept, e.g. `eval/test/pass@1`; default: the first set's pass@1, without
    servers its loss. The lowest is the best of a loss, the highest of all others"""


class Log(Section):
    """Where metrics go, beside metrics.jsonl and TensorBoard."""

    sinks: list[Literal["wandb", "trackio"]] = []
    """further sinks"""
    samples_per_step: NonNegative = 8
    """training samples whose text is kept each step; evaluation samples are all kept"""
    dump_every: NonNegative = 0
    """steps between dumps of the whole batch, to train it again or compare it (docs/replay.md); 0: none"""
    trace: bool = True
    """record what the time of every sample goes to, for `vime trace` (docs/debugging.md)"""


SUPERVISED = ("sft", "bradley_terry")  # objectives of ``vime sft`` and ``vime reward-model``


class Config(Section):
    """All sections."""

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl_coef > 0 or self.algorithm.objective == "dpo"

    @property
    def length_option(self) -> str:
        """The user's option of how long a response, or under ``vime sft`` and ``vime reward-model`` a sequence, may be."""
        return "batch.max_length" if self.algorithm.objective in SUPERVISED else "rollout.max_tokens"

    run: Run = Run()
    model: Model
    data: TrainingData
    rollout: Rollout = Rollout()
    reward: RewardSection = RewardSection()
    tools: dict[str, Tool] = {}
    """tools of generate functions by name: `[tools.NAME]`"""
    algorithm: Algorithm = Algorithm()
    reference: Reference = Reference()
    teacher: Teacher = Teacher()
    critic: Critic = Critic()
    trainer: Trainer = Trainer()
    lora: Lora = Lora()
    inference: Inference = Inference()
    vllm: dict[str, Flag] = {}
    """any flag of the vLLM server, by its own name"""
    router: dict[str, Flag] = {}
    """any flag of vllm-router, by its own name"""
    weights: Weights = Weights()
    store: Store = Store()
    eval: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    slime: Slime = Slime()
