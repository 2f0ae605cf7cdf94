"""Configuration: what the file says of the model, and what the user asks of the run.

Plain frozen dataclasses, hashable, validated on construction, free of JAX. `ModelConfig` describes
a DeepSeek-V4 model whatever file it came from, `DraftConfig` its drafter; `RuntimeConfig` holds the
choices of one run; `SamplingParams` and `StoppingCriteria` belong to one request. Reading models'
configurations from files is the work of `ds4jax.hparams`, not of this module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Numerics = Literal["plain", "kv-fp8", "official"]
DType = Literal["float32", "bfloat16"]
Backend = Literal["reference", "interpret", "triton"]
CpuWeights = Literal["packed", "decoded"]
Sampler = Literal["greedy", "full"]

NUMERICS: tuple[str, ...] = get_args(Numerics)
DTYPES: tuple[str, ...] = get_args(DType)

PAGE_TOKENS = 128
"""Token positions covered by one page of the compressed cache."""

RATIOS = (0, 4, 128)
"""Compression ratios that exist; any order of them over the layers works."""

ROW_TILE = 8
"""Rows computed together by every product, whatever the number of live rows (exactness)."""

DEFAULT_SLOTS = 6
MAX_SLOTS = 1024
"""Lanes of one executor: unless said otherwise, and at most."""

MAX_TOP_LOGPROBS = 20
MAX_STOP_IDS = 16
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024
BAN = -100.0
"""A logit bias that bans its id instead of adding to its logit."""


class ConfigError(ValueError):
    """A configuration that cannot be served; `problems` lists every finding, one line each."""

    def __init__(self, what: str, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{what}: " + "; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one DeepSeek-V4 model (architecture as published; HF key in brackets).

    Raises:
        ConfigError: listing every value that is out of range or contradicts another one.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int  # [num_hidden_layers], without prediction (MTP) or draft blocks
    num_heads: int  # [num_attention_heads]; one key/value head, key == value
    head_dim: int  # rope channels included
    rope_head_dim: int  # [qk_rope_head_dim], trailing channels of head_dim
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int  # per group
    sliding_window: int
    compress_ratios: tuple[int, ...]  # one per layer, each of RATIOS
    index_num_heads: int  # [index_n_heads]
    index_head_dim: int
    index_topk: int
    num_experts: int  # [n_routed_experts]
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    swiglu_limits: tuple[float, ...]  # one per layer, routed experts
    shared_swiglu_limits: tuple[float, ...]  # one per layer, shared expert
    num_shared_experts: int = 1
    routed_scaling_factor: float = 1.5
    norm_topk_prob: bool = True
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling_factor: float = 16.0  # YaRN, layers with a ratio > 0 only
    rope_original_len: int = 65536
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    max_position_embeddings: int = 1048576

    def __post_init__(self) -> None:
        problems = _model_problems(self)
        if problems:
            raise ConfigError("model config", problems)

    @property
    def nope_head_dim(self) -> int:
        """Leading channels of a head that are not rotated."""
        return self.head_dim - self.rope_head_dim

    def is_hash_layer(self, layer: int) -> bool:
        """Whether `layer` routes by token id instead of by learned scores."""
        return layer < self.num_hash_layers

    def layers_of_ratio(self, ratio: int) -> tuple[int, ...]:
        """Layer numbers whose compression ratio is `ratio`, ascending."""
        return tuple(i for i, r in enumerate(self.compress_ratios) if r == ratio)


_LIMITS: dict[str, tuple[int, int]] = {
    "vocab_size": (2, 1 << 20),
    "hidden_size": (1, 1 << 16),
    "num_layers": (1, 1024),
    "num_heads": (1, 4096),
    "head_dim": (2, 8192),
    "rope_head_dim": (2, 8192),
    "q_lora_rank": (1, 1 << 16),
    "o_groups": (1, 4096),
    "o_lora_rank": (1, 1 << 16),
    "sliding_window": (1, 1 << 16),
    "index_num_heads": (1, 4096),
    "index_head_dim": (2, 8192),
    "index_topk": (1, 1 << 16),
    "num_experts": (1, 1 << 14),
    "num_experts_per_tok": (1, 256),
    "moe_intermediate_size": (1, 1 << 18),
    "num_hash_layers": (0, 1024),
    "num_shared_experts": (1, 1),
    "hc_mult": (1, 16),
    "hc_sinkhorn_iters": (1, 1000),
    "rope_original_len": (1, 1 << 31),
    "max_position_embeddings": (1, 1 << 31),
}


def _model_problems(cfg: ModelConfig) -> list[str]:
    problems = []
    for name, (low, high) in _LIMITS.items():
        value = getattr(cfg, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            problems.append(f"{name} is {value!r}, must be an integer in {low}..{high}")
    for name in (
        "hc_eps", "rms_norm_eps", "rope_theta", "compress_rope_theta", "rope_scaling_factor",
        "rope_beta_fast", "rope_beta_slow", "routed_scaling_factor",
    ):  # fmt: skip
        value = getattr(cfg, name)
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            problems.append(f"{name} is {value!r}, must be a finite number above 0")
    if problems:
        return problems
    for name in ("compress_ratios", "swiglu_limits", "shared_swiglu_limits"):
        count = len(getattr(cfg, name))
        if count != cfg.num_layers:
            problems.append(f"{name} has {count} entries, must have num_layers = {cfg.num_layers}")
    bad = sorted({r for r in cfg.compress_ratios if r not in RATIOS})
    if bad:
        problems.append(f"compress_ratios holds {bad}, each entry must be one of {list(RATIOS)}")
    if cfg.rope_head_dim > min(cfg.head_dim, cfg.index_head_dim) or cfg.rope_head_dim % 2:
        problems.append(
            f"rope_head_dim is {cfg.rope_head_dim}, must be even and at most head_dim ="
            f" {cfg.head_dim} and index_head_dim = {cfg.index_head_dim}"
        )
    if cfg.num_heads % cfg.o_groups:
        problems.append(
            f"num_heads = {cfg.num_heads} is not a multiple of o_groups = {cfg.o_groups}"
        )
    if cfg.num_experts_per_tok > cfg.num_experts:
        problems.append(
            f"num_experts_per_tok = {cfg.num_experts_per_tok} exceeds"
            f" num_experts = {cfg.num_experts}"
        )
    if cfg.num_hash_layers > cfg.num_layers:
        problems.append(
            f"num_hash_layers = {cfg.num_hash_layers} exceeds num_layers = {cfg.num_layers}"
        )
    if not all(math.isfinite(x) and x > 0 for x in cfg.swiglu_limits + cfg.shared_swiglu_limits):
        problems.append("swiglu_limits must be finite and above 0")
    return problems


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Sizes of a DSpark drafter; everything else equals the target's [HF key in brackets].

    Raises:
        ConfigError: listing every value out of range.
    """

    num_stages: int  # counted from the tensors
    block_size: int  # rows drafted in one pass [dspark_block_size]
    markov_rank: int  # [dspark_markov_rank]
    noise_token_id: int  # [dspark_noise_token_id]
    target_layer_ids: tuple[int, ...]  # captured layers, 0-based [dspark_target_layer_ids]
    num_experts: int | None = None  # None: as many as the target

    def __post_init__(self) -> None:
        problems = []
        for name, low, high in (
            ("num_stages", 1, 16),
            ("block_size", 2, 16),
            ("markov_rank", 1, 1 << 16),
            ("noise_token_id", 0, 1 << 20),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                problems.append(f"{name} is {value!r}, must be an integer in {low}..{high}")
        ids = self.target_layer_ids
        if not ids or len(ids) > 16 or any(i < 0 for i in ids) or len(set(ids)) != len(ids):
            problems.append(f"target_layer_ids is {ids}, must be 1 to 16 different layers")
        if problems:
            raise ConfigError("draft config", problems)


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Choices of one run: precision, capacity and buckets. Static for the life of an engine.

    Raises:
        ConfigError: listing every value out of range.
    """

    dtype: DType = "float32"
    numerics: Numerics = "plain"
    backend: Backend = "reference"
    op_backends: tuple[tuple[str, str], ...] = ()  # (operation, backend), stronger than `backend`
    clamp_shared_expert: bool = True
    max_ctx: int = 4096  # tokens of one sequence
    num_slots: int = DEFAULT_SLOTS  # lanes
    num_pages: int | None = None  # None: num_slots * ceil(max_ctx / 128)
    max_drafts: int = 0  # draft tokens verified per lane and step
    row_buckets: tuple[int, ...] = (8,)
    prefill_buckets: tuple[int, ...] = (128,)
    samplers: tuple[Sampler, ...] = ("full",)  # programs; "greedy" is a faster one for plain greedy
    num_experts_per_tok: int | None = None  # below the model's own: labelled approximation
    snapshot_bytes: int = 4 << 30  # host memory for parked lanes

    def __post_init__(self) -> None:
        problems = []
        if self.dtype not in DTYPES:
            problems.append(f"dtype is {self.dtype!r}, must be one of {list(DTYPES)}")
        if self.numerics not in NUMERICS:
            problems.append(f"numerics is {self.numerics!r}, must be one of {list(NUMERICS)}")
        if not 1 <= self.max_ctx <= 1 << 22:
            problems.append(f"max_ctx is {self.max_ctx}, must be in 1..{1 << 22} tokens")
        if not 1 <= self.num_slots <= MAX_SLOTS:
            problems.append(f"num_slots is {self.num_slots}, must be in 1..{MAX_SLOTS}")
        if self.num_pages is not None and not 1 <= self.num_pages <= 1 << 24:
            problems.append(f"num_pages is {self.num_pages}, must be in 1..{1 << 24}")
        if not 0 <= self.max_drafts <= 15:
            problems.append(f"max_drafts is {self.max_drafts}, must be in 0..15")
        if "full" not in self.samplers or not set(self.samplers) <= set(get_args(Sampler)):
            problems.append(f"samplers is {self.samplers}, must hold 'full', may hold 'greedy'")
        if self.snapshot_bytes < 0:
            problems.append(f"snapshot_bytes is {self.snapshot_bytes}, must not be negative")
        for name in ("row_buckets", "prefill_buckets"):
            sizes = getattr(self, name)
            # Kernels take any number of rows, plain JAX whole tiles.
            any_rows = name == "row_buckets" and self.backend != "reference"
            unit = 1 if any_rows else ROW_TILE
            if not sizes or any(s < unit or s % unit for s in sizes):
                problems.append(f"{name} is {sizes}, must be multiples of {unit}, at least one")
            elif list(sizes) != sorted(set(sizes)):
                problems.append(f"{name} is {sizes}, must be ascending without repeats")
        if problems:
            raise ConfigError("runtime config", problems)

    @property
    def pages_per_slot(self) -> int:
        """Block-table entries of one slot."""
        return -(-self.max_ctx // PAGE_TOKENS)

    @property
    def pages(self) -> int:
        """Physical pages of the pool, the trash page not counted."""
        return self.num_slots * self.pages_per_slot if self.num_pages is None else self.num_pages


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request draws tokens. Defaults are the service's; 0 is an ordinary seed.

    Order of operations: bias, penalties, temperature, top_k, top_p, min_p, draw. `None` for `seed`
    means that the engine draws one and reports it.

    Raises:
        ConfigError: listing every field out of range.
    """

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window: int | None = None  # tokens; None: all
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    top_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's only
    logprobs_after_sampling: bool = False

    def __post_init__(self) -> None:
        problems = sampling_problems(self)
        if problems:
            raise ConfigError("sampling", [f"{name} {text}" for name, text in problems])

    @property
    def greedy(self) -> bool:
        """True if the token is the argmax of the (biased, penalised) logits."""
        return self.temperature == 0.0


def sampling_problems(p: SamplingParams) -> list[tuple[str, str]]:
    """Every violation as (field name, text 'is X, must be Y'); empty when all is well."""
    out: list[tuple[str, str]] = []

    def number(name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(p, name)
        ok = isinstance(value, (int, float)) and math.isfinite(value)
        if not (ok and (value > low if open_low else value >= low) and value <= high):
            out.append((name, f"is {value!r}, must be in {'(' if open_low else '['}{low}, {high}]"))

    number("temperature", 0, 2)
    number("top_p", 0, 1, open_low=True)
    number("min_p", 0, 1)
    number("repetition_penalty", 0, 1e6, open_low=True)
    number("frequency_penalty", -2, 2)
    number("presence_penalty", -2, 2)
    number("top_k", 0, (1 << 31) - 1)
    if p.penalty_window is not None and not 1 <= p.penalty_window < 1 << 31:
        out.append(("penalty_window", f"is {p.penalty_window}, must be at least 1 token"))
    if p.seed is not None and not 0 <= p.seed < 1 << 64:
        out.append(("seed", f"is {p.seed}, must be in 0..2^64-1"))
    if p.top_logprobs is not None and not 0 <= p.top_logprobs <= MAX_TOP_LOGPROBS:
        out.append(("top_logprobs", f"is {p.top_logprobs}, must be in 0..{MAX_TOP_LOGPROBS}"))
    if len(p.logit_bias) > MAX_LOGIT_BIAS:
        out.append(("logit_bias", f"has {len(p.logit_bias)} entries, at most {MAX_LOGIT_BIAS}"))
    if any(not math.isfinite(b) or not BAN <= b <= 100 for _, b in p.logit_bias):
        out.append(("logit_bias", "values must be finite and in [-100, 100]"))
    return out


@dataclass(frozen=True, kw_only=True)
class StoppingCriteria:
    """When one request ends. Stop strings match in content, not in reasoning or tool markup."""

    max_output_tokens: int | None = None  # None: what fits; 0: prefill only
    min_output_tokens: int = 0
    stop_strings: tuple[str, ...] = ()  # at most 16, each 1..256 code points
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_reasoning_tokens: int | None = None
    time_limit: float | None = None  # seconds

    def __post_init__(self) -> None:
        problems = stopping_problems(self)
        if problems:
            raise ConfigError("stopping", [f"{name} {text}" for name, text in problems])


def stopping_problems(s: StoppingCriteria) -> list[tuple[str, str]]:
    """Every violation as (field name, text); empty when all is well."""
    out: list[tuple[str, str]] = []
    for name in ("max_output_tokens", "max_reasoning_tokens"):
        value = getattr(s, name)
        if value is not None and not 0 <= value < 1 << 31:
            out.append((name, f"is {value}, must be in 0..2^31-1"))
    if not 0 <= s.min_output_tokens < 1 << 31:
        out.append(("min_output_tokens", f"is {s.min_output_tokens}, must be in 0..2^31-1"))
    elif s.max_output_tokens is not None and s.min_output_tokens > s.max_output_tokens:
        out.append(
            ("min_output_tokens", f"is {s.min_output_tokens}, above max_output_tokens"
             f" = {s.max_output_tokens}")
        )  # fmt: skip
    too_many = len(s.stop_strings) > MAX_STOP_STRINGS
    if too_many or any(not 1 <= len(x) <= 256 for x in s.stop_strings):
        text = f"must be at most {MAX_STOP_STRINGS}, each of 1 to 256 code points"
        out.append(("stop_strings", text))
    if len(s.stop_token_ids) > MAX_STOP_IDS:
        out.append(("stop_token_ids", f"has {len(s.stop_token_ids)}, at most {MAX_STOP_IDS}"))
    if s.time_limit is not None and not (math.isfinite(s.time_limit) and s.time_limit > 0):
        out.append(("time_limit", f"is {s.time_limit}, must be above 0 seconds"))
    return out
