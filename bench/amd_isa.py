"""What AMD machine code the kernels become, without an AMD device.

Lowers a kernel for ROCm with JAX, hands its Triton IR to the Triton package's HIP compiler and
reads the assembly: registers, spills, scratch, shared memory, widths of loads, matrix instructions.
The gate in `tests/test_amd.py` is built on it. `python -m bench.amd_isa` writes docs/amd_isa.md;
`--json FILE` keeps the figures (what FILE knows already is not compiled again), `--table FILE`
makes the page from such a file. Nothing here is a time; what the page says about arithmetic and
bandwidth is an estimate from instruction counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.pallas.triton import lowering as triton_lowering

from pallas_kernels import (
    cached_attention,
    compressed_rows,
    decode,
    dense,
    experts,
    packing,
    qkv,
    router,
    row_selection,
    streams,
    vocabulary,
)

ARCHS = ("gfx1151", "gfx1201", "gfx942", "gfx950")
"""RDNA 3.5 (Strix Halo), RDNA 4 (R9700), CDNA 3 and 4 (MI300, MI350)."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Peak rates of a device, from its data sheet: an estimate is made with them, no measurement.

    Attributes:
      GBps: memory bandwidth. issues: 10^9 vector instructions of a wave per second.
      matrix_cycles: issue slots that a matrix instruction takes, about.
    """

    device: str
    GBps: float
    issues: float
    matrix_cycles: int


RATES = {
    "gfx1151": Rates("Radeon 8060S (40 CU, 2.9 GHz)", 256, 40 * 2 * 2.9, 32),
    "gfx1201": Rates("R9700 (64 CU, 2.9 GHz)", 640, 64 * 2 * 2.9, 16),
    "gfx942": Rates("MI300X (304 CU, 2.1 GHz)", 5300, 304 * 4 * 2.1 / 4, 4),
    "gfx950": Rates("MI350X (256 CU, 2.2 GHz)", 8000, 256 * 4 * 2.2 / 4, 4),
}

LDS_LIMIT = 64 << 10
"""Shared memory of a workgroup, bytes (gfx950 has more)."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Pallas call lowered for ROCm."""

    name: str
    ir: str
    num_warps: int
    num_stages: int

    @property
    def source(self) -> str:
        """Hash of what is compiled."""
        text = f"{self.num_warps} {self.num_stages} {self.ir}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Figures:
    """Static properties of the machine code of one kernel on one target."""

    kernel: str
    arch: str
    instructions: int
    vgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    loads: dict[str, int]
    matrix: dict[str, int]
    code_bytes: int
    source: str = ""
    """What it was compiled from: `Kernel.source`."""
    loop: dict[str, int] = dataclasses.field(default_factory=dict)
    """Of one pass of one wave through the loop that loads most (or all of it, without a loop):
    vector instructions, matrix instructions, bytes loaded."""

    @property
    def bound(self) -> tuple[str, float]:
        """What bounds the loop on paper, and time of arithmetic over time of loading."""
        rates = RATES[self.arch]
        slots = self.loop.get("vector", 0) + rates.matrix_cycles * self.loop.get("matrix", 0)
        arithmetic = slots / rates.issues
        loading = self.loop.get("bytes", 0) / rates.GBps
        ratio = arithmetic / loading if loading else float("inf")
        return ("arithmetic" if ratio > 1 else "bandwidth"), ratio

    def problems(
        self, *, weight_bits: int = 64, least_bits: int = 32, matrix: bool = True
    ) -> list[str]:
        """What breaks the rules: spills, scratch, LDS, narrow weight loads, no matrix unit."""
        out = []
        # A scalar register that moves into a vector register's lane costs next to nothing.
        if self.vgpr_spills or self.scratch_bytes:
            out.append(f"spills: {self.vgpr_spills} VGPR, {self.scratch_bytes} bytes of scratch")
        if self.lds_bytes > LDS_LIMIT:
            out.append(f"{self.lds_bytes} bytes of LDS; a workgroup has {LDS_LIMIT}")
        widest = max((_bits(name) for name in self.loads), default=0)
        if widest < weight_bits:
            out.append(f"widest global load has {widest} bits; weights need {weight_bits}")
        if narrow := {n: c for n, c in self.loads.items() if _bits(n) < least_bits}:
            out.append(f"loads of less than {least_bits} bits: {narrow}")
        if matrix and not self.matrix:
            out.append("no matrix instruction")
        return out


