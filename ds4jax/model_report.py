"""What `ds4jax inspect` says of a model file: rows, totals and notes.

Plain data from opened files and matched tensors; opening and matching belong to
`ds4jax.model_file` and `ds4jax.stored`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds4jax import checkpoint, gguf, tensors
from ds4jax.errors import printable
from ds4jax.stored import StoredTensor

_LISTED = 6  # names spelled out in a note

_EXTRA_TEXT = {
    "vision": "vision tensors are ignored (text only)",
    "draft": "drafter or MTP tensors are kept, not loaded",
    "router bias": "router biases of hash-routed layers have no effect and are ignored",
    "table": "routing tables of layers with learned routing are ignored",
    "activation scale": "activation scales are ignored (activations are not quantised)",
    "unknown": "tensors of unknown name are ignored",
}


def extra_notes(extra: dict[str, list[str]], num_mtp: int) -> list[str]:
    """What becomes of the tensors that nothing asked for, one line per kind."""
    notes = []
    for kind, names in extra.items():
        shown = ", ".join(printable(n) for n in names[:_LISTED])
        dots = ", ..." if len(names) > _LISTED else ""
        notes.append(f"{len(names)} {_EXTRA_TEXT[kind]}: {shown}{dots}")
    if num_mtp:
        notes.append(f"{num_mtp} MTP block(s) of the older kind: kept, not loaded")
    return notes


def decoded_notes(matched: dict[str, StoredTensor]) -> list[str]:
    """Types that are decoded at load, with the bytes that takes."""
    sums: dict[str, list[int]] = {}
    for t in matched.values():
        if not t.native:
            total = sums.setdefault(t.type_name, [0, 0, 0])
            total[0] += 1
            total[1] += t.nbytes
            total[2] += _count(t.spec.shape)
    return [
        f"{n} tensors of type {name} have no packed form here: decoded at load, {held} bytes become"
        f" {2 * weights} (bfloat16) or {4 * weights} (float32)"
        for name, (n, held, weights) in sorted(sums.items())
    ]


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count


def _row(name: str, held: StoredTensor, role: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": held.type_name,
        "shape": list(held.spec.shape),
        "bytes": held.nbytes,
        "file": held.file,
        "role": role,
        "key": held.spec.key,
        "layer": held.spec.layer,
        "class": held.spec.kind,
        "parameters": _count(held.spec.shape),
    }


def _roles(
    matched: dict[str, StoredTensor], mtp: dict[str, StoredTensor], draft: dict[str, StoredTensor]
) -> Iterator[tuple[str, StoredTensor]]:
    yield from (("model", t) for t in matched.values())
    yield from (("mtp", t) for t in mtp.values())
    yield from (("draft", t) for t in (draft.values()))


def gguf_rows(
    file: gguf.GGUFFile,
    matched: dict[str, StoredTensor],
    mtp: dict[str, StoredTensor],
    draft: dict[str, StoredTensor],
) -> list[dict[str, Any]]:
    """Every tensor of the file, in its order."""
    known = {t.parts[0].name: (role, t) for role, t in _roles(matched, mtp, draft)}
    rows = []
    for name, t in file.tensors.items():
        if name in known:
            role, held = known[name]
            row = _row(name, held, role)
            row["shape"] = list(t.shape)
        else:
            row = {
                "name": printable(name),
                "type": t.type.name.lower(),
                "shape": list(t.shape),
                "bytes": t.nbytes,
                "file": t.file,
                "role": "other",
                "key": None,
                "layer": tensors.layer_number(name),
                "class": None,
                "parameters": _count(t.shape),
            }
        rows.append(row)
    return rows


def checkpoint_rows(
    file: checkpoint.Checkpoint,
    matched: dict[str, StoredTensor],
    mtp: dict[str, StoredTensor],
    draft: dict[str, StoredTensor],
) -> list[dict[str, Any]]:
    """Every tensor, experts and scales together with what they belong to; then all others."""
    rows, taken = [], set()
    for role, held in _roles(matched, mtp, draft):
        rows.append(_row(held.spec.name, held, role))
        for part in held.parts:
            taken |= {part.name, part.scale}
    for name, t in file.tensors.items():
        if name not in taken:
            rows.append(
                {
                    "name": printable(name),
                    "type": t.dtype.lower(),
                    "shape": list(t.shape),
                    "bytes": t.nbytes,
                    "file": t.file,
                    "role": "other",
                    "key": None,
                    "layer": tensors.layer_number(name),
                    "class": None,
                    "parameters": _count(t.shape),
                }
            )
    return rows


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over all tensors, by type, class and role."""
    out: dict[str, Any] = {
        "tensors": len(rows),
        "bytes": sum(r["bytes"] for r in rows),
        "parameters": sum(r["parameters"] for r in rows if r["role"] == "model"),
    }
    for field_name, by in (("by_type", "type"), ("by_class", "class"), ("by_role", "role")):
        groups: dict[str, dict[str, int]] = {}
        for row in rows:
            if by == "class" and row["role"] != "model":
                continue
            group = groups.setdefault(str(row[by]), {"tensors": 0, "bytes": 0, "parameters": 0})
            group["tensors"] += 1
            group["bytes"] += row["bytes"]
            group["parameters"] += row["parameters"]
        out[field_name] = groups
    return out
