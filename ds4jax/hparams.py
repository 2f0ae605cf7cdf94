"""Model configurations out of files: GGUF metadata and a checkpoint's config.json.

Both end in the same `ModelConfig` (and `DraftConfig`), equal for equal models whatever the file.
Liberal in spelling (integer widths, scalar or array, DeepSeek's own key names), strict in meaning:
a setting the model code does not implement is a problem, a missing constant is assumed only where
every release agrees on it, and said in a note. Tensors are consulted where they decide (layer
count, ratios, vocabulary), never changed or checked here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ds4jax.config import ConfigError, ModelConfig
from ds4jax.errors import Problem, printable

ARCHITECTURE = "deepseek4"
DRAFT_ARCHITECTURES = (
    "deepseek4-dflash-draft",
    "deepseek4-dspark",
    "deepseek_v4_flash_dspark_draft",
    "dflash",
)
MAX_LAYERS = 256
MAX_EXPERTS = 1 << 16
"""Experts of all layers: a few bytes of configuration must not cost minutes of checking."""

Shapes = Mapping[str, tuple[int, ...]]
"""Numpy shape of every tensor of a file, by name."""


@dataclass
class Reading:
    """What reading a configuration left behind, beside the configuration."""

    file: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)  # config field -> key it came from

    def add(self, where: str, found: str, expected: str, fix: str = "") -> None:
        """Records a problem."""
        self.problems.append(
            Problem(file=self.file, where=where, found=printable(found), expected=expected, fix=fix)
        )


_CONTRADICTS = "use a file of a DeepSeek-V4 model that a current converter wrote"


# --- values -----------------------------------------------------------------------------------


def to_int(value: Any) -> int | None:
    """An integer of any width, or None."""
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return None


def _float(value: Any) -> float | None:
    """A number; a float32 in double clothing becomes the shortest decimal that it rounds to."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return None
    number = float(value)
    if not math.isfinite(number) or abs(number) > 3e38:
        return number
    single = np.float32(number)
    return float(str(single)) if float(single) == number else number


def to_ints(value: Any) -> tuple[int, ...] | None:
    """A list or array of integers as a tuple, cut to a sane length; None if it is anything else."""
    if isinstance(value, np.ndarray):
        value = value[: MAX_LAYERS + 64].tolist()
    if not isinstance(value, list):
        return None
    numbers = [to_int(x) for x in value[: MAX_LAYERS + 64]]
    return None if any(n is None for n in numbers) else tuple(n for n in numbers if n is not None)


def _floats(value: Any) -> tuple[float, ...] | None:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "fiu":
            return None
        value = value[: MAX_LAYERS + 64].astype(np.float64).tolist()
    if not isinstance(value, list):
        number = _float(value)
        return None if number is None else (number,)
    numbers = [_float(x) for x in value[: MAX_LAYERS + 64]]
    return None if any(n is None for n in numbers) else tuple(n for n in numbers if n is not None)


MISSING = object()


