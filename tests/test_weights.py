"""Loading onto the device: bits equal the decoders', whatever the way; random weights."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import model_files as mf
import numpy as np
import pytest

from ds4jax import model_file, params, quant, synthetic, tensors, weights
from ds4jax.config import DraftConfig, RuntimeConfig
from ds4jax.errors import ModelFileError
from pallas_kernels import formats as device_formats
from pallas_kernels import packing
from pallas_kernels.packing import QuantArray

RUNTIME = RuntimeConfig(max_ctx=256)
ORACLE = [
    "w16/model.MXFP4_MOE.gguf",
    "w16/model.Q3_0_ROCMFPX.gguf",
    "w16/model.Q4_0_ROCMFP4.gguf",
    "w128/model.Q6_0_ROCMFPX.gguf",
    "w16",
]


def leaves_by_spec(
    cfg: Any, tree: params.Params, specs: list[tensors.TensorSpec]
) -> dict[str, Any]:
    host = jax.tree.map(np.asarray, tree)
    layers = [w for _, w in host.layers()]
    assert len(layers) == cfg.num_layers
    return {s.name: tree.top[s.key] if s.layer is None else layers[s.layer][s.key] for s in specs}


def assert_equals_file(model: model_file.ModelFile, tree: params.Params, dtype: Any) -> int:
    """Every weight of the tree is that of the file, in the dtype it should have; packed ones."""
    packed = 0
    leaves = leaves_by_spec(model.config, tree, model.specs())
    for spec in model.specs():
        leaf = leaves[spec.name]
        if spec.kind == "table":
            np.testing.assert_array_equal(np.asarray(leaf), model.read_table(spec))
            assert leaf.dtype == jnp.int32
            continue
        if isinstance(leaf, QuantArray):
            packed += 1
            assert_equals_packed(leaf, model.read(spec))
            continue
        expected = params.weight_dtype(spec.key, dtype)
        assert leaf.dtype == expected and leaf.shape == spec.shape
        want = model.read_float32(spec).astype(expected)
        np.testing.assert_array_equal(leaf, want, err_msg=spec.name)
    return packed


def assert_equals_packed(leaf: QuantArray, piece: Any) -> None:
    """The arrays that packing the whole tensor at once on the host gives."""
    side = dict(piece.side)
    want = packing.pack(piece.format, piece.data, **side)
    assert (leaf.format, leaf.rows, leaf.cols) == (want.format, want.rows, want.cols)
    for got, expected in zip(leaf.arrays(), want.arrays(), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_unpacking_on_the_device_gives_the_numbers_of_the_file(data_dir: Path) -> None:
    model = model_file.open_model(data_dir / "oracle/w16/model.Q3_0_ROCMFPX.gguf")
    _, tree = weights.load(model, RUNTIME)
    names = ("layers.2.attn.wq_b", "layers.2.ffn.experts.w1")
    specs = [s for s in model.specs() if s.name in names]
    assert len(specs) == 2
    for name, leaf in leaves_by_spec(model.config, tree, specs).items():
        got = np.asarray(jax.jit(packing.unpack)(leaf))
        want = model.read_float32(model.tensors[name].spec)
        np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of accelerators: pieces are packed by jitted updates of donated buffers."""
    original = weights.Builder.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "on_host": False})

    monkeypatch.setattr(weights.Builder, "__init__", init)


@pytest.mark.parametrize("name", ORACLE)
@pytest.mark.parametrize("mode", ["packed", "decoded"])
def test_loaded_weights_are_those_of_the_file(data_dir: Path, name: str, mode: Any) -> None:
    model = model_file.open_model(data_dir / "oracle" / name)
    cfg, tree = weights.load(model, RUNTIME, cpu_weights=mode)
    assert cfg == model.config
    packed = assert_equals_file(model, tree, jnp.float32)
    assert (packed > 80) == (mode == "packed" and name.endswith(".gguf"))
    main, compress = params.rope_tables(cfg, RUNTIME.max_ctx)
    np.testing.assert_array_equal(tree.rope_main, main)
    np.testing.assert_array_equal(tree.rope_compress, compress)


