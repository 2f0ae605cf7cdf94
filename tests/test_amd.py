"""AMD machine code of every kernel, compiled here without a device.

The default run compiles one kernel of each kind for all four targets; `-m slow` compiles all
of them and every entry of the tile tables.
"""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from typing import Any

import pytest

from bench import amd_isa
from pallas_kernels import dense, experts

pytest.importorskip("triton", reason="the Triton package compiles for AMD (extra 'test')")


def check(kernel: amd_isa.Kernel, arch: str) -> amd_isa.Figures:
    """Compiles and applies the gate."""
    figures = amd_isa.compile_for(kernel, arch)
    plan = "plan" in kernel.name
    problems = figures.problems(weight_bits=32 if plan else 64, matrix=not plan)
    assert not problems, f"{kernel.name} on {arch}: {'; '.join(problems)}"
    return figures


@pytest.mark.parametrize("arch", amd_isa.ARCHS)
@pytest.mark.parametrize(("format", "rows"), [("rocmfp4", 8), ("q8_0", 256)])
def test_dense_kernels(format: str, rows: int, arch: str) -> None:
    [kernel] = amd_isa.dense_kernel(format, rows)
    figures = check(kernel, arch)
    assert figures.lds_bytes <= 16 << 10


@pytest.mark.parametrize("arch", amd_isa.ARCHS)
def test_expert_kernels(arch: str) -> None:
    kernels = amd_isa.expert_kernels("rocmfp2_s40", "rocmfp3", 8)
    assert [k.name.split("_")[1] for k in kernels] == ["plan", "up", "down"]
    for kernel in kernels:
        check(kernel, arch)


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
    kinds = {"dense": dense.Tile, "experts": experts.Tile}
    for file, op, key, entry in _entries():
        tile = kinds[op](**entry)
        assert all(v > 0 for k, v in entry.items() if k != "wide"), f"{file} {op} {key}: {tile}"


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