class Source:
    """Typed look-ups in one mapping, under several spellings, with every failure recorded."""

    def __init__(self, values: Mapping[str, Any], reading: Reading, prefix: str = "") -> None:
        self.values = values
        self.reading = reading
        self.prefix = prefix  # of every key, for messages

    def add(self, key: str, found: str, expected: str, fix: str = _CONTRADICTS) -> None:
        """Records a problem of one key."""
        self.reading.add(f"key {self.prefix}{key}", found, expected, fix)

    def note(self, text: str) -> None:
        """Records something worth knowing that is not wrong."""
        self.reading.notes.append(self.prefix + text)

    def has(self, *keys: str) -> bool:
        """Whether one of the spellings is there with a value."""
        return any(self.values.get(key) is not None for key in keys)

    def get(
        self,
        name: str,
        keys: tuple[str, ...],
        convert: Callable[[Any], Any],
        kind: str,
        default: Any = MISSING,
    ) -> Any:
        """The first spelling present; the default, with a note, if none is; None if unusable."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            self.reading.keys[name] = self.prefix + key
            result = convert(value)
            if result is None:
                self.add(key, repr(value)[:80], kind)
            return result
        if default is MISSING:
            self.add(keys[0], "no such key", kind, "the file lacks a size of the model")
            return None
        if default is not None:
            self.note(f"{keys[0]} is not in the file; {default} is assumed")
        return default

    def integer(self, name: str, *keys: str, default: Any = MISSING) -> Any:
        """An integer field."""
        return self.get(name, keys, to_int, "an integer", default)

    def number(self, name: str, *keys: str, default: Any = MISSING) -> Any:
        """A floating-point field."""
        return self.get(name, keys, _float, "a number", default)

    def must_be(self, allowed: tuple[Any, ...], what: str, *keys: str) -> None:
        """Records a problem if a key is there with another value than those allowed."""
        for key in keys:
            value = self.values.get(key)
            if value is not None and (
                not isinstance(value, (str, bool, int, float)) or value not in allowed
            ):
                expected = " or ".join(repr(a) for a in allowed) + f" ({what})"
                fix = "the model code does not implement this variant"
                self.add(key, repr(value)[:80], expected, fix)


def _build(fields: dict[str, Any], reading: Reading) -> ModelConfig | None:
    """The configuration, or None with problems that name the keys the values came from."""
    if any(value is None for value in fields.values()):
        return None
    experts = fields["num_layers"] * fields["num_experts"]
    if experts > MAX_EXPERTS:
        found = f"{experts} experts in {fields['num_layers']} layers"
        where = f"key {reading.keys['num_experts']}"
        reading.add(where, found, f"at most {MAX_EXPERTS}", _CONTRADICTS)
        return None
    try:
        return ModelConfig(**fields)
    except ConfigError as error:
        for text in error.problems:
            name = text.split(" ", 1)[0]
            where = f"key {reading.keys[name]}" if name in reading.keys else "configuration"
            found, _, expected = text.partition(", must ")
            expected = f"it must {expected}" if expected else "values that agree"
            reading.add(where, found, expected, _CONTRADICTS)
        return None


# --- GGUF -------------------------------------------------------------------------------------


def from_gguf(
    metadata: Mapping[str, Any], shapes: Shapes, file: str
) -> tuple[ModelConfig | None, int, Reading]:
    """The model configuration of a GGUF file.

    Args:
        metadata: key/value pairs as `ds4jax.gguf` gives them.
        shapes: every tensor's numpy shape: the layers that are MTP blocks are decided by them.
        file: name for problems.

    Returns: the configuration (None if there are problems), the number of MTP blocks that
        block_count includes, and what was assumed or found wrong.
    """
    reading = Reading(file)
    if not _check_architecture(metadata, shapes, reading):
        return None, 0, reading
    prefix = f"{ARCHITECTURE}."
    values = {k[len(prefix) :]: v for k, v in metadata.items() if k.startswith(prefix)}
    source = Source(values, reading, prefix)
    blocks = source.integer("num_layers", "block_count")
    if blocks is not None and not 1 <= blocks <= MAX_LAYERS:
        source.add("block_count", str(blocks), f"1..{MAX_LAYERS} layers")
        blocks = None
    layers, num_mtp = _split_mtp(blocks, shapes)
    fields = _gguf_sizes(source, shapes) | _gguf_constants(source)
    fields["num_layers"] = layers
    fields["compress_ratios"] = _gguf_ratios(source, shapes, layers)
    fields |= _gguf_clamps(source, layers)
    _gguf_variants(source, fields.get("head_dim"))
    config = _build(fields, reading) if not reading.problems else None
    return config, num_mtp, reading


def _split_mtp(blocks: int | None, shapes: Shapes) -> tuple[int | None, int]:
    """Layers of the model and MTP blocks behind them: the tensors decide, not the count."""
    if blocks is None:
        return None, 0

    def is_mtp(layer: int) -> bool:
        return f"blk.{layer}.nextn.e_proj.weight" in shapes

    layers = blocks
    while layers > 0 and is_mtp(layers - 1):
        layers -= 1
    count = 0
    while is_mtp(layers + count):
        count += 1
    return layers, count


def _check_architecture(metadata: Mapping[str, Any], shapes: Shapes, reading: Reading) -> bool:
    name = metadata.get("general.architecture")
    where = "key general.architecture"
    engram = [k for k in (*metadata, *shapes) if "engram" in k]
    if engram or (isinstance(name, str) and _is_v41(name)):
        found = repr(name) + (f" with {printable(engram[0])}" if engram else "")
        fix = "DeepSeek-V4.1 is another architecture; use a DeepSeek-V4 file"
        reading.add(where, found, f"{ARCHITECTURE!r}", fix)
    elif name in DRAFT_ARCHITECTURES:
        fix = "this is a drafter: give it as --draft beside its target model"
        reading.add(where, repr(name), f"{ARCHITECTURE!r}", fix)
    elif name != ARCHITECTURE:
        found = "no such key" if name is None else repr(name)[:80]
        fix = "only DeepSeek-V4 models can be used"
        reading.add(where, found, f"{ARCHITECTURE!r}", fix)
    return not reading.problems


def _is_v41(name: str) -> bool:
    squeezed = "".join(c for c in name.lower() if c.isalnum())
    return "deepseekv41" in squeezed or "deepseek41" in squeezed


def _gguf_sizes(source: Source, shapes: Shapes) -> dict[str, Any]:
    integer = source.integer
    embed = shapes.get("token_embd.weight", ())
    vocab = embed[0] if len(embed) == 2 else MISSING
    return {
        "vocab_size": integer("vocab_size", "vocab_size", default=vocab),
        "hidden_size": integer("hidden_size", "embedding_length"),
        "num_heads": integer("num_heads", "attention.head_count"),
        "head_dim": integer("head_dim", "attention.key_length"),
        "rope_head_dim": integer("rope_head_dim", "rope.dimension_count"),
        "q_lora_rank": integer("q_lora_rank", "attention.q_lora_rank"),
        "o_groups": integer("o_groups", "attention.output_group_count"),
        "o_lora_rank": integer("o_lora_rank", "attention.output_lora_rank"),
        "sliding_window": integer("sliding_window", "attention.sliding_window"),
        "index_num_heads": integer("index_num_heads", "attention.indexer.head_count"),
        "index_head_dim": integer("index_head_dim", "attention.indexer.key_length"),
        "index_topk": integer("index_topk", "attention.indexer.top_k"),
        "num_experts": integer("num_experts", "expert_count"),
        "num_experts_per_tok": integer("num_experts_per_tok", "expert_used_count"),
        "moe_intermediate_size": integer("moe_intermediate_size", "expert_feed_forward_length"),
        "num_hash_layers": integer("num_hash_layers", "hash_layer_count"),
        "num_shared_experts": integer("num_shared_experts", "expert_shared_count", default=1),
        "hc_mult": integer("hc_mult", "hyper_connection.count"),
        "hc_sinkhorn_iters": integer(
            "hc_sinkhorn_iters", "hyper_connection.sinkhorn_iterations"
        ),
        "max_position_embeddings": integer(
            "max_position_embeddings", "context_length", default=1048576
        ),
    }  # fmt: skip


def _gguf_constants(source: Source) -> dict[str, Any]:
    number = source.number
    compress_keys = ("attention.compress_rope_freq_base", "rope.freq_base_swa")
    scaled = source.values.get("rope.scaling.type") not in ("none", "default")
    norm = source.get(
        "norm_topk_prob", ("expert_weights_norm",), _bool, "true or false", default=True
    )
    return {
        "rope_theta": number("rope_theta", "rope.freq_base", default=10000.0),
        "compress_rope_theta": number("compress_rope_theta", *compress_keys, default=160000.0),
        "rope_scaling_factor": number("rope_scaling_factor", "rope.scaling.factor", default=16.0)
        if scaled
        else 1.0,
        "rope_original_len": source.integer(
            "rope_original_len", "rope.scaling.original_context_length", default=65536
        ),
        "rope_beta_fast": number("rope_beta_fast", "rope.scaling.yarn_beta_fast", default=32.0),
        "rope_beta_slow": number("rope_beta_slow", "rope.scaling.yarn_beta_slow", default=1.0),
        "rms_norm_eps": number(
            "rms_norm_eps", "attention.layer_norm_rms_epsilon", default=1e-6
        ),
        "hc_eps": number("hc_eps", "hyper_connection.epsilon", default=1e-6),
        "routed_scaling_factor": number(
            "routed_scaling_factor", "expert_weights_scale", default=1.5
        ),
        "norm_topk_prob": norm,
    }  # fmt: skip


def _bool(value: Any) -> bool | None:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return bool(value) if isinstance(value, int) and value in (0, 1) else None


def _gguf_ratios(source: Source, shapes: Shapes, layers: int | None) -> tuple[int, ...] | None:
    """Compression ratio per layer: the array's first entries, or the shapes of `ape` without it."""
    key = "attention.compress_ratios"
    if layers is None:
        return None
    if source.has(key):
        ratios: tuple[int, ...] | None = source.get(
            "compress_ratios", (key,), to_ints, "an array of integers"
        )
        if ratios is not None and len(ratios) < layers:
            expected = f"at least {layers}, one per layer"
            source.add(key, f"{len(ratios)} entries", expected)
            return None
        return None if ratios is None else ratios[:layers]
    source.note(f"{key} is not in the file; ratios are taken from the compressor tensors")
    found = []
    for layer in range(layers):
        shape = shapes.get(f"blk.{layer}.attn_compressor_ape.weight", (0, 0))
        found.append(shape[0] if len(shape) == 2 else -1)
    return tuple(found)