def test_bfloat16_keeps_the_float32_islands(data_dir: Path) -> None:
    runtime = dataclasses.replace(RUNTIME, dtype="bfloat16")
    model = model_file.open_model(data_dir / "oracle/w16/model.Q3_0_ROCMFPX.gguf")
    _, tree = weights.load(model, runtime, cpu_weights="decoded")
    assert_equals_file(model, tree, jnp.bfloat16)
    assert tree.top["embed"].dtype == jnp.bfloat16 and tree.top["norm"].dtype == jnp.float32


@pytest.mark.usefixtures("on_device")
def test_the_way_of_accelerators_gives_the_same_bits(tmp_path: Path) -> None:
    """Stacked layers, experts and matrices of several types, plain weights."""
    cfg = mf.small(compress_ratios=(0, 0, 4, 4), num_hash_layers=0)
    types = {"experts_gate_up": 101, "experts_down": 103, "attention": 8, "shared": 100}
    table = mf.with_values(mf.tensor_table(tensors.specs(cfg), types))
    rng = np.random.default_rng(0)
    for t in table:
        if t.type_id >= 8:
            blocks = rng.integers(0, 0x60, (t.nbytes // t.block_bytes, t.block_bytes), np.uint8)
            t.data = blocks.tobytes()
    path = mf.write_gguf(tmp_path / "m.gguf", mf.gguf_pairs(cfg), table)
    model = model_file.open_model(path)
    _, tree = weights.load(model, RUNTIME, scan=True)
    assert any(group.count > 1 for group in tree.layout)
    assert assert_equals_file(model, tree, jnp.float32) == 4 * 11


@pytest.mark.parametrize("device", [False, True])
def test_pieces_of_any_size_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: bool, request: Any
) -> None:
    """Experts one by one, matrices by 128 rows, tile scales among them."""
    if device:
        request.getfixturevalue("on_device")
    cfg = mf.small(
        hidden_size=128, vocab_size=300, q_lora_rank=128, moe_intermediate_size=128,
        o_lora_rank=128, num_layers=1, compress_ratios=(0,), swiglu_limits=(10.0,),
        shared_swiglu_limits=(10.0,),
    )  # fmt: skip
    entries = mf.hf_entries(tensors.specs(cfg))
    root = mf.write_checkpoint(tmp_path / "m", mf.hf_config(cfg), entries)
    head, size = mf.safetensors_head(entries)
    # Bytes that are ordinary numbers in every one of the formats, and valid expert ids.
    raw = np.random.default_rng(3).integers(120, 124, size - len(head), np.uint8)
    (root / "model.safetensors").write_bytes(head + raw.tobytes())
    table = model_file.checkpoint.open_checkpoint(root).tensors["layers.0.ffn.gate.tid2eid"]
    with open(root / "model.safetensors", "r+b") as out:
        out.seek(table.start)
        out.write(bytes(table.nbytes))
    model = model_file.open_model(root)
    _, whole = weights.load(model, RUNTIME)
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)
    _, pieces = weights.load(model, RUNTIME)
    assert assert_equals_file(model, pieces, jnp.float32) == 10  # wo_a has rows of 64
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(pieces), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("device", [True, False])
def test_loading_needs_little_memory_beside_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: bool, request: Any
) -> None:
    """Beside the buffers of a device the host holds some pieces, on a CPU the buffers too."""
    if device:
        request.getfixturevalue("on_device")
    cfg = mf.small(
        hidden_size=256, moe_intermediate_size=256, num_experts=64, num_layers=1,
        compress_ratios=(0,), swiglu_limits=(10.0,), shared_swiglu_limits=(10.0,),
        num_hash_layers=0,
    )  # fmt: skip
    table = mf.tensor_table(tensors.specs(cfg), {"experts_gate_up": 100, "experts_down": 100})
    path = mf.write_gguf(tmp_path / "m.gguf", mf.gguf_pairs(cfg), table)
    model = model_file.open_model(path)
    total = sum(t.nbytes for t in model.tensors.values())
    assert total > 7e6
    monkeypatch.setattr(weights, "PIECE_BYTES", 1 << 18)
    weights.load(model, RUNTIME)  # imports and compiles
    tracemalloc.start()
    try:
        weights.load(model, RUNTIME)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.4e6 + (0 if device else total), (peak, total)  # whole tensors: 1.8 and 20 MB


