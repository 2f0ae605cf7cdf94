"""Which type a conversion gives to which tensor: classes, named presets, command-line words.

A small table and nothing else; `ds4jax.convert` carries it out.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ds4jax import formats, quantize, quantize_mix
from ds4jax.tensors import TensorSpec

KEEP = "keep"
"""Target that loses nothing: the stored type, or the smallest GGUF type that holds it exactly."""

TARGETS = (KEEP, *quantize.ENCODABLE, *quantize_mix.LEVELS)
"""Names a tensor class can be given."""

_GGUF_NAMES = {formats.FORMATS[t].ggml_name.lower(): t for t in TARGETS if t != KEEP}
_ALSO = {"rocmfp2": "rocmfp2_s40", "rocmfp2_fixed": "rocmfp2_m1012"}


def target_of(word: str) -> str:
    """The name of `TARGETS` that a word means: itself, or how GGUF files spell it, in any case.

    Raises:
        ValueError: no such type, or one that is read and not written, with those that are.
    """
    low = word.lower()
    if low == "q2_0_rocmfp2":
        raise ValueError(f"{word} has several readings: give rocmfp2_m1012 or rocmfp2_affine")
    name = _ALSO.get(low) or _GGUF_NAMES.get(low) or low
    if name in TARGETS:
        return name
    known = {f.ggml_name.lower() for f in formats.FORMATS.values()} | set(formats.FORMATS)
    why = "is read, not written" if low in known else "is unknown"
    raise ValueError(f"type {word!r} {why}: types are {', '.join(TARGETS)}")


@dataclass(frozen=True, kw_only=True)
class Types:
    """Target of every class of matrices. Norms, hyper-connections, sinks, biases, position tables
    and whatever has one axis are always float32; routing tables are I32.

    `overrides` are (pattern, target) pairs for single tensors by GGUF name ("blk.*.attn_q_b.*");
    the last one that matches wins.
    """

    experts_gate_up: str = KEEP
    experts_down: str = KEEP
    attention: str = "q8_0"
    shared: str = "q8_0"
    embedding: str = "bf16"
    head: str = "q8_0"
    compressor: str = "bf16"
    indexer: str = "bf16"
    router: str = "f32"
    draft: str = "q8_0"  # projections of a drafter; its attention and experts go by their class
    markov: str = "bf16"
    overrides: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        given = [(n, getattr(self, n)) for n in CLASSES] + list(self.overrides)
        bad = [f"{name}={target}" for name, target in given if target not in TARGETS]
        if bad:
            raise ValueError(f"unknown types {', '.join(bad)}; choose from {', '.join(TARGETS)}")

    def target(self, spec: TensorSpec, gguf_name: str) -> str:
        """Target of one tensor."""
        if spec.kind == "table":
            return "i32"
        result = getattr(self, class_of(spec) or "", "f32")
        for pattern, target in self.overrides:
            if fnmatch.fnmatchcase(gguf_name, pattern):
                result = target
        return str(result)


CLASSES = tuple(f.name for f in fields(Types) if f.name != "overrides")
"""Tensor classes that a type can be chosen for."""


def _all(target: str) -> Types:
    classes: dict[str, Any] = dict.fromkeys(CLASSES, target)
    return Types(**classes)


_LOW: dict[str, Any] = {
    "embedding": "rocmfp6",
    "head": "rocmfp6",
    "attention": "rocmfp4",
    "shared": "rocmfp4",
}
PRESETS: dict[str, Types] = {
    "default": Types(),
    "lossless": _all(KEEP),
    "f32": _all("f32"),
    "bf16": _all("bf16"),
    "f16": _all("f16"),
    "q8_0": Types(experts_gate_up="q8_0", experts_down="q8_0"),
    "mxfp4": Types(experts_gate_up="mxfp4", experts_down="mxfp4"),
    "rocmfp8": Types(experts_gate_up="rocmfp8", experts_down="rocmfp8", attention="rocmfp8",
                     shared="rocmfp8", head="rocmfp8"),
    "rocmfp6": Types(experts_gate_up="rocmfp6", experts_down="rocmfp6", attention="rocmfp6",
                     shared="rocmfp6", head="rocmfp6"),
    "rocmfp4": Types(experts_gate_up="rocmfp4", experts_down="rocmfp4", **_LOW),
    "rocmfp4_fast": Types(experts_gate_up="rocmfp4_fast", experts_down="rocmfp4_fast", **_LOW),
    "rocmfp3": Types(experts_gate_up="rocmfp3", experts_down="rocmfp3", **_LOW),
    "rocmfp2": Types(experts_gate_up="rocmfp2_s40", experts_down="rocmfp3", **_LOW),
}  # fmt: skip
"""Named choices for a whole file; single classes and tensors can be changed on top."""


def class_of(spec: TensorSpec) -> str | None:
    """Class of `CLASSES` that decides a tensor's type, or None for those that stay float32."""
    small = len(spec.shape) < 2 or spec.shape[0] == 1 or spec.key.endswith(".ape")
    if small or spec.kind in ("norm", "hyper_connection", "sink", "table"):
        return None
    if spec.key.startswith("markov_head."):
        return "markov"
    return spec.kind


def parse_types(choices: Sequence[str]) -> Types:
    """Types from command-line words, later ones on top of earlier ones.

    Args:
        choices: a name of `PRESETS`; `class=target` with a class of `CLASSES` or "experts"; or
            `pattern=target` for tensors by GGUF name (a pattern contains "." or "*"). Types are
            spelled as `target_of` reads them.

    Raises:
        ValueError: naming the word and what is possible.
    """
    types = Types()
    for word in choices:
        name, equals, target = word.partition("=")
        if not equals:
            types = replace(PRESETS[_preset_of(word)], overrides=types.overrides)
            continue
        target = target_of(target)
        if "." in name or "*" in name:
            types = replace(types, overrides=(*types.overrides, (name, target)))
        elif name == "experts":
            types = replace(types, experts_gate_up=target, experts_down=target)
        elif name in CLASSES:
            change: dict[str, Any] = {name: target}
            types = replace(types, **change)
        else:
            raise ValueError(
                f"{word!r}: class {name!r} is unknown; classes are experts, {', '.join(CLASSES)},"
                " or a pattern of GGUF names with a dot or a star"
            )
    return types


def _preset_of(word: str) -> str:
    low = word.lower()
    if low in PRESETS:
        return low
    presets = ", ".join(PRESETS)
    try:
        target = target_of(word)
    except ValueError:
        raise ValueError(
            f"type {word!r} is unknown: give one of {presets}, or class=type"
        ) from None
    same = next((p for p in PRESETS if _ALSO.get(p, p) == target), None)
    if same is None:
        raise ValueError(
            f"{target} is no choice for a whole file (those are {presets}): give it to a class,"
            f" like experts={target}"
        )
    return same