def _gguf_clamps(source: Source, layers: int | None) -> dict[str, Any]:
    """SwiGLU limits per layer: scalar or array; the shared expert's default to the routed ones."""
    routed = _per_layer(source, "swiglu_limits", "swiglu_clamp_exp", layers)
    if routed is None and not source.has("swiglu_clamp_exp") and layers is not None:
        source.note("swiglu_clamp_exp is not in the file; 10.0 is assumed")
        routed = (10.0,) * layers
    shared = _per_layer(source, "shared_swiglu_limits", "swiglu_clamp_shexp", layers)
    if shared is None and not source.has("swiglu_clamp_shexp"):
        shared = routed
    return {"swiglu_limits": routed, "shared_swiglu_limits": shared}


def _per_layer(source: Source, name: str, key: str, layers: int | None) -> tuple[float, ...] | None:
    if layers is None or not source.has(key):
        return None
    values: tuple[float, ...] | None = source.get(name, (key,), _floats, "a number or an array")
    if values is None:
        return None
    if not isinstance(source.values[key], (np.ndarray, list)):
        return values * layers
    if len(values) < layers:
        expected = f"at least {layers}, one per layer, or one number"
        source.add(key, f"{len(values)} entries", expected)
        return None
    return values[:layers]


def _gguf_variants(source: Source, head_dim: int | None) -> None:
    """Settings that change the computation and exist in one form only."""
    source.must_be((1,), "one shared key/value head", "attention.head_count_kv")
    source.must_be((4,), "sqrt-softplus", "expert_gating_func")
    source.must_be((0,), "no expert groups", "expert_group_count", "expert_group_used_count")
    source.must_be(("yarn", "none", "default"), "YaRN or nothing", "rope.scaling.type")
    if head_dim is not None:
        source.must_be((head_dim,), "values are the keys", "attention.value_length")


