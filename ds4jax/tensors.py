"""One description of every tensor of a DeepSeek-V4 model.

Names (GGUF, published checkpoint, transformers), logical shape, class and place of each weight, of
the model itself, of the older prediction block (MTP) and of the DSpark drafter. Loading, checking,
random initialisation, conversion and `inspect` all read this table; nothing else lists tensors. It
reads no file: which of these tensors a file holds is the work of `ds4jax.model_file`.

Source of names and shapes: the published checkpoint's own names; GGUF names as the public
`deepseek4` converters write them. No producer permutes or transposes anything.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ds4jax.config import DraftConfig, ModelConfig

TensorClass = Literal[
    "embedding", "head", "norm", "hyper_connection", "attention", "sink", "compressor", "indexer",
    "router", "table", "experts_gate_up", "experts_down", "shared", "draft",
]  # fmt: skip

Scope = Literal["model", "mtp", "draft"]

GGUFScheme = Literal["deepseek4", "lucebox", "dspark", "mtp", "dflash"]
"""Naming of a GGUF file: the model's own, or one of the four drafter layouts."""

EXPERT = "{e}"
"""Stands for the expert number in the checkpoint name of a stacked tensor."""


class _Leaf(NamedTuple):
    """One row of the table: names without the layer prefix, dimensions by letter."""

    key: str
    gguf: str
    dims: str
    kind: TensorClass
    when: str = "all"


_TOP = (
    _Leaf("embed", "token_embd", "V M", "embedding"),
    _Leaf("norm", "output_norm", "M", "norm"),
    _Leaf("head", "output", "V M", "head"),
    _Leaf("hc_head_fn", "output_hc_fn", "N NM", "hyper_connection"),
    _Leaf("hc_head_base", "output_hc_base", "N", "hyper_connection"),
    _Leaf("hc_head_scale", "output_hc_scale", "1", "hyper_connection"),
)

_LAYER = (
    _Leaf("hc_attn_fn", "hc_attn_fn", "X NM", "hyper_connection"),
    _Leaf("hc_attn_base", "hc_attn_base", "X", "hyper_connection"),
    _Leaf("hc_attn_scale", "hc_attn_scale", "3", "hyper_connection"),
    _Leaf("attn_norm", "attn_norm", "M", "norm"),
    _Leaf("attn.wq_a", "attn_q_a", "Q M", "attention"),
    _Leaf("attn.q_norm", "attn_q_a_norm", "Q", "norm"),
    _Leaf("attn.wq_b", "attn_q_b", "HD Q", "attention"),
    _Leaf("attn.wkv", "attn_kv", "D M", "attention"),
    _Leaf("attn.kv_norm", "attn_kv_a_norm", "D", "norm"),
    _Leaf("attn.attn_sink", "attn_sinks", "H", "sink"),
    _Leaf("attn.wo_a", "attn_output_a", "GO HD/G", "attention"),
    _Leaf("attn.wo_b", "attn_output_b", "M GO", "attention"),
    _Leaf("attn.compressor.ape", "attn_compressor_ape", "R W", "compressor", "compress"),
    _Leaf("attn.compressor.wkv", "attn_compressor_kv", "W M", "compressor", "compress"),
    _Leaf("attn.compressor.wgate", "attn_compressor_gate", "W M", "compressor", "compress"),
    _Leaf("attn.compressor.norm", "attn_compressor_norm", "D", "norm", "compress"),
    _Leaf("attn.indexer.wq_b", "indexer.attn_q_b", "IJ Q", "indexer", "index"),
    _Leaf("attn.indexer.weights_proj", "indexer.proj", "I M", "indexer", "index"),
    _Leaf("attn.indexer.compressor.ape", "indexer_compressor_ape", "4 2J", "indexer", "index"),
    _Leaf("attn.indexer.compressor.wkv", "indexer_compressor_kv", "2J M", "indexer", "index"),
    _Leaf("attn.indexer.compressor.wgate", "indexer_compressor_gate", "2J M", "indexer", "index"),
    _Leaf("attn.indexer.compressor.norm", "indexer_compressor_norm", "J", "norm", "index"),
    _Leaf("hc_ffn_fn", "hc_ffn_fn", "X NM", "hyper_connection"),
    _Leaf("hc_ffn_base", "hc_ffn_base", "X", "hyper_connection"),
    _Leaf("hc_ffn_scale", "hc_ffn_scale", "3", "hyper_connection"),
    _Leaf("ffn_norm", "ffn_norm", "M", "norm"),
    _Leaf("ffn.gate", "ffn_gate_inp", "E M", "router"),
    _Leaf("ffn.gate.bias", "exp_probs_b", "E", "router", "scored"),
    _Leaf("ffn.gate.tid2eid", "ffn_gate_tid2eid", "V K", "table", "hash"),
    _Leaf("ffn.experts.w1", "ffn_gate_exps", "E F M", "experts_gate_up"),
    _Leaf("ffn.experts.w3", "ffn_up_exps", "E F M", "experts_gate_up"),
    _Leaf("ffn.experts.w2", "ffn_down_exps", "E M F", "experts_down"),
    _Leaf("ffn.shared_experts.w1", "ffn_gate_shexp", "F M", "shared"),
    _Leaf("ffn.shared_experts.w3", "ffn_up_shexp", "F M", "shared"),
    _Leaf("ffn.shared_experts.w2", "ffn_down_shexp", "M F", "shared"),
)

_BARE = re.compile(r"(^|\.)(hc_\w+|attn_sink|ape|tid2eid|bias)$")
"""Checkpoint names that are parameters of their own, without the suffix `.weight`."""

# Extras of an MTP block (prefix mtp.K. and blk.I.nextn.) and of the drafter's first and last stage.
_MTP = (
    _Leaf("e_proj", "e_proj", "M M", "draft"),
    _Leaf("h_proj", "h_proj", "M M", "draft"),
    _Leaf("enorm", "enorm", "M", "norm"),
    _Leaf("hnorm", "hnorm", "M", "norm"),
    _Leaf("norm", "shared_head_norm", "M", "norm"),
    _Leaf("hc_head_fn", "hc_head_fn", "N NM", "hyper_connection"),
    _Leaf("hc_head_base", "hc_head_base", "N", "hyper_connection"),
    _Leaf("hc_head_scale", "hc_head_scale", "1", "hyper_connection"),
)

_DRAFT_FIRST = (
    _Leaf("main_proj", "", "M TM", "draft"),
    _Leaf("main_norm", "", "M", "norm"),
)
_DRAFT_LAST = (
    _Leaf("norm", "", "M", "norm"),
    _Leaf("hc_head_fn", "", "N NM", "hyper_connection"),
    _Leaf("hc_head_base", "", "N", "hyper_connection"),
    _Leaf("hc_head_scale", "", "1", "hyper_connection"),
    _Leaf("markov_head.markov_w1", "", "V r", "draft"),
    _Leaf("markov_head.markov_w2", "", "V r", "draft"),
    _Leaf("confidence_head.proj", "", "1 M+r", "draft", "optional"),
    _Leaf("confidence_head.proj.bias", "", "1", "draft", "optional"),
)

