"""Test settings: CPU, strict promotion, data paths, and one place for compiled programs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

DATA = Path(__file__).parent / "data"

LONG = (
    "test_oracle.py", "test_cli_run.py", "test_fused.py", "test_engine.py", "test_nano.py",
    "test_serving_exact.py", "test_research.py", "test_kernel_experts.py", "test_train_nano.py",
    "test_server_process.py", "test_sequence.py", "test_weights.py", "test_model.py",
    "test_scheduler.py", "test_server.py", "test_kernel_dense.py", "test_local.py",
)  # fmt: skip
"""Files that take longest, which workers take first: the rest fills the gaps at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """What takes long to compile is compiled once a run, by whichever process comes first.

    Workers and the processes that tests start inherit the directory, which ends with the run.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        place = tempfile.TemporaryDirectory(prefix="ds4jax-programs-")
        config.add_cleanup(place.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = place.name
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order of `LONG`; the order within a file stays."""
    place = {name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the checked-in reference data."""
    return DATA