def test_progress_counts_bytes_and_names_tensors(data_dir: Path) -> None:
    model = model_file.open_model(data_dir / "oracle/w16/model.Q8_0.gguf")
    seen: list[tuple[int, str]] = []
    weights.load(model, RUNTIME, progress=lambda done, name: seen.append((done, name)))
    total = sum(t.nbytes for t in model.tensors.values())
    assert [name for _, name in seen] == [*(s.name for s in model.specs()), ""]
    assert seen[0][0] == 0 and seen[-1][0] == total
    assert sorted(seen, key=lambda x: x[0]) == seen


def test_invalid_values_stop_the_load_with_all_of_them(data_dir: Path, tmp_path: Path) -> None:
    source = data_dir / "oracle/w16/model.MXFP4_MOE.gguf"
    opened = model_file.gguf.open_gguf(source)
    raw = bytearray(source.read_bytes())
    for name in ("blk.1.ffn_up_exps.weight", "blk.5.ffn_down_exps.weight"):
        raw[opened.tensors[name].start] = 255
    raw[opened.tensors["blk.0.ffn_gate_tid2eid.weight"].start] = 8
    (tmp_path / "bad.gguf").write_bytes(raw)
    with pytest.raises(ModelFileError) as caught:
        weights.load(tmp_path / "bad.gguf", RUNTIME)
    assert [p.where for p in caught.value.problems] == [
        "tensor blk.0.ffn_gate_tid2eid.weight", "tensor blk.1.ffn_up_exps.weight",
        "tensor blk.5.ffn_down_exps.weight",
    ]  # fmt: skip
    weights.load(tmp_path / "bad.gguf", RUNTIME, check_values=False)
    broken = model_file.open_model(mf.write_gguf(tmp_path / "x.gguf", [], []), keep_problems=True)
    with pytest.raises(ModelFileError, match="architecture"):
        weights.load(broken, RUNTIME)


def test_drafter_weights(tmp_path: Path) -> None:
    cfg = mf.small()
    want = DraftConfig(
        num_stages=2, block_size=5, markov_rank=16, noise_token_id=63, target_layer_ids=(1, 2)
    )
    extra: list[mf.Pair] = [
        ("deepseek4.dspark.block_size", mf.U32, 5),
        ("deepseek4.dspark.noise_token_id", mf.U32, 63),
        ("deepseek4.dspark.target_layers", mf.ARRAY, (mf.I32, [1, 2])),
    ]
    specs = tensors.draft_specs(cfg, want)
    specs = [s for s in specs if s.key != "confidence_head.proj.bias"]
    table = mf.with_values(mf.tensor_table([*tensors.specs(cfg), *specs], {"attention": 8}))
    path = mf.write_gguf(tmp_path / "m.gguf", mf.gguf_pairs(cfg, extra=extra), table)
    model = model_file.open_model(path)
    assert model.draft is not None
    stages = weights.load_draft(model.draft, cfg, RUNTIME)
    assert len(stages) == 2 and len(stages[0]) == 26 and len(stages[1]) == 31
    for spec in specs:
        leaf = stages[spec.layer or 0][spec.key]
        if isinstance(leaf, QuantArray):
            assert leaf.shape == spec.shape and spec.kind == "attention"
        else:
            np.testing.assert_array_equal(leaf, model.draft.read(spec).decode())
    held = model_file.gguf.open_gguf(path).tensors["dspark.1.hc_ffn_fn.weight"]
    raw = bytearray(path.read_bytes())
    raw[held.start : held.start + 4] = b"\0\0\x80\x7f"  # infinity
    path.write_bytes(raw)
    model = model_file.open_model(path)
    weights.load(model, RUNTIME)  # the model itself is sound
    assert model.draft is not None
    with pytest.raises(ModelFileError, match=r"dspark\.1\.hc_ffn_fn\.weight"):
        weights.load_draft(model.draft, cfg, RUNTIME)