# --- config.json ------------------------------------------------------------------------------

_RATIO_OF_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def from_hf(config: Mapping[str, Any], file: str) -> tuple[ModelConfig | None, Reading]:
    """The model configuration of a checkpoint directory.

    Args:
        config: config.json, or inference/config.json with DeepSeek's own key names.
        file: name for problems.

    Returns: the configuration (None if there are problems), and what was assumed or found wrong.
    """
    reading = Reading(file)
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    if not _check_hf_architecture(config, reading):
        return None, reading
    source = Source(config, reading)
    layers = source.integer("num_layers", "num_hidden_layers", "n_layers")
    if layers is not None and not 1 <= layers <= MAX_LAYERS:
        reading.add("key num_hidden_layers", str(layers), f"1..{MAX_LAYERS} layers")
        layers = None
    fields = _hf_sizes(source) | _hf_rope(source)
    fields["num_layers"] = layers
    fields["compress_ratios"] = _hf_ratios(source, layers)
    fields["num_hash_layers"] = _hf_hash_layers(source)
    limit = source.number("swiglu_limits", "swiglu_limit", default=10.0)
    limits = None if limit is None or layers is None else (limit,) * layers
    fields["swiglu_limits"] = fields["shared_swiglu_limits"] = limits
    _hf_variants(source)
    return (None if reading.problems else _build(fields, reading)), reading


