"""Which implementation an operation uses, its tiles, and the one place that starts a Pallas kernel.

The only module of this package that asks about the device. It chooses nothing while a step runs:
`resolve` makes a table once, and from then on every operation is told its backend by name. An
operation asked for something it does not have raises; it never runs something else instead.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, Literal, TypeVar

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

Backend = Literal["reference", "interpret", "triton"]
"""reference: plain JAX. interpret: the kernel, emulated (tests). triton: the compiled kernel."""

Platform = Literal["cpu", "cuda", "rocm"]

Target = Literal["cuda", "rocm", "interpret"]
"""Which arithmetic a kernel is written for; the results are the same."""

KERNELS: frozenset[str] = frozenset(
    {
        "attention",
        "compressor",
        "dense",
        "experts",
        "indexer",
        "qkv",
        "router",
        "sampling",
        "streams",
    }
)
"""Operations that have a kernel."""

OPS: frozenset[str] = KERNELS
"""All operations that take a backend."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
    """Outcome of `resolve`: a backend per operation and one line of explanation for each."""

    table: Mapping[str, Backend]
    notes: tuple[str, ...]

    def __getitem__(self, op: str) -> Backend:
        return self.table[op]


def platform() -> Platform:
    """Platform of JAX's default device.

    Raises: NotImplementedError for one that this package has no kernels or tests for (TPU, Metal).
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return "cpu"
    version = str(getattr(device.client, "platform_version", "")).lower()
    if device.platform in ("gpu", "cuda", "rocm"):
        if "rocm" in version or device.platform == "rocm":
            return "rocm"
        if "cuda" in version or device.platform == "cuda":
            return "cuda"
    raise NotImplementedError(
        f"JAX's default device is {device.device_kind!r} (platform {device.platform!r}); "
        "supported are cpu, cuda and rocm: set JAX_PLATFORMS to choose one"
    )


def device_kind() -> str:
    """Name of the default device as tile tables are keyed: lower case, words joined by '-'."""
    return re.sub(r"[^a-z0-9]+", "-", str(jax.devices()[0].device_kind).lower()).strip("-")


def resolve(
    requested: str = "auto",
    *,
    on: Platform | None = None,
    overrides: Mapping[str, str] | None = None,
) -> Resolved:
    """A backend for every operation, to be logged and then passed on explicitly.

    Args:
      requested: "auto" (kernels where they exist on a GPU, plain JAX elsewhere) or a backend name
        that every operation with a kernel shall use.
      on: platform; None asks JAX for the default device.
      overrides: backend by operation, stronger than `requested`.
    Raises: ValueError on an unknown name or operation; NotImplementedError where a backend asked
      for by name does not exist ("triton" on a CPU, a kernel for an operation that has none).
    """
    on = on or platform()
    table: dict[str, Backend] = {}
    notes = []
    for op in sorted(OPS):
        named = (overrides or {}).get(op)
        wanted = named or requested
        if wanted == "auto":
            chosen: Backend = "triton" if on != "cpu" and op in KERNELS else "reference"
            why = f"auto on {on}" + ("" if op in KERNELS else ", no kernel")
        else:
            if op not in KERNELS and wanted != "reference" and named is None:
                chosen, why = "reference", f"no kernel (asked for {wanted})"
            else:
                chosen = require(op, wanted, on=on)
                why = "by name"
        table[op] = chosen
        notes.append(f"{op}: {chosen} ({why})")
    unknown = set(overrides or {}) - OPS
    if unknown:
        raise ValueError(
            f"no such operation: {', '.join(sorted(unknown))}; known: {', '.join(sorted(OPS))}"
        )
    return Resolved(table=table, notes=tuple(notes))


def require(op: str, backend: str, *, on: Platform | None = None) -> Backend:
    """`backend` checked for operation `op`.

    Args: on: also check that this platform can run it; None leaves that to JAX.
    Raises: ValueError on a name that is no backend; NotImplementedError if `op` lacks it.
    """
    have: tuple[Backend, ...] = ("reference",)
    if op in KERNELS:
        have = ("reference", "interpret") + (() if on == "cpu" else ("triton",))
    for name in have:
        if backend == name:
            return name
    if backend not in ("reference", "interpret", "triton"):
        raise ValueError(f"{op}: {backend!r} is no backend; use reference, interpret or triton")
    where = f" on {on}" if on else ""
    raise NotImplementedError(f"{op}: no {backend} backend{where}; there is: {', '.join(have)}")


def target(backend: Backend) -> Target:
    """What a kernel is written for.

    Raises: NotImplementedError where no kernel can run.
    """
    if backend == "interpret":
        return "interpret"
    on = platform()
    if on == "cpu":
        raise NotImplementedError("kernels compile for cuda and rocm devices, not for this cpu")
    return on


@functools.cache
def _table(kind: str) -> dict[str, Any]:
    file = resources.files("pallas_kernels") / "tiles" / f"{kind}.json"
    if not file.is_file():
        return {}
    loaded = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(loaded, dict):
        raise ValueError(f"tiles/{kind}.json: expected an object of operations")
    return loaded


def tile(op: str, default: T, *, key: str, target: str, kind: str | None = None) -> T:
    """The measured tile of `op` for `key` on this device kind, or `default`.

    Args:
      default: a frozen dataclass; table entries override its fields by name.
      key: what the entry depends on (format and rounded sizes), in the operation's own notation.
      target: platform that the kernel is built for; only that of the default device has entries.
      kind: device kind; None asks JAX.
    Raises: ValueError for an entry that names a field the tile does not have.
    """
    if kind is None:
        if target != platform():
            return default
        kind = device_kind()
    entry = _table(kind).get(op, {}).get(key)
    if entry is None:
        return default
    fields = {f.name for f in dataclasses.fields(default)}  # type: ignore[arg-type]
    if set(entry) - fields:
        raise ValueError(f"tiles: {op}/{key}: unknown fields {sorted(set(entry) - fields)}")
    return dataclasses.replace(default, **entry)  # type: ignore[type-var]


def pallas(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """The seam: start `kernel` over `grid`. All operands are whole arrays in device memory.

    Triton parameters are always given: without them JAX chooses another compiler, which ROCm lacks.
    """
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=dict(aliases or {}),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )
