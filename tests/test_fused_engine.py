"""The executor on kernels: a lane alone in its program of one row, and beside others in another."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from ds4jax import engine as engine_lib
from ds4jax import qualify
from tests import little_effort
from tests.test_fused import config, made, runtime


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_lane_keeps_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "jit", little_effort.jit)
    cfg = config(num_hash_layers=4)
    run = runtime("interpret", row_buckets=(1, 8), prefill_buckets=(16, 24))
    executor = engine_lib.DeviceExecutor(cfg, made(cfg, "interpret"), run)
    used: set[Any] = set()
    program = executor._step_program
    monkeypatch.setattr(executor, "_step_program", lambda b: (used.add(b.rows), program(b))[1])
    assert qualify.difference(executor) is None
    assert used == {1, 8, 16}
    executor.close()