def _check_hf_architecture(config: Mapping[str, Any], reading: Reading) -> bool:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else config.get("model_type")
    where = "key architectures"
    newer = [k for k in config if k.startswith("engram") or k == "kv_source_layer_ids"]
    if newer or (isinstance(name, str) and _is_v41(name)):
        found = repr(name) + (f" with {newer[0]}" if newer else "")
        fix = "DeepSeek-V4.1 is another architecture; use a DeepSeek-V4 checkpoint"
        reading.add(where, found, "'DeepseekV4ForCausalLM'", fix)
    elif name is None and "n_layers" in config:
        pass  # inference/config.json carries no architecture
    elif not isinstance(name, str) or not name.lower().replace("_", "").startswith("deepseekv4"):
        found = "no such key" if name is None else repr(name)[:80]
        fix = "only DeepSeek-V4 models can be used"
        reading.add(where, found, "'DeepseekV4ForCausalLM'", fix)
    return not reading.problems


def _hf_sizes(source: Source) -> dict[str, Any]:
    integer, number = source.integer, source.number
    head_dim = integer("head_dim", "head_dim")
    partial = _float(source.values.get("partial_rotary_factor"))
    rope = MISSING if partial is None or head_dim is None else round(partial * head_dim)
    return {
        "vocab_size": integer("vocab_size", "vocab_size"),
        "hidden_size": integer("hidden_size", "hidden_size", "dim"),
        "num_heads": integer("num_heads", "num_attention_heads", "n_heads"),
        "head_dim": head_dim,
        "rope_head_dim": integer(
            "rope_head_dim", "qk_rope_head_dim", "rope_head_dim", default=rope
        ),
        "q_lora_rank": integer("q_lora_rank", "q_lora_rank"),
        "o_groups": integer("o_groups", "o_groups"),
        "o_lora_rank": integer("o_lora_rank", "o_lora_rank"),
        "sliding_window": integer("sliding_window", "sliding_window", "window_size"),
        "index_num_heads": integer("index_num_heads", "index_n_heads"),
        "index_head_dim": integer("index_head_dim", "index_head_dim"),
        "index_topk": integer("index_topk", "index_topk"),
        "num_experts": integer("num_experts", "n_routed_experts", "num_local_experts"),
        "num_experts_per_tok": integer(
            "num_experts_per_tok", "num_experts_per_tok", "n_activated_experts"
        ),
        "moe_intermediate_size": integer(
            "moe_intermediate_size", "moe_intermediate_size", "moe_inter_dim"
        ),
        "num_shared_experts": integer("num_shared_experts", "n_shared_experts", default=1),
        "routed_scaling_factor": number(
            "routed_scaling_factor", "routed_scaling_factor", "route_scale"
        ),
        "norm_topk_prob": source.get(
            "norm_topk_prob", ("norm_topk_prob",), _bool, "true or false", default=True
        ),
        "hc_mult": integer("hc_mult", "hc_mult"),
        "hc_sinkhorn_iters": integer("hc_sinkhorn_iters", "hc_sinkhorn_iters", default=20),
        "hc_eps": number("hc_eps", "hc_eps", default=1e-6),
        "rms_norm_eps": number("rms_norm_eps", "rms_norm_eps", "norm_eps", default=1e-6),
        "max_position_embeddings": integer(
            "max_position_embeddings", "max_position_embeddings", default=1048576
        ),
    }  # fmt: skip


