"""What AMD machine code the kernels become, without an AMD device.

Lowers a kernel for ROCm with JAX, hands its Triton IR to the Triton package's HIP compiler and
reads the assembly: registers, spills, scratch, shared memory, widths of loads, matrix instructions.
The gate in `tests/test_amd.py` is built on it, and `python -m bench.amd_isa --json OUT` writes the
figures (`--table` prints the documentation's table from such a file). Nothing here is a time.
"""

from __future__ import annotations

import argparse
import dataclasses
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

from pallas_kernels import decode, dense, experts, packing

ARCHS = ("gfx1151", "gfx1201", "gfx942", "gfx950")
"""RDNA 3.5 (Strix Halo), RDNA 4 (R9700), CDNA 3 and 4 (MI300, MI350)."""

LDS_LIMIT = 64 << 10
"""Shared memory of a workgroup, bytes (gfx950 has more)."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Pallas call lowered for ROCm."""

    name: str
    ir: str
    num_warps: int
    num_stages: int


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

    def problems(self, *, weight_bits: int = 64, matrix: bool = True) -> list[str]:
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
        if narrow := {n: c for n, c in self.loads.items() if _bits(n) < 32}:
            out.append(f"loads of less than 32 bits: {narrow}")
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
    return read(kernel.name, arch, built.asm["amdgcn"], int(built.metadata.shared))


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
    )


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


def all_kernels() -> Iterator[Kernel]:
    """Every kernel with its default tile: all formats, few and many rows."""
    for format in (*sorted(decode.DECODABLE), *dense.PLAIN):
        for rows in (8, 256):
            for k in dense_kernel(format, rows):
                yield dataclasses.replace(k, name=f"{k.name}/{rows} rows")
    for up, down in (("mxfp4", "mxfp4"), ("rocmfp2_s40", "rocmfp3"), ("rocmfp4_fast", "rocmfp4")):
        for rows in (8, 256):
            for k in expert_kernels(up, down, rows):
                yield dataclasses.replace(k, name=f"{k.name}/{rows} rows")


def table(figures: list[Figures]) -> str:
    """The documentation's table, Markdown."""
    lines = [
        "| kernel | target | VGPRs | LDS bytes | code bytes | instructions | widest load |"
        " matrix instructions |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for f in figures:
        widest = max((_bits(n) for n in f.loads), default=0)
        matrix = ", ".join(f"{n} x {c}" for n, c in sorted(f.matrix.items())) or "-"
        lines.append(
            f"| {f.kernel} | {f.arch} | {f.vgprs} | {f.lds_bytes} | {f.code_bytes} |"
            f" {f.instructions} | {widest} | {matrix} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--table", type=Path, help="print the Markdown table of such a file")
    args = parser.parse_args(argv)
    if args.table:
        rows = json.loads(args.table.read_text(encoding="utf-8"))["kernels"]
        print(table([Figures(**r) for r in rows]))
        return 0
    figures = []
    bad = 0
    for kernel in all_kernels():
        for arch in ARCHS:
            f = compile_for(kernel, arch)
            figures.append(f)
            plan = "plan" in kernel.name
            for problem in f.problems(matrix=not plan, weight_bits=32 if plan else 64):
                bad += 1
                print(f"{f.kernel} on {arch}: {problem}", file=sys.stderr)
    if args.json:
        import triton

        report = {
            "schema": 1,
            "jax": jax.__version__,
            "triton": triton.__version__,
            "kernels": [dataclasses.asdict(f) for f in figures],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
