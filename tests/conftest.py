"""Test settings: CPU, strict promotion, data paths, and one place for compiled programs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

DATA = Path(__file__).parent / "data"


def pytest_configure(config: pytest.Config) -> None:
    """What takes long to compile is compiled once a run, by whichever process comes first.

    Workers and the processes that tests start inherit the directory, which ends with the run.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        place = tempfile.TemporaryDirectory(prefix="ds4jax-programs-")
        config.add_cleanup(place.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = place.name
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the checked-in reference data."""
    return DATA
