"""A DSpark drafter's configuration out of GGUF metadata or config.json.

Every layout has its own keys; all end in the same `DraftConfig`, checked against the target model.
The target's own configuration is read by `ds4jax.hparams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds4jax import tensors
from ds4jax.config import ConfigError, DraftConfig, ModelConfig
from ds4jax.hparams import MISSING, Reading, Shapes, Source, to_int, to_ints

_DRAFT_KEYS = {
    "block_size": (
        "deepseek4.dspark.block_size", "{arch}.dflash.block_size", "dspark.block_size",
        "dflash.block_size", "block_size",
    ),
    "markov_rank": (
        "deepseek4.dspark.markov_rank", "{arch}.dflash.dspark.markov_rank", "dspark.markov_rank",
        "dflash.markov_rank",
    ),
    "noise_token_id": (
        "deepseek4.dspark.noise_token_id", "{arch}.dflash.mask_token_id",
        "dspark.noise_token_id", "dflash.mask_token_id", "mask_token_id",
    ),
    "target_layer_ids": (
        "deepseek4.dspark.target_layers", "{arch}.dflash.capture_layer_ids",
        "{arch}.dflash.target_layer_ids", "dspark.target_layer_ids", "dspark.target_layers",
        "dflash.target_layers", "target_layers",
    ),
}  # fmt: skip
"""GGUF keys of every drafter layout; in config.json the names are `dspark_` + the field's."""


def draft_config(
    metadata: Mapping[str, Any],
    shapes: Shapes,
    target: ModelConfig,
    scheme: tensors.GGUFScheme | None,
    file: str,
) -> tuple[DraftConfig | None, Reading]:
    """The DSpark drafter's configuration, from GGUF metadata or config.json keys.

    Args:
        metadata: all pairs of the file that holds the drafter, or config.json.
        shapes: its tensors: stages are counted, and the Markov rank is checked, by them.
        target: the model it drafts for.
        scheme: GGUF layout (`tensors.gguf_draft_scheme`); None for a checkpoint.
        file: name for problems.
    """
    reading = Reading(file)
    arch = str(metadata.get("general.architecture", ""))
    source = Source(metadata, reading)

    def keys(name: str) -> tuple[str, ...]:
        if scheme is None:
            return (f"dspark_{name}",)
        return tuple(key.format(arch=arch) for key in _DRAFT_KEYS[name])

    markov = [s for n, s in shapes.items() if n.endswith(("markov_w1.weight", "markov.w1"))]
    rank = markov[0][-1] if markov and len(markov[0]) == 2 else MISSING
    ids = source.get("target_layer_ids", keys("target_layer_ids"), to_ints, "a list of layers")
    if ids is not None and scheme == "dflash" and target.num_layers in ids:
        # That converter counts layer outputs from 1.
        ids = tuple(i - 1 for i in ids)
        reading.notes.append("target layers count outputs from 1; one is subtracted")
    fields = {
        "num_stages": _count_stages(shapes, scheme),
        "block_size": source.integer("block_size", *keys("block_size")),
        "markov_rank": source.integer("markov_rank", *keys("markov_rank"), default=rank),
        "noise_token_id": source.integer("noise_token_id", *keys("noise_token_id")),
        "target_layer_ids": ids,
        "num_experts": to_int(metadata.get("deepseek4.dspark.expert_count")),
    }
    if any(v is None for k, v in fields.items() if k != "num_experts"):
        return None, reading
    try:
        draft = DraftConfig(**fields)
    except ConfigError as error:
        for text in error.problems:
            found, _, expected = text.partition(", must ")
            reading.add("drafter configuration", found, f"it must {expected}")
        return None, reading
    _check_against_target(draft, target, metadata, reading)
    return (None if reading.problems else draft), reading


def _check_against_target(
    draft: DraftConfig, target: ModelConfig, metadata: Mapping[str, Any], reading: Reading
) -> None:
    prefix = f"{metadata.get('general.architecture', '')}.dflash."
    vocab = to_int(metadata.get(prefix + "dspark.vocab_size"))
    if vocab is not None and vocab != target.vocab_size:
        reading.add("drafter vocabulary", str(vocab), f"{target.vocab_size}, the target's")
    layers = to_int(metadata.get(prefix + "n_target_layers"))
    if layers is not None and layers != len(draft.target_layer_ids):
        expected = f"{layers} layers, as dflash.n_target_layers says"
        reading.add("drafter target layers", str(list(draft.target_layer_ids)), expected)
    if draft.noise_token_id >= target.vocab_size:
        expected = f"a token below {target.vocab_size}"
        reading.add("drafter noise token", str(draft.noise_token_id), expected)
    if any(i >= target.num_layers for i in draft.target_layer_ids):
        expected = f"layers in 0..{target.num_layers - 1}"
        reading.add("drafter target layers", str(list(draft.target_layer_ids)), expected)


def _count_stages(shapes: Shapes, scheme: tensors.GGUFScheme | None) -> int:
    prefix = {"lucebox": "blk.", "dflash": "blk.", "dspark": "dspark."}.get(scheme or "", "mtp.")
    numbers = {name[len(prefix) :].split(".", 1)[0] for name in shapes if name.startswith(prefix)}
    return len({n for n in numbers if n.isdigit()})