def _hf_rope(source: Source) -> dict[str, Any]:
    """Rotary settings: `rope_scaling`, transformers' `rope_parameters`, or DeepSeek's flat keys."""
    values = dict(source.values)
    nested = values.get("rope_parameters")
    if isinstance(nested, Mapping):
        main, compress = nested.get("main"), nested.get("compress")
        if isinstance(main, Mapping) and main.get("rope_theta") is not None:
            values.setdefault("rope_theta", main["rope_theta"])
        if isinstance(compress, Mapping):
            nested = compress
            if compress.get("rope_theta") is not None:
                values.setdefault("compress_rope_theta", compress["rope_theta"])
    scaling = values.get("rope_scaling") if values.get("rope_scaling") is not None else nested
    scale = Source(scaling if isinstance(scaling, Mapping) else values, source.reading)
    flat = Source(values, source.reading)
    kind = scale.values.get("type", scale.values.get("rope_type"))
    has_factor = scale.has("factor", "rope_factor")
    if kind not in (None, "yarn", "default"):
        fix = "the model code does not implement this variant"
        source.add("rope_scaling", f"type {kind!r}"[:80], "'yarn' or none", fix)
    plain = kind == "default" or ("rope_scaling" in values and scaling is None and not has_factor)
    if plain:
        source.note("no rope scaling in the file; compressed layers are unscaled")
    return {
        "rope_theta": flat.number("rope_theta", "rope_theta", default=10000.0),
        "compress_rope_theta": flat.number(
            "compress_rope_theta", "compress_rope_theta", default=160000.0
        ),
        "rope_scaling_factor": 1.0
        if plain
        else scale.number("rope_scaling_factor", "factor", "rope_factor", default=16.0),
        "rope_original_len": 65536
        if plain
        else scale.integer(
            "rope_original_len",
            "original_max_position_embeddings",
            "original_seq_len",
            default=65536,
        ),
        "rope_beta_fast": scale.number("rope_beta_fast", "beta_fast", default=32.0),
        "rope_beta_slow": scale.number("rope_beta_slow", "beta_slow", default=1.0),
    }


def _hf_ratios(source: Source, layers: int | None) -> tuple[int, ...] | None:
    """Ratio per layer from `compress_ratios` (longer lists belong to mtp.*) or `layer_types`."""
    if layers is None:
        return None
    if not source.has("compress_ratios") and source.has("layer_types"):
        types = source.values["layer_types"]
        known = isinstance(types, list) and all(
            isinstance(t, str) and t in _RATIO_OF_TYPE for t in types
        )
        source.reading.keys["compress_ratios"] = "layer_types"
        if not known or len(types) < layers:
            expected = f"{layers} of {', '.join(_RATIO_OF_TYPE)}"
            source.add("layer_types", repr(types)[:80], expected)
            return None
        rates = source.values.get("compress_rates") or {}
        if not isinstance(rates, Mapping):
            source.add("compress_rates", repr(rates)[:80], "an object")
            return None
        ratios = [to_int(rates.get(t, _RATIO_OF_TYPE[t])) for t in types[:layers]]
        return tuple(-1 if r is None else r for r in ratios)
    values: tuple[int, ...] | None = source.get(
        "compress_ratios", ("compress_ratios",), to_ints, "a list of integers, one per layer"
    )
    if values is not None and len(values) < layers:
        expected = f"at least {layers}, one per layer"
        source.add("compress_ratios", f"{len(values)} entries", expected)
        return None
    return None if values is None else values[:layers]


def _hf_hash_layers(source: Source) -> int | None:
    types = source.values.get("mlp_layer_types")
    if not source.has("num_hash_layers", "n_hash_layers") and isinstance(types, list):
        count: int = sum(t == "hash_moe" for t in types)
        if types[:count] != ["hash_moe"] * count:
            source.add("mlp_layer_types", repr(types)[:80], "hash_moe layers before all others")
        return count
    value: int | None = source.integer("num_hash_layers", "num_hash_layers", "n_hash_layers")
    return value


def _hf_variants(source: Source) -> None:
    """Settings that change the computation and exist in one form only."""
    source.must_be((1,), "one shared key/value head", "num_key_value_heads")
    source.must_be(("sqrtsoftplus",), "router scores", "scoring_func", "score_func")
    source.must_be(("silu",), "expert activation", "hidden_act")
    source.must_be((False,), "no biases", "attention_bias", "mlp_bias")
    source.must_be((False,), "a head of its own", "tie_word_embeddings")
    source.must_be((1, 0), "no expert groups", "n_group", "n_groups", "topk_group")