def _bits(name: str) -> int:
    """Width of a global load by its mnemonic."""
    if found := re.search(r"_b(\d+)$", name):
        return int(found.group(1))
    if found := re.search(r"dword(?:x(\d))?$", name):
        return 32 * int(found.group(1) or 1)
    return 16 if name.endswith(("short", "short_d16", "short_d16_hi")) else 8


def lower(fn: Callable[..., Any], *shapes: Any) -> list[Kernel]:
    """The Pallas kernels that `fn` starts, lowered for ROCm.

    Args: shapes: `jax.ShapeDtypeStruct` trees.
    """
    found: list[Kernel] = []
    original = triton_lowering.lower_jaxpr_to_triton_module

    def capture(jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(jaxpr, *args, **kwargs)
        ir = result.module.operation.get_asm(enable_debug_info=False)
        found.append(Kernel(str(len(found)), ir, 0, 0))
        return result

    traced = jax.jit(fn).trace(*shapes)
    calls = list(_pallas_calls(traced.jaxpr.jaxpr))
    triton_lowering.lower_jaxpr_to_triton_module = capture
    try:
        traced.lower(lowering_platforms=("rocm",))
    finally:
        triton_lowering.lower_jaxpr_to_triton_module = original
    if len(calls) != len(found):
        raise RuntimeError(f"{len(calls)} Pallas calls in the trace, {len(found)} lowered")
    return [
        dataclasses.replace(k, name=name, num_warps=warps, num_stages=stages)
        for k, (name, warps, stages) in zip(found, calls, strict=True)
    ]


def _pallas_calls(jaxpr: Any) -> Iterator[tuple[str, int, int]]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            params = eqn.params["compiler_params"]
            name = eqn.params.get("name") or eqn.params["metadata"]
            yield str(name), params.num_warps, params.num_stages
            continue
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _pallas_calls(inner)


def compile_for(kernel: Kernel, arch: str) -> Figures:
    """Machine code of `kernel` for an AMD target.

    Raises: ImportError without the Triton package; whatever its compiler raises.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttir"
        path.write_text(kernel.ir, encoding="utf-8")
        options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
        built = triton.compile(str(path), target=target, options=options)
    found = read(kernel.name, arch, built.asm["amdgcn"], int(built.metadata.shared))
    return dataclasses.replace(found, source=kernel.source)


def read(name: str, arch: str, asm: str, lds: int) -> Figures:
    """Figures from assembly text."""

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", asm)
        if not found:
            raise ValueError(f"{name} {arch}: no .{key} in the assembly")
        return int(found.group(1))

    mnemonics = re.findall(r"^\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)", asm, re.MULTILINE)
    loads: dict[str, int] = {}
    matrix: dict[str, int] = {}
    for m in mnemonics:
        if re.match(r"(global|buffer|flat)_load", m):
            loads[m] = loads.get(m, 0) + 1
        if "mfma" in m or "wmma" in m:
            matrix[m] = matrix.get(m, 0) + 1
    code = re.search(r"codeLenInByte\s*=\s*(\d+)", asm)
    return Figures(
        kernel=name,
        arch=arch,
        instructions=len(mnemonics),
        vgprs=number("vgpr_count"),
        vgpr_spills=number("vgpr_spill_count"),
        sgpr_spills=number("sgpr_spill_count"),
        scratch_bytes=number("private_segment_fixed_size"),
        lds_bytes=lds,
        loads=loads,
        matrix=matrix,
        code_bytes=int(code.group(1)) if code else 0,
        loop=_loop(asm, 64 if arch.startswith("gfx9") else 32),
    )


def _loop(asm: str, wave: int) -> dict[str, int]:
    """Counts of the innermost loop that loads most; of everything if nothing loops."""
    lines = asm[: asm.find(".section\t.rodata")].splitlines()
    labels = {
        m.group(1): i for i, line in enumerate(lines) if (m := re.match(r"(\.LBB\w+):", line))
    }
    spans = [(0, len(lines))]
    for i, line in enumerate(lines):
        jump = re.match(r"\s+s_c?branch\w*\s+(\.LBB\w+)", line)
        if jump and labels.get(jump.group(1), i) < i:
            spans.append((labels[jump.group(1)], i))
    inner = [s for s in spans if not any(s[0] <= o[0] and o[1] <= s[1] and o != s for o in spans)]
    found = []
    for first, last in inner or spans:
        names = re.findall(
            r"^\s+((?:v|global|buffer|flat)_\w+)", "\n".join(lines[first:last]), re.M
        )
        loads = [n for n in names if re.match(r"(global|buffer|flat)_load", n)]
        matrix = sum("mfma" in n or "wmma" in n for n in names)
        vector = sum(n.startswith("v_") for n in names) - matrix
        nbytes = sum(_bits(n) for n in loads) * wave // 8
        found.append({"vector": vector, "matrix": matrix, "bytes": nbytes})
    return max(found, key=lambda f: f["bytes"])


# --- The kernels that are looked at ---


def dense_kernel(
    format: str, rows: int, n: int = 1024, k: int = 4096, tile: dense.Tile | None = None
) -> list[Kernel]:
    """A dense product of `rows` activation rows with a matrix of `format` (or a dtype)."""
    w: Any = jax.ShapeDtypeStruct((2, n, k), format) if format in dense.PLAIN else None
    if w is None:
        w = packing.abstract(format, (2,), n, k)

    def run(x: Any, w: Any, layer: Any) -> Any:
        return dense.launch(x, w, layer, jnp.bfloat16, "rocm", tile=tile)

    x = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16)
    return lower(run, x, w, jax.ShapeDtypeStruct((), jnp.int32))


def expert_kernels(up: str, down: str, rows: int, num: int = 32) -> list[Kernel]:
    """The kernels of routed experts: plan (few rows), gate and up, down."""
    f, m = 1024, 2048
    w13, w2 = packing.abstract(up, (2, num), 2 * f, m), packing.abstract(down, (2, num), m, f)

    def run(x: Any, ids: Any, weights: Any, w13: Any, w2: Any, layer: Any) -> Any:
        return experts.launch(x, ids, weights, w13, w2, layer, 0, 10.0, "rocm")

    of = jax.ShapeDtypeStruct
    return lower(
        run, of((rows, m), jnp.bfloat16), of((rows, 6), jnp.int32), of((rows, 6), jnp.float32),
        w13, w2, of((), jnp.int32),
    )  # fmt: skip


def several_kernel(rows: int) -> list[Kernel]:
    """The projections of a layer of ratio 4: matrices of three types in one kernel."""
    of, k = jax.ShapeDtypeStruct, 4096
    ws = [packing.abstract("rocmfp4", (2,), n, k) for n in (1024, 512)]
    ws += [packing.abstract("q8_0", (2,), 1024, k)]
    ws += [of((2, n, k), jnp.float32) for n in (256, 64)]
    return lower(
        lambda x, layer, *w: dense.launch_several(x, w, layer, jnp.float32, "rocm"),
        of((rows, k), jnp.bfloat16), of((), jnp.int32), *ws,
    )  # fmt: skip


def step_kernels(rows: int) -> list[Kernel]:
    """The small kernels of a layer at the real model's sizes."""
    of, f32 = jax.ShapeDtypeStruct, jnp.float32
    i32, bf16, (n, d, layers) = jnp.int32, jnp.bfloat16, (4, 4096, 2)
    sizes = streams.Sizes(n=n, iters=20, hc_eps=1e-6, rms_eps=1e-6)
    p = streams.Pending(
        of((rows, n * d), bf16), (of((6, rows, d), f32), of((8, rows, d), f32)),
        of((rows, 6), i32), of((rows, n), f32), of((rows, n, n), f32),
    )  # fmt: skip
    entries = (2 + n) * n

    def stream(p: Any, fn: Any, scale: Any, base: Any, w: Any, layer: Any) -> Any:
        x, mixed = streams.launch_mix(p, fn, layer, "rocm")
        args = (x, mixed, scale, base, w, layer, sizes)
        return (
            streams.launch_read(*args, head=False, interpret=False),
            streams.launch_read(*args, head=True, interpret=False),
        )

    layer = of((), i32)
    found = lower(
        stream, p, of((layers, entries, n * d), f32), of((layers, 3), f32),
        of((layers, entries), f32), of((layers, d), f32), layer,
    )  # fmt: skip
    part = lambda s, n: of((s, rows, n), f32)  # noqa: E731
    projected = qkv.Projected(
        part(8, 1024), part(8, 512),
        (qkv.Compress(part(8, 1024), part(8, 1024), of((layers, 4, 1024), f32)),
         qkv.Compress(part(8, 256), part(8, 256), of((layers, 4, 256), f32))),
        part(8, 64),
    )  # fmt: skip
    cs = of((rows, 2, 32), f32)

    def between(p: Any, a: Any, b: Any, raw: Any, slot: Any, pos: Any, cs: Any, layer: Any) -> Any:
        return qkv.launch_inputs(
            p, a, b, raw, slot, pos, cs, layer, layer, True, 0.1, 1e-6, interpret=False
        )

    found += lower(
        between, projected, of((layers, 1024), f32), of((layers, 512), f32),
        of((layers, 7, 144, 512), bf16), of((rows,), i32), of((rows,), i32), cs, layer,
    )  # fmt: skip
    found += lower(
        lambda q, iq, cs: qkv.launch_heads(
            (q, iq), cs, ((512, True), (128, False)), 1e-6, interpret=False
        ),
        part(1, 64 * 512), part(2, 64 * 128), cs,
    )  # fmt: skip

    def route(gate: Any, g: Any, u: Any, bias: Any, token: Any, live: Any, layer: Any) -> Any:
        return router.launch(
            gate, router.Shared(g, u, 10.0), bias, None, token, live, layer, 6, 1.5, True,
            interpret=False,
        )  # fmt: skip

    found += lower(
        route, part(8, 256), part(8, 2048), part(8, 2048), of((layers, 256), f32),
        of((rows,), i32), of((rows,), bool), layer,
    )  # fmt: skip
    return found


def attention_kernels(rows: int, ratio: int, *, chunk: bool = False) -> list[Kernel]:
    """Attention over the cache at the real model's sizes and 32,768 tokens; the pools are as large
    as a device holds, so that offsets take 64 bits."""
    of, bf16, i32, pages = jax.ShapeDtypeStruct, jnp.bfloat16, jnp.int32, 8193
    row, comp = of((rows,), i32), None
    step = (of((rows, 512), bf16), row) if chunk else ()
    window = cached_attention.Window(of((43, 9, 144, 512), bf16), of((), i32), row, row, *step)
    if ratio:
        comp = cached_attention.Compressed(
            of((21, pages * (128 // ratio), 512), bf16), of((), i32), of((9, 256), i32), row,
            of((rows, 512), i32) if ratio == 4 else None,
        )  # fmt: skip

    def attend(q: Any, sink: Any, window: Any, comp: Any, layer: Any, cs: Any) -> Any:
        return cached_attention.launch(q, sink, window, comp, layer, 128, cs, "rocm")

    found = lower(
        attend, of((rows, 64, 512), bf16), of((2, 64), jnp.float32), window, comp, of((), i32),
        of((rows, 2, 32), jnp.float32),
    )  # fmt: skip
    kind = f"ratio {ratio}" + (" chunk" if chunk else "")
    return [dataclasses.replace(k, name=f"{k.name}/{kind}") for k in found]


def indexer_kernels(rows: int, tokens: int = 32768) -> list[Kernel]:
    """Index scores and the best 512 of a history of `tokens`."""
    of, bf16, i32 = jax.ShapeDtypeStruct, jnp.bfloat16, jnp.int32

    def select(q: Any, w: Any, k: Any, layer: Any, table: Any, slot: Any, visible: Any) -> Any:
        return row_selection.launch(q, w, k, layer, table, slot, visible, 512, "rocm")

    return lower(
        select, of((rows, 64, 128), bf16), of((rows, 64), jnp.float32),
        of((21, 8193 * 32, 128), bf16), of((), i32), of((9, tokens // 128), i32), of((rows,), i32),
        of((rows,), i32),
    )  # fmt: skip


def compressor_kernels(rows: int, ratio: int, *, chunk: bool = False) -> list[Kernel]:
    """The compressors of a layer at the real model's sizes."""
    of, f32, i32, overlap = jax.ShapeDtypeStruct, jnp.float32, jnp.int32, 2 if ratio == 4 else 1
    states = tuple(
        compressed_rows.State(
            of((21, 9, 128 // ratio + 16, 2, overlap * d), f32),
            of((21, 8193 * (128 // ratio), d), jnp.bfloat16), of((rows, 2, overlap * d), f32),
            of((2, d), f32),
        )
        for d in ((512, 128) if ratio == 4 else (512,))
    )  # fmt: skip

    def update(states: Any, at: Any, table: Any, cs: Any, layer: Any, index: Any) -> Any:
        return compressed_rows.launch(
            states, at, table, cs, layer, index, ratio, 1e-6, chunk, "rocm"
        )

    found = lower(
        update, states, compressed_rows.Rows(*[of((rows,), i32)] * 4), of((9, 256), i32),
        of((rows, 2, 32), f32), of((), i32), of((), i32),
    )  # fmt: skip
    return [dataclasses.replace(k, name=f"{k.name}/ratio {ratio}") for k in found]


def cache_kernels(rows: int) -> Iterator[Kernel]:
    """The kernels of a layer that read and write the cache; chunks from 17 rows on."""
    chunk = rows > 16
    for ratio in (0, 4, 128):
        yield from attention_kernels(rows, ratio, chunk=chunk)
    for ratio in (4, 128):
        yield from compressor_kernels(rows, ratio, chunk=chunk)
    for tokens in (32768, 1 << 20):
        for k in indexer_kernels(rows, tokens):
            yield dataclasses.replace(k, name=f"{k.name}/{tokens} tokens")


SMALL = (
    "streams", "qkv", "router", "attention_merge", "indexer_pick", "compressor", "nucleus",
    "vocabulary_sums",
)  # fmt: skip
"""Kernels that read neither weights nor keys."""


def rules(kernel: Kernel | Figures) -> dict[str, Any]:
    """What `Figures.problems` asks of a kernel."""
    name = kernel.name if isinstance(kernel, Kernel) else kernel.kernel
    if not name.startswith(SMALL):
        return {}
    # Two waves of 64 take a chunk of 128 bfloat16 channels of a row a channel each.
    least = 16 if name.startswith("streams_mix") else 32
    return {"weight_bits": 32, "least_bits": least, "matrix": False}


def sampling_kernels(rows: int) -> list[Kernel]:
    """What sampling asks of logits."""
    of, size = jax.ShapeDtypeStruct, 129280

    def fn(z: Any, top_k: Any, top_p: Any, wanted: Any) -> Any:
        z = vocabulary.launch_nucleus(z, top_k, top_p, interpret=False)
        return z, vocabulary.launch_sums(z, wanted, interpret=False)

    ints, floats = of((rows,), jnp.int32), of((rows,), jnp.float32)
    return lower(fn, of((rows, size), jnp.float32), ints, floats, of((rows,), jnp.bool_))


def all_kernels() -> Iterator[Kernel]:
    """Every kernel with its default tile: all formats, few and many rows."""
    yield from sampling_kernels(8)
    for rows in (8, 256):
        for k in (*several_kernel(rows), *step_kernels(rows), *cache_kernels(rows)):
            yield dataclasses.replace(k, name=f"{k.name}/{rows} rows")
    for format in (*sorted(decode.DECODABLE), *dense.PLAIN):
        for rows in (8, 256):
            for k in dense_kernel(format, rows):
                yield dataclasses.replace(k, name=f"{k.name}/{rows} rows")
    pairs = (("mxfp4", "mxfp4"), ("rocmfp2_s40", "rocmfp3"), ("rocmfp4_fast", "rocmfp4"),
             ("iq2_xxs", "q2_k"))  # fmt: skip
    for up, down in pairs:
        for rows in (8, 256):
            for k in expert_kernels(up, down, rows):
                yield dataclasses.replace(k, name=f"{k.name}/{rows} rows")


def table(figures: list[Figures]) -> str:
    """The documentation's table, Markdown."""
    lines = [
        "| kernel | target | VGPRs | spills | LDS bytes | code bytes | loads by bits |"
        " matrix instructions | bound, ratio |",
        "|---|---|---:|---:|---:|---:|---|---|---|",
    ]
    for f in figures:
        widths: dict[int, int] = {}
        for name, count in f.loads.items():
            widths[_bits(name)] = widths.get(_bits(name), 0) + count
        loads = ", ".join(f"{bits}: {widths[bits]}" for bits in sorted(widths, reverse=True))
        matrix = ", ".join(f"{n} x {c}" for n, c in sorted(f.matrix.items())) or "-"
        what, ratio = f.bound
        lines.append(
            f"| {f.kernel} | {f.arch} | {f.vgprs} | {f.vgpr_spills} | {f.lds_bytes} |"
            f" {f.code_bytes} | {loads} | {matrix} | {what}, {ratio:.2f} |"
        )
    return "\n".join(lines)


PAGE = """# Machine code for AMD

Written by `python -m bench.amd_isa`: every kernel, lowered for ROCm by JAX {jax} and compiled by
the HIP backend of Triton {triton}. No AMD device was involved, nothing here is a time; the Triton
inside XLA is another version, so registers and schedules on a real machine can differ.

*Bound* is an estimate for the loop that loads most: its vector instructions (a matrix instruction
counts as several) at one per cycle and SIMD, over its loaded bytes, activations included, at full
bandwidth. Below 1 bandwidth bounds the loop on paper, above it arithmetic does. Taken for
{devices}. Kernels that read no weights are short: launch and latency bound them, whatever the
ratio.

{table}
"""


def page(report: dict[str, Any]) -> str:
    """docs/amd_isa.md from a report."""
    devices = ", ".join(f"{k}: {r.device}, {r.GBps:.0f} GB/s" for k, r in RATES.items())
    figures = [Figures(**r) for r in report["kernels"]]
    return PAGE.format(
        jax=report["jax"], triton=report["triton"], devices=devices, table=table(figures)
    )


def _known(file: Path | None, versions: dict[str, Any]) -> dict[tuple[str, str, str], Figures]:
    """Figures of an earlier run with the same compilers."""
    if file is None or not file.exists():
        return {}
    old = json.loads(file.read_text(encoding="utf-8"))
    if any(old[k] != v for k, v in versions.items()):
        return {}
    return {(r["kernel"], r["arch"], r["source"]): Figures(**r) for r in old["kernels"]}


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="bench.amd_isa", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--table", type=Path, help="make the page from such a file")
    parser.add_argument("--page", type=Path, default=Path("docs/amd_isa.md"))
    args = parser.parse_args(argv)
    if args.table:
        report = json.loads(args.table.read_text(encoding="utf-8"))
        args.page.write_text(page(report), encoding="utf-8")
        return 0
    import triton

    report: dict[str, Any] = {"schema": 1, "jax": jax.__version__, "triton": triton.__version__}
    known = _known(args.json, report)
    figures: list[Figures] = []
    bad = 0
    for kernel in all_kernels():
        for arch in ARCHS:
            f = known.pop((kernel.name, arch, kernel.source), None) or compile_for(kernel, arch)
            figures.append(f)
            for problem in f.problems(**rules(f)):
                bad += 1
                print(f"{f.kernel} on {arch}: {problem}", file=sys.stderr)
        if args.json:  # also what this run has not come to yet: it may be stopped
            report["kernels"] = [dataclasses.asdict(f) for f in (*figures, *known.values())]
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    report["kernels"] = [dataclasses.asdict(f) for f in figures]
    args.page.write_text(page(report), encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