# Full GGUF names of the drafter's extras in the layouts that do not keep the checkpoint's names.
_DRAFT_GGUF: dict[GGUFScheme, dict[str, str]] = {
    "lucebox": {
        "main_proj": "dflash.fc.weight",
        "main_norm": "dflash.hidden_norm.weight",
        "norm": "output_norm.weight",
        "hc_head_fn": "output_hc_fn.weight",
        "hc_head_base": "output_hc_base.weight",
        "hc_head_scale": "output_hc_scale.weight",
        "markov_head.markov_w1": "dflash.dspark.markov.w1",
        "markov_head.markov_w2": "dflash.dspark.markov.w2",
        "confidence_head.proj": "dflash.dspark.confidence.weight",
        "confidence_head.proj.bias": "dflash.dspark.confidence.bias",
    },
    "dspark": {
        "main_proj": "dspark.main_proj.weight",
        "main_norm": "dspark.main_norm.weight",
        "norm": "dspark.norm.weight",
        "hc_head_fn": "dspark.hc_head_fn.weight",
        "hc_head_base": "dspark.hc_head_base.weight",
        "hc_head_scale": "dspark.hc_head_scale.weight",
        "markov_head.markov_w1": "dspark.markov_w1.weight",
        "markov_head.markov_w2": "dspark.markov_w2.weight",
        "confidence_head.proj": "dspark.conf_proj.weight",
        "confidence_head.proj.bias": "dspark.conf_proj.bias",
    },
    "dflash": {
        "main_proj": "fc.weight",
        "main_norm": "enc.output_norm.weight",
        "norm": "output_norm.weight",
        "hc_head_fn": "hc_head_fn.weight",
        "hc_head_base": "hc_head_base.weight",
        "hc_head_scale": "hc_head_scale.weight",
        "markov_head.markov_w1": "markov_w1.weight",
        "markov_head.markov_w2": "markov_w2.weight",
        "confidence_head.proj": "conf_proj.weight",
        "confidence_head.proj.bias": "conf_proj.bias",
    },
}
_DRAFT_BLOCK: dict[GGUFScheme, str] = {
    "lucebox": "blk.", "dspark": "dspark.", "mtp": "mtp.", "dflash": "blk.",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of the model: what it is called, where it stands and how large it is.

    `key` is the published name inside its layer, without `.weight`, experts stacked. `shape` is in
    numpy order, [out, in] for a linear layer. `hf` is the published name; where experts are stored
    one by one it contains `{e}`.
    """

    key: str
    layer: int | None  # None: outside the layers; for scope draft or mtp: the stage
    shape: tuple[int, ...]
    kind: TensorClass
    gguf: str
    hf: str
    required: bool = True
    scope: Scope = "model"

    @property
    def name(self) -> str:
        """Unique readable name: the published one without suffix and expert number."""
        return self.hf.replace(f".{EXPERT}.", ".").removesuffix(".weight")

    @property
    def num_experts(self) -> int | None:
        """Experts stacked along the first axis, or None for an ordinary tensor."""
        return self.shape[0] if EXPERT in self.hf else None

    @property
    def stem(self) -> str:
        """The published name without `.weight`; scales, if any, are `stem + '.scale'`."""
        return self.hf.removesuffix(".weight")


def specs(cfg: ModelConfig) -> list[TensorSpec]:
    """Every tensor of the model itself, outside tensors first, then layer by layer."""
    sizes = _sizes(cfg)
    out = [_spec(leaf, None, "", "{}", sizes) for leaf in _TOP]
    for layer in range(cfg.num_layers):
        out += layer_specs(cfg, layer)
    return out


def layer_specs(cfg: ModelConfig, layer: int) -> list[TensorSpec]:
    """The tensors of one layer; which ones depends on its compression ratio and its router.

    Raises:
        IndexError: if the model has no such layer.
    """
    sizes = _sizes(cfg, layer)
    chosen = (leaf for leaf in _LAYER if _present(leaf.when, cfg, layer))
    return [_spec(leaf, layer, f"layers.{layer}.", f"blk.{layer}.{{}}", sizes) for leaf in chosen]


def mtp_specs(cfg: ModelConfig, count: int, separate: bool = False) -> list[TensorSpec]:
    """The tensors of `count` older prediction blocks (kept, not loaded).

    Args:
        separate: names of a file of their own (`mtp.K.`) instead of layers behind the model's.
    """
    stages = stage_config(cfg, count)
    out = []
    for stage in range(count):
        block = f"mtp.{stage}." if separate else f"blk.{cfg.num_layers + stage}."
        extra = block if separate else block + "nextn."
        sizes = _sizes(stages, stage)
        for leaf in _LAYER:
            if _present(leaf.when, stages, stage):
                out.append(_spec(leaf, stage, f"mtp.{stage}.", block + "{}", sizes, "mtp"))
        for leaf in _MTP:
            named = leaf._replace(gguf="norm") if separate and leaf.key == "norm" else leaf
            out.append(_spec(named, stage, f"mtp.{stage}.", extra + "{}", sizes, "mtp"))
    return out


def draft_specs(
    cfg: ModelConfig, draft: DraftConfig, scheme: GGUFScheme = "dspark"
) -> list[TensorSpec]:
    """The tensors of a DSpark drafter, stage by stage; extras of first and last stage at their end.

    Args:
        cfg: the target model (the drafter shares its sizes, embedding and head).
        scheme: the GGUF layout whose names are given; "dspark" is the one written by this program.
    """
    num_experts = draft.num_experts or cfg.num_experts
    stages = dataclasses.replace(stage_config(cfg, draft.num_stages), num_experts=num_experts)
    prefix = _DRAFT_BLOCK[scheme]
    out = []
    for stage in range(draft.num_stages):
        sizes = _sizes(stages, stage) | {
            "TM": len(draft.target_layer_ids) * cfg.hidden_size,
            "r": draft.markov_rank,
            "M+r": cfg.hidden_size + draft.markov_rank,
        }
        for leaf in _LAYER:
            if _present(leaf.when, stages, stage):
                place = f"{prefix}{stage}.{{}}"
                out.append(_spec(leaf, stage, f"mtp.{stage}.", place, sizes, "draft"))
        extras = list(_DRAFT_FIRST) if stage == 0 else []
        extras += _DRAFT_LAST if stage == draft.num_stages - 1 else ()
        for leaf in extras:
            spec = _spec(leaf, stage, f"mtp.{stage}.", "{}", sizes, "draft")
            own = spec.hf if spec.hf.endswith((".weight", ".bias")) else f"{spec.hf}.weight"
            gguf = _DRAFT_GGUF.get(scheme, {}).get(leaf.key, own)
            out.append(dataclasses.replace(spec, gguf=gguf))
    return out


def stage_config(cfg: ModelConfig, count: int) -> ModelConfig:
    """The target's sizes as a model of `count` layers without compression and hash routing."""
    return dataclasses.replace(
        cfg,
        num_layers=count,
        compress_ratios=(0,) * count,
        num_hash_layers=0,
        swiglu_limits=(cfg.swiglu_limits[-1],) * count,
        shared_swiglu_limits=(cfg.shared_swiglu_limits[-1],) * count,
    )


def _present(when: str, cfg: ModelConfig, layer: int) -> bool:
    if when == "compress":
        return cfg.compress_ratios[layer] > 0
    if when == "index":
        return cfg.compress_ratios[layer] == 4
    if when == "hash":
        return cfg.is_hash_layer(layer)
    if when == "scored":
        return not cfg.is_hash_layer(layer)
    return True


def _sizes(cfg: ModelConfig, layer: int | None = None) -> dict[str, int]:
    """Values of the dimension letters; R and W depend on the layer's ratio."""
    ratio = cfg.compress_ratios[layer] if layer is not None else 0
    return {
        "1": 1,
        "3": 3,
        "4": 4,
        "V": cfg.vocab_size,
        "M": cfg.hidden_size,
        "N": cfg.hc_mult,
        "NM": cfg.hc_mult * cfg.hidden_size,
        "X": (2 + cfg.hc_mult) * cfg.hc_mult,
        "H": cfg.num_heads,
        "D": cfg.head_dim,
        "HD": cfg.num_heads * cfg.head_dim,
        "HD/G": cfg.num_heads // cfg.o_groups * cfg.head_dim,
        "Q": cfg.q_lora_rank,
        "GO": cfg.o_groups * cfg.o_lora_rank,
        "R": ratio,
        "W": cfg.head_dim * (2 if ratio == 4 else 1),
        "I": cfg.index_num_heads,
        "J": cfg.index_head_dim,
        "IJ": cfg.index_num_heads * cfg.index_head_dim,
        "2J": 2 * cfg.index_head_dim,
        "E": cfg.num_experts,
        "F": cfg.moe_intermediate_size,
        "K": cfg.num_experts_per_tok,
    }


def _spec(
    leaf: _Leaf,
    layer: int | None,
    hf_prefix: str,
    gguf_format: str,
    sizes: dict[str, int],
    scope: Scope = "model",
) -> TensorSpec:
    bare = _BARE.search(leaf.key) is not None
    hf = leaf.key.replace("ffn.experts.", f"ffn.experts.{EXPERT}.")
    suffix = ".bias" if leaf.key.endswith(".bias") else ".weight"
    return TensorSpec(
        key=leaf.key,
        layer=layer,
        shape=tuple(sizes[letter] for letter in leaf.dims.split()),
        kind=leaf.kind,
        gguf=gguf_format.format(leaf.gguf) + suffix,
        hf=f"{hf_prefix}{hf}" + ("" if bare else ".weight"),
        required=leaf.when != "optional",
        scope=scope,
    )


# --- other spellings --------------------------------------------------------------------------

_TRANSFORMERS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\.weight_scale(_inv)?$", ".scale"),
        (r"_proj_scale_inv$", "_proj.scale"),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.(hc_)?(fn|base|scale)$", r"hc_head_\2"),
        (r"\.hc_head\.(hc_)?(fn|base|scale)$", r".hc_head_\2"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.attn\.sinks$", ".attn.attn_sink"),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.compressor\.indexer\.(scorer\.)?weights_proj\.", ".indexer.weights_proj."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.compressor\.position_bias$", ".compressor.ape"),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.attn\.(.*\.)?(q_a|q_b|o_a|o_b)_proj\.", r".attn.\1w\2."),
        (r"\.attn\.(.*\.)?kv_proj\.", r".attn.\1wkv."),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
        (r"\.(shared_experts|experts\.\d+)\.gate_proj\.", r".\1.w1."),
        (r"\.(shared_experts|experts\.\d+)\.down_proj\.", r".\1.w2."),
        (r"\.(shared_experts|experts\.\d+)\.up_proj\.", r".\1.w3."),
    )
)


def published_name(name: str) -> str:
    """The published checkpoint's spelling of a tensor name used by transformers or MLX.

    Names already in the published spelling come back unchanged; stacked experts keep the names
    `layers.I.ffn.experts.gate_up_proj` and `.down_proj`, which the checkpoint does not have.
    """
    name = name.removeprefix("model.")
    for pattern, replacement in _TRANSFORMERS:
        name = pattern.sub(replacement, name)
    return name


def uses_published_names(names: Iterable[str]) -> bool:
    """Whether a checkpoint already uses the published spelling (its embedding says so)."""
    return "embed.weight" in names


_FOREIGN = (
    (re.compile(r"(^|\.)(vision|aligner)\.|^image_|\.bias_vl$"), "vision"),
    (re.compile(r"engram"), "v4.1"),
    (re.compile(r"^mtp\.|^dspark\.|^dflash\.|\.nextn\."), "draft"),
    (re.compile(r"\.(input_scale|k_scale|v_scale)$"), "activation scale"),
)


def foreign_kind(name: str) -> str | None:
    """What a tensor outside the model is: "vision", "v4.1", "draft", ... or None if unknown."""
    for pattern, kind in _FOREIGN:
        if pattern.search(name):
            return kind
    return None


def layer_number(name: str) -> int | None:
    """Layer of a GGUF (`blk.I.`) or checkpoint (`layers.I.`) name, or None outside layers."""
    match = re.match(r"(?:blk|layers)\.(\d{1,6})\.", name)
    return int(match[1]) if match else None


def gguf_draft_scheme(names: Iterable[str]) -> GGUFScheme | None:
    """Which drafter layout a GGUF file holds, decided by the name of the context projection."""
    held = set(names)
    for scheme, name in (
        ("lucebox", "dflash.fc.weight"),
        ("dspark", "dspark.main_proj.weight"),
        ("mtp", "mtp.0.main_proj.weight"),
        ("dflash", "fc.weight"),
    ):
        if name in held:
            return scheme  # type: ignore[return-value]
    return None


_LEAF_OF_GGUF = {
    leaf.gguf + (".bias" if leaf.key.endswith(".bias") else ".weight"): leaf for leaf in _LAYER
}
_LEAF_OF_KEY = {leaf.key: leaf for leaf in _LAYER}


def layer_leaf(name: str) -> tuple[str, str] | None:
    """Key and presence rule of a layer's tensor by its GGUF or published name, or None.

    The rule is "all", "compress", "index", "scored" or "hash": which layers have the tensor.
    """
    match = re.match(r"(?:blk|layers)\.\d{1,6}\.(.+)$", name)
    if match is None:
        return None
    rest = match[1]
    key = re.sub(r"\.experts\.\d+\.", ".experts.", rest.removesuffix(".weight"))
    leaf = _LEAF_OF_GGUF.get(rest) or _LEAF_OF_KEY.get(key.removesuffix(".scale"))
    return (leaf.key, leaf.when) if leaf else None
