"""AMD machine code of every kernel, compiled here without a device.

The default run compiles one kernel of each kind for all four targets; `-m slow` compiles all
of them and every entry of the tile tables.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

import pytest

from bench import amd_isa
from pallas_kernels import cached_attention, compressed_rows, dense, experts, row_selection

pytest.importorskip("triton", reason="the Triton package compiles for AMD (extra 'test')")


def check(kernel: amd_isa.Kernel, arch: str) -> amd_isa.Figures:
    """Compiles and applies the gate."""
    figures = amd_isa.compile_for(kernel, arch)
    problems = figures.problems(**amd_isa.rules(kernel))
    assert not problems, f"{kernel.name} on {arch}: {'; '.join(problems)}"
    return figures


@pytest.mark.parametrize("arch", amd_isa.ARCHS)
@pytest.mark.parametrize(("format", "rows"), [("rocmfp4", 8), ("q8_0", 256), ("iq2_xxs", 256)])
def test_dense_kernels(format: str, rows: int, arch: str) -> None:
    [kernel] = amd_isa.dense_kernel(format, rows)
    figures = check(kernel, arch)
    assert figures.lds_bytes <= 16 << 10


@pytest.mark.parametrize("arch", amd_isa.ARCHS)
def test_expert_kernels(arch: str) -> None:
    kernels = amd_isa.expert_kernels("rocmfp2_s40", "rocmfp3", 8)
    assert [k.name.split("_")[1] for k in kernels] == ["up", "down"]
    for kernel in kernels:
        check(kernel, arch)


@pytest.mark.parametrize("arch", amd_isa.ARCHS)
@pytest.mark.parametrize("rows", [8, pytest.param(256, marks=pytest.mark.slow)])
def test_expert_kernels_that_look_up_a_table(rows: int, arch: str) -> None:
    up = next(k for k in _looking_up(rows) if k.name == "experts_up_iq2_xxs")
    figures = check(up, arch)
    # Of 16 x 128 weights a wave and pass; q2_k takes 1.6 times as many on RDNA.
    lane = 16 * 128 // (64 if arch.startswith("gfx9") else 32)
    assert figures.loop["vector"] < 8.5 * lane


@functools.cache
def _looking_up(rows: int) -> list[amd_isa.Kernel]:
    return amd_isa.expert_kernels("iq2_xxs", "q2_k", rows)


@pytest.mark.parametrize("arch", amd_isa.ARCHS)
def test_kernels_of_several_matrices(arch: str) -> None:
    [kernel] = amd_isa.several_kernel(8)
    check(kernel, arch)


@pytest.mark.parametrize("arch", amd_isa.ARCHS)
def test_small_kernels(arch: str) -> None:
    kernels = _step_kernels()
    assert [k.name for k in kernels] == [
        "streams_mix", "streams_read", "streams_read_head", "qkv_inputs",
        "qkv_heads", "router",
    ]  # fmt: skip
    for kernel in kernels:
        check(kernel, arch)


@functools.cache
def _step_kernels() -> list[amd_isa.Kernel]:
    return amd_isa.step_kernels(8)


@pytest.mark.parametrize("arch", amd_isa.ARCHS)
def test_sampling_kernels(arch: str) -> None:
    for kernel in _sampling_kernels():
        check(kernel, arch)


@functools.cache
def _sampling_kernels() -> list[amd_isa.Kernel]:
    return amd_isa.sampling_kernels(8)


@pytest.mark.parametrize("arch", amd_isa.ARCHS)
def test_cache_kernels(arch: str) -> None:
    kernels = _cache_kernels()
    assert [k.name.split("/")[0] for k in kernels] == [
        "attention_splits", "attention_merge", "attention", "indexer_score", "indexer_pick",
        "compressor", "compressor_store",
    ]  # fmt: skip
    for kernel in kernels:
        check(kernel, arch)


@functools.cache
def _cache_kernels() -> list[amd_isa.Kernel]:
    return [
        *amd_isa.attention_kernels(8, 4),
        *amd_isa.attention_kernels(256, 128),
        *amd_isa.indexer_kernels(8),
        *amd_isa.compressor_kernels(256, 128, chunk=True),
    ]


def test_the_loop_and_its_bound() -> None:
    asm = """
.LBB0_1:
\tv_add_f32 v0, v1, v2
\tglobal_load_b128 v[0:3], v4, s[0:1]
.LBB0_2:
\tglobal_load_b64 v[0:1], v4, s[0:1]
\tv_wmma_f32_16x16x16_bf16 v0, v1, v2
\tv_mul_f32 v0, v1, v2
\ts_cbranch_scc0 .LBB0_2
\ts_cbranch_scc1 .LBB0_1
.section\t.rodata
"""
    found = amd_isa._loop(asm, 32)
    assert found == {"vector": 1, "matrix": 1, "bytes": 256}
    figures = amd_isa.Figures("k", "gfx1151", 9, 9, 0, 0, 0, 9, {}, {}, 9, loop=found)
    assert figures.bound[0] == "bandwidth"
    slow = dataclasses.replace(figures, loop={"vector": 10_000, "matrix": 1, "bytes": 256})
    assert slow.bound[0] == "arithmetic"


def test_the_gate_sees_what_is_wrong() -> None:
    good = amd_isa.Figures(
        "k", "gfx1201", 9, 9, 0, 0, 0, 9, {"global_load_b128": 1}, {"v_wmma": 1}, 9
    )
    assert not good.problems()
    bad = {
        "spills": {"vgpr_spills": 1},
        "bytes of scratch": {"scratch_bytes": 4},
        "LDS": {"lds_bytes": 65537},
        "widest": {"loads": {"global_load_b32": 3}},
        "less than 32": {"loads": {"global_load_b128": 3, "global_load_u8": 1}},
        "no matrix": {"matrix": {}},
    }
    for word, change in bad.items():
        [problem] = dataclasses.replace(good, **change).problems()  # type: ignore[arg-type]
        assert word in problem


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_kernel_on_every_target() -> None:
    for kernel in amd_isa.all_kernels():
        for arch in amd_isa.ARCHS:
            check(kernel, arch)


def _entries() -> list[tuple[str, str, str, dict[str, Any]]]:
    out = []
    for file in (resources.files("pallas_kernels") / "tiles").iterdir():
        if file.name.endswith(".json"):
            for op, entries in json.loads(file.read_text()).items():
                out += [(file.name, op, key, entry) for key, entry in entries.items()]
    return out


def test_tile_entries_are_legal() -> None:
    kinds: dict[str, Any] = {
        "dense": dense.Tile, "experts": experts.Tile, "attention": cached_attention.Tile,
        "indexer": row_selection.Tile, "compressor": compressed_rows.Tile,
    }  # fmt: skip
    for file, op, key, entry in _entries():
        tile = kinds[op](**entry)
        assert all(v > 0 for k, v in entry.items() if k not in ("wide", "channels")), (
            f"{file} {op} {key}: {tile}"
        )


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_tile_entries_of_amd_devices_compile() -> None:
    for file, op, key, entry in _entries():
        arch = next((a for a in amd_isa.ARCHS if a in file), None)
        if arch is None or op != "dense":
            continue
        format, size, rows = key.split("/")
        n, k = (int(v) for v in size.split("x"))
        tile = dense.Tile(**entry)
        for kernel in amd_isa.dense_kernel(format, 8 if rows == "few" else 256, n, k, tile):
            check(kernel, arch)