# --- random weights ---------------------------------------------------------------------------


def test_random_plain_weights() -> None:
    cfg = mf.small(num_layers=2, compress_ratios=(4, 0), swiglu_limits=(1.0,) * 2,
                   shared_swiglu_limits=(1.0,) * 2)  # fmt: skip
    tree = synthetic.init_random(cfg, jax.random.key(1), RUNTIME)
    specs = [s for s in tensors.specs(cfg)]
    leaves = leaves_by_spec(cfg, tree, specs)
    for spec in specs:
        leaf = np.asarray(leaves[spec.name])
        assert leaf.shape == spec.shape and np.isfinite(leaf).all()
        if spec.kind == "table":
            assert leaf.min() >= 0 and leaf.max() < cfg.num_experts
            assert all(len(set(row)) == len(row) for row in leaf.tolist())
    again = synthetic.init_random(cfg, jax.random.key(1), RUNTIME)
    other = synthetic.init_random(cfg, jax.random.key(2), RUNTIME)
    np.testing.assert_array_equal(tree.top["embed"], again.top["embed"])
    assert (np.asarray(tree.top["embed"]) != np.asarray(other.top["embed"])).any()
    std = np.asarray(leaves["layers.1.ffn.experts.w1"]).std()
    assert 0.9 < std * 8 < 1.1  # fan-in 64


@pytest.mark.parametrize(
    ("format", "size"),
    [*((f, 1 << 20) for f in sorted(device_formats.FORMATS)), ("rocmfp4", 0), ("q4_k", 0)],
)
def test_random_packed_weights_have_the_size_they_should(
    format: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes, decoded by their own decoder, are valid and have the deviation of the fan-in."""
    pieces: list[Any] = []

    class Collector:
        def put_bytes(self, spec: Any, data: Any, side: Any, first: int) -> None:
            pieces.append((first, np.asarray(data), side))

    monkeypatch.setattr(synthetic, "PIECE_BYTES", 256 * 260)
    monkeypatch.setattr(synthetic, "HOST_SIZE", size)  # 0: drawn on the device
    cfg = mf.small(hidden_size=256, moe_intermediate_size=256)
    spec = next(s for s in tensors.specs(cfg) if s.key == "ffn.experts.w1")
    synthetic._put_packed(Collector(), spec, format, jax.random.key(4))  # type: ignore[arg-type]
    assert len(pieces) > 1 and sum(len(data) for _, data, _ in pieces) == cfg.num_experts
    for _, data, side in pieces:
        assert not quant.check(format, data, **side)
        values = quant.decode(format, data, **side)
        assert values.shape[1:] == (256, 256)
        assert 0.6 < values.std() * 16 < 1.6
    assert (pieces[0][1] != pieces[1][1]).any()


def test_random_packed_weights_take_their_place() -> None:
    cfg = mf.small(num_layers=1, compress_ratios=(0,), swiglu_limits=(1.0,),
                   shared_swiglu_limits=(1.0,))  # fmt: skip
    types: Any = {"experts_gate_up": "nvfp4", "head": "nvfp4", "shared": "mxfp4"}
    tree = synthetic.init_random(cfg, jax.random.key(0), RUNTIME, types=types)
    ((_, layer),) = tree.layers()
    held = {k: v.format for k, v in layer.items() if isinstance(v, QuantArray)}
    assert held == {"ffn.experts.w1": "nvfp4", "ffn.experts.w3": "nvfp4",
                    "ffn.shared_experts.w1": "mxfp4", "ffn.shared_experts.w3": "mxfp4",
                    "ffn.shared_experts.w2": "mxfp4"}  # fmt: skip
    assert tree.top["head"].shape == (64, 64) and tree.top["head"].factor == 1


def test_random_types_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown weight format"):
        synthetic.init_random(mf.small(), jax.random.key(0), RUNTIME, types={"head": "other"})
    with pytest.raises(ValueError, match="no multiple of the block of 256"):
        synthetic.init_random(mf.small(), jax.random.key(0), RUNTIME, types={"head": "q4_k"})
