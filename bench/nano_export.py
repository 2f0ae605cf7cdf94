"""Trained weights of ds4-nano as GGUF files: the float model, and the one that ships.

    python -m bench.nano_export [FOLDER] [--out FILE] [--float FILE]

FOLDER is what `bench.train_nano` wrote. Experts were trained under FP4 rounding; they are rounded
once here, so MXFP4 holds them exactly, in the float file too. The type of every other class is a
choice measured by `bench.quality`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from bench import nano_model
from ds4jax import gguf_write, hparams_write, quantize, tensors
from ds4jax.config import ModelConfig
from ds4jax.convert_types import Types, parse_types
from ds4jax.formats import FORMATS
from pallas_kernels import rounding

OUT = Path(__file__).parent.parent / "ds4jax" / "models" / "nano.gguf"

GENERAL: dict[str, Any] = {
    "general.version": "0731",  # the prompt format it was trained on
    "general.description": (
        "A DeepSeek-V4 of 7 million parameters, trained from scratch on Python's standard library,"
        " the wheels in it (pip) and generated chat turns. For demonstrations and tests."
    ),
    "general.license": "apache-2.0",
    "general.tags": ["text-generation", "python"],
}

SHIPPED = Types(
    experts_gate_up="mxfp4", experts_down="mxfp4", attention="q8_0", shared="q8_0",
    embedding="q8_0", head="q8_0", compressor="q8_0", indexer="q8_0", router="f32",
)  # fmt: skip

Arrays = dict[str, npt.NDArray[Any]]


def rounded(weights: Arrays) -> Arrays:
    """The weights with their experts on the FP4 grid they were trained for."""
    out = dict(weights)
    for name, w in weights.items():
        if ".experts." in name:
            out[name] = np.asarray(rounding.fp4_round_trip(jnp.asarray(w)))
    return out


def tensor_data(cfg: ModelConfig, weights: Arrays, types: Types) -> Iterator[gguf_write.TensorData]:
    """All tensors, each encoded as `types` says.

    Raises:
        KeyError: a tensor that was not trained.
    """
    for spec in tensors.specs(cfg):
        target, values = types.target(spec, spec.gguf), weights[spec.name]
        if target == "i32":
            data, type_id = values.astype(np.int32).view(np.uint8), 26
        else:
            data = quantize.encode(target, values.astype(np.float32))
            type_id = int(FORMATS[target].type_id or 0)
        yield gguf_write.TensorData(name=spec.gguf, type_id=type_id, shape=spec.shape, data=data)


def export(folder: Path, out: Path, types: Types) -> int:
    """Write one file of the weights and the tokenizer in `folder`; returns its bytes."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    cfg = nano_model.model_config(len(tokenizer["tokenizer.ggml.tokens"]))
    metadata = hparams_write.gguf_metadata(cfg, name="ds4-nano") | GENERAL | tokenizer
    weights = rounded(nano_model.load_weights(folder))
    out.parent.mkdir(parents=True, exist_ok=True)
    return gguf_write.write(out, metadata, tensor_data(cfg, weights, types), overwrite=True)


def main() -> None:
    """Write the shipped file and the float one beside the weights."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.nano_export")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/nano"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--float", type=Path, help="default: FOLDER/nano-f32.gguf")
    args = parser.parse_args()
    plain = args.float or args.folder / "nano-f32.gguf"
    for path, types in ((plain, parse_types(["f32"])), (args.out, SHIPPED)):
        print(f"{path}: {export(args.folder, path, types):,} bytes")


if __name__ == "__main__":
    main()
