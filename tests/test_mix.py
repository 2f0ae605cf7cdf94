"""Codebook tables of the MIX types: valid ones, damaged ones, hostile ones."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax import mix, quant
from ds4jax.errors import ModelFileError


def books(levels: int, count: int, seed: int = 0) -> np.ndarray:
    """uint16 [count, 2, levels]: strictly increasing bfloat16 levels in [-1, 1]."""
    rng = np.random.default_rng(seed)
    grid = np.linspace(-1, 1, levels) + rng.uniform(0, 0.5 / levels, (count, 2, levels))
    return (grid.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def head(magic: bytes, count: int) -> bytes:
    return magic.ljust(8, b"\0") + struct.pack("<2I", count, 0)


def p4_entry(layer: int, experts: int = 3, **change: int) -> bytes:
    numbers = {"out": 64, "in": 32, "C": 2, "K": 8, **change}
    modes = bytes([1] * (experts - 1) + [0])
    return (
        struct.pack("<6I", layer, experts, *(numbers[k] for k in ("out", "in", "C", "K")))
        + modes
        + bytes([numbers.get("rotation", 0)] * experts)
        + books(8, experts, layer).tobytes()
    )


def gu_entry(layer: int, surface: int, experts: int = 3, **change: int) -> bytes:
    numbers = {"out": 32, "in": 64, "C": 2, "K": 4, **change}
    return (
        struct.pack("<7I", layer, surface, experts, *(numbers[k] for k in ("out", "in", "C", "K")))
        + bytes([numbers.get("mode", 1)] * experts)
        + books(4, experts, layer).tobytes()
    )


def dense_entry(layer: int, kind: int, type_id: int, mode: int = 1) -> bytes:
    levels = {105: 8, 106: 4}.get(type_id, 8)
    return (
        struct.pack("<6I", layer, kind, type_id, 1, 2, levels)
        + bytes([mode, 0, 0, 0])
        + books(levels, 1, layer).tobytes()
    )


P4 = head(b"P4MIXv1", 2) + p4_entry(0) + p4_entry(5)
GU = head(b"GUMIXs1", 3) + gu_entry(0, 0) + gu_entry(0, 1) + gu_entry(7, 2)
DENSE = (
    head(b"DMIXs1", 3) + dense_entry(0, 0, 105) + dense_entry(0, 4, 106) + dense_entry(1, 2, 105)
)


def test_p4mix() -> None:
    tables = mix.parse(P4, "p4")
    assert list(tables) == ["blk.0.ffn_down_exps.weight", "blk.5.ffn_down_exps.weight"]
    table = tables["blk.5.ffn_down_exps.weight"]
    assert table.format == "rocmfp3_mix"
    assert table.shape == (3, 64, 32)
    assert table.modes.tolist() == [1, 1, 0]
    assert (table.codebooks_bf16 == books(8, 3, 5)).all()
    packed = np.full((3, 64, 14), 0x31, np.uint8)
    decoded = quant.decode(
        table.format, packed, modes=table.modes, codebooks_bf16=table.codebooks_bf16
    )
    assert decoded.shape == (3, 64, 32) and np.isfinite(decoded).all()


def test_gumix() -> None:
    tables = mix.parse(np.frombuffer(GU, np.uint8), "gu")
    assert list(tables) == [
        "blk.0.ffn_gate_exps.weight",
        "blk.0.ffn_up_exps.weight",
        "blk.7.ffn_down_exps.weight",
    ]
    table = tables["blk.0.ffn_up_exps.weight"]
    assert (table.format, table.shape) == ("rocmfp2_mix", (3, 32, 64))
    assert table.codebooks_bf16.shape == (3, 2, 4)


def test_dmix() -> None:
    tables = mix.parse(memoryview(DENSE), "dense")
    assert list(tables) == [
        "blk.0.attn_q_a.weight",
        "blk.0.attn_output_b.weight",
        "blk.1.attn_kv.weight",
    ]
    table = tables["blk.0.attn_output_b.weight"]
    assert (table.format, table.shape, table.modes.shape) == ("rocmfp2_mix", None, ())
    assert table.codebooks_bf16.shape == (2, 4)
    decoded = quant.decode(
        table.format,
        np.full((7, 20), 0x31, np.uint8),
        modes=table.modes,
        codebooks_bf16=table.codebooks_bf16,
    )
    assert decoded.shape == (7, 64)


def test_empty_table() -> None:
    assert mix.parse(head(b"DMIXs1", 0), "x") == {}


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b"", ["0 bytes", "head of 16"]),
        (P4[:15], ["15 bytes"]),
        (b"P4MIXv2\0" + P4[8:], ["magic b'P4MIXv2", "P4MIXv1, GUMIXs1 or DMIXs1"]),
        (b"GUMIXv1\0" + GU[8:], ["fused gate/up form"]),
        (b"DMX2s1\0\0" + GU[8:], ["name-keyed form of other models"]),
        (P4[:-1], ["codebooks of 96 bytes with 95 bytes left"]),
        (P4 + b"\0", ["1 bytes after the last entry"]),
        (head(b"P4MIXv1", 2**32 - 1) + p4_entry(0), ["4294967295 entries", "at most"]),
        (head(b"P4MIXv1", 1) + p4_entry(0), []),
        (
            head(b"P4MIXv1", 1) + struct.pack("<6I", 0, 2**32 - 1, 1, 1, 2, 8) + bytes(100),
            ["modes of 4294967295 bytes with 100 bytes left"],
        ),
        (head(b"P4MIXv1", 1) + struct.pack("<6I", 0, 0, 1, 1, 2, 8) + bytes(40), ["0 experts"]),
        (head(b"P4MIXv1", 1) + p4_entry(0, C=3), ["3 codebooks of 8 levels", "2 of 8"]),
        (head(b"P4MIXv1", 1) + p4_entry(0, K=4), ["2 codebooks of 4 levels"]),
        (head(b"P4MIXv1", 1) + p4_entry(0, rotation=1), ["a rotation in 3 experts"]),
        (head(b"P4MIXv1", 1) + p4_entry(1 << 16), ["layer 65536"]),
        (head(b"P4MIXv1", 2) + p4_entry(4) + p4_entry(4), ["ffn_down_exps.weight a second time"]),
        (head(b"GUMIXs1", 1) + gu_entry(0, 3), ["surface 3", "0 gate, 1 up or 2 down"]),
        (head(b"GUMIXs1", 1) + gu_entry(0, 0, mode=9), ["codebook modes [9]"]),
        (head(b"DMIXs1", 1) + dense_entry(0, 5, 105), ["class 5", "attn_q_a"]),
        (head(b"DMIXs1", 1) + dense_entry(0, 0, 104), ["type 104", "105 or 106"]),
        (head(b"DMIXs1", 1) + dense_entry(0, 0, 106, mode=2), ["codebook modes [2]"]),
    ],
)
def test_damage_is_named(data: bytes, texts: list[str]) -> None:
    if not texts:
        assert mix.parse(data, "side.bin")
        return
    with pytest.raises(ValueError) as error:
        mix.parse(data, "side.bin")
    assert "side.bin" in str(error.value)
    for text in texts:
        assert text in str(error.value)


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0, None])
def test_levels_must_be_finite_and_increase(value: int | None) -> None:
    data = bytearray(P4)
    at = 16 + 24 + 6 + 2 * 3  # entry 0, expert 0, book 0, level 3
    data[at : at + 2] = data[at - 2 : at] if value is None else struct.pack("<H", value)
    with pytest.raises(ModelFileError, match="in 1 of 6 places, first at \\(0, 0\\)"):
        mix.parse(data, "side.bin")


def test_levels_of_fixed_experts_are_not_looked_at() -> None:
    data = bytearray(P4)
    start = 16 + 24 + 6 + 2 * 32  # entry 0, expert 2 (mode 0)
    data[start : start + 32] = bytes(32)
    assert mix.parse(data, "side.bin")["blk.0.ffn_down_exps.weight"].modes[2] == 0


def test_all_findings_are_reported_at_once() -> None:
    entries = gu_entry(0, 0, mode=9) + gu_entry(0, 5) + gu_entry(0, 0)
    with pytest.raises(ModelFileError) as error:
        mix.parse(head(b"GUMIXs1", 3) + entries, "side.bin")
    assert [p.where for p in error.value.problems] == ["entry 0", "entry 1", "entry 2"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.sampled_from([P4, GU, DENSE]),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.integers(0, 500),
)
def test_no_bytes_crash_the_parser(
    data: bytes, changes: list[tuple[int, int]], length: int
) -> None:
    damaged = bytearray(data[:length])
    for at, value in changes:
        if at < len(damaged):
            damaged[at] = value
    try:
        tables = mix.parse(damaged, "side.bin")
    except ModelFileError as error:
        assert error.problems
        return
    for table in tables.values():
        assert table.modes.max() <= 1
        assert table.codebooks_bf16.shape[-1] == {"rocmfp3_mix": 8, "rocmfp2_mix": 4}[table.format]


def test_hostile_counts_allocate_nothing() -> None:
    data = head(b"P4MIXv1", 1) + struct.pack("<6I", 0, 2**31, 2**31, 2**31, 2, 8) + bytes(1000)
    tracemalloc.start()
    with pytest.raises(ModelFileError):
        mix.parse(data, "side.bin")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


# coverage ---------------------------------------------------------------------------------------

TENSORS: dict[str, tuple[int, tuple[int, ...]]] = {
    "blk.0.ffn_down_exps.weight": (105, (3, 64, 32)),
    "blk.5.ffn_down_exps.weight": (105, (3, 64, 32)),
    "blk.0.attn_q_a.weight": (105, (16, 64)),
    "blk.0.attn_output_b.weight": (106, (64, 32)),
    "blk.1.attn_kv.weight": (105, (16, 64)),
    "output.weight": (8, (100, 64)),
}


def test_complete_coverage_has_no_problems() -> None:
    tables = [mix.parse(P4, "p4"), mix.parse(DENSE, "dense")]
    assert mix.coverage_problems(tables, TENSORS, "m.gguf") == []


def change(name: str, value: tuple[int, tuple[int, ...]] | None) -> Callable[[dict], None]:
    def apply(tensors: dict) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    return apply


@pytest.mark.parametrize(
    ("apply", "text"),
    [
        (change("blk.5.ffn_down_exps.weight", None), "found codebooks for it"),
        (change("blk.5.ffn_down_exps.weight", (106, (3, 64, 32))), "type 106 with codebooks of 8"),
        (change("blk.5.ffn_down_exps.weight", (105, (3, 32, 64))), "shape [3, 32, 64]"),
        (change("blk.9.ffn_up_exps.weight", (106, (3, 32, 64))), "type 106 without codebooks"),
        (change("blk.1.attn_kv.weight", (105, (2, 16, 64))), "3 dimensions"),
    ],
)
def test_gaps_in_coverage_are_named(apply: Callable[[dict], None], text: str) -> None:
    tensors = dict(TENSORS)
    apply(tensors)
    tables = [mix.parse(P4, "p4"), mix.parse(DENSE, "dense")]
    (problem,) = mix.coverage_problems(tables, tensors, "m.gguf")
    assert text in str(problem)


def test_a_tensor_in_two_tables_is_a_problem() -> None:
    tables = [mix.parse(P4, "p4"), mix.parse(DENSE, "dense"), mix.parse(P4, "again")]
    problems = mix.coverage_problems(tables, TENSORS, "m.gguf")
    assert len(problems) == 2 and all("two side tables" in p.found for p in problems)
