"""Choice of implementations: explicit, named, never silent."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from typing import Any

import pytest

from pallas_kernels import backend


def test_auto_uses_kernels_on_a_gpu_and_plain_jax_on_a_cpu() -> None:
    cpu = backend.resolve(on="cpu")
    assert set(cpu.table.values()) == {"reference"}
    rocm = backend.resolve(on="rocm")
    assert {op for op, b in rocm.table.items() if b == "triton"} == backend.KERNELS
    assert len(rocm.notes) == len(backend.OPS)


def test_overrides_win_and_are_checked() -> None:
    r = backend.resolve(on="cuda", overrides={"dense": "reference"})
    assert r["dense"] == "reference"
    assert r["experts"] == "triton"
    with pytest.raises(ValueError, match="no such operation: nonsense; known: attention"):
        backend.resolve(on="cpu", overrides={"nonsense": "reference"})


def test_asking_for_what_does_not_exist_says_what_does() -> None:
    with pytest.raises(NotImplementedError, match="no triton backend on cpu; there is: ref"):
        backend.resolve("triton", on="cpu")
    with pytest.raises(ValueError, match="'cuda' is no backend"):
        backend.require("dense", "cuda")


def test_platform_here_is_a_cpu() -> None:
    assert backend.platform() == "cpu"
    assert backend.device_kind() == "cpu"


@dataclasses.dataclass(frozen=True)
class _Tile:
    rows: int = 16
    warps: int = 4


def test_tile_entries_override_fields_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def table(kind: str) -> dict[str, Any]:
        return {"dense": {"a": {"rows": 32}, "b": {"lines": 1}}} if kind == "here" else {}

    monkeypatch.setattr(backend, "_table", table)
    assert backend.tile("dense", _Tile(), key="a", target="cuda", kind="here") == _Tile(rows=32)
    assert backend.tile("dense", _Tile(), key="c", target="cuda", kind="here") == _Tile()
    assert backend.tile("dense", _Tile(), key="a", target="cuda", kind="there") == _Tile()
    assert backend.tile("dense", _Tile(), key="a", target="rocm") == _Tile()
    with pytest.raises(ValueError, match="unknown fields \\['lines'\\]"):
        backend.tile("dense", _Tile(), key="b", target="cuda", kind="here")


def test_every_tile_table_names_operations_that_exist() -> None:
    for file in (resources.files("pallas_kernels") / "tiles").iterdir():
        if file.name.endswith(".json"):
            assert set(json.loads(file.read_text())) <= backend.KERNELS, file.name
