"""Test settings: CPU, strict promotion, and data paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the checked-in reference data."""
    return DATA
