"""The shape of the code: who may import whom, and what does without JAX."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

ORDER = """
pallas_kernels: backend dot formats norm rope ring hyper rounding compressor indexer \
  row_selection attention cached_attention compressed_rows decode packing dense experts router \
  streams qkv vocabulary
ds4jax: config errors formats quant mix quantize quantize_mix
ds4jax: tokenizer gguf checkpoint gguf_write checkpoint_write tensors hparams hparams_draft \
  hparams_write stored memory model_report model_file convert_types convert convert_hf
ds4jax: chat_request chat_texts chat chat_json tool_markup parser
ds4jax: params cache linear sequence layers fused model functional weights synthetic
ds4jax: plan pages request refusals answer telemetry front health qualify scheduler
ds4jax: sampling step engine evaluate local
ds4jax: wire client remote system
ds4jax.commands: common progress running interrupts generate chat convert detokenize doctor \
  download inspect logits parse remote score serve tokenize top
ds4jax: cli
ds4jax_server: settings errors request_log probes incoming engine metrics convert output \
  generation service admin app __main__
"""
"""A module imports only from those before it. Imports inside functions are lazy on purpose."""

NEEDS_JAX = {
    "params", "cache", "linear", "sequence", "layers", "fused", "model", "functional", "weights",
    "synthetic", "sampling", "step", "engine", "evaluate", "local",
}  # fmt: skip
"""Modules of ds4jax that may import JAX; all others must not, not even through what they import."""


def order() -> list[str]:
    out = []
    for line in ORDER.replace("\\\n", " ").strip().splitlines():
        package, names = line.split(":")
        out += [f"{package}.{name}" for name in names.split()]
    return out


def sources() -> dict[str, Path]:
    """Module name -> file, packages themselves and generated code left out."""
    out = {}
    for base in (ROOT / "pallas_kernels", ROOT / "ds4jax", ROOT / "server" / "ds4jax_server"):
        for path in sorted(base.rglob("*.py")):
            parts = path.relative_to(base.parent).with_suffix("").parts
            if parts[-1] != "__init__" and "pb" not in parts:
                out[".".join(parts)] = path
    return out


def imports(path: Path) -> Iterator[str]:
    """Names imported at module level, those for type checkers only left out."""

    def walk(nodes: list[ast.stmt]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (a.name for a in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{a.name}" for a in node.names)
                yield node.module
            elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from walk(node.body + node.orelse)
            elif isinstance(node, ast.Try):
                yield from walk(node.body)

    yield from walk(ast.parse(path.read_text("utf-8")).body)


def test_every_module_has_its_place_and_imports_only_from_before_it() -> None:
    place = {name: i for i, name in enumerate(order())}
    files = sources()
    assert len(place) == len(order()), "a module is named twice"
    assert set(files) == set(place), "modules without a place, or places without a module"
    wrong = [
        f"{name} imports {other}"
        for name, path in files.items()
        for other in imports(path)
        if other in place and place[other] >= place[name]
    ]
    assert not wrong


def test_kernels_know_no_model_and_the_package_no_server() -> None:
    for name, path in sources().items():
        roots = {x.split(".")[0] for x in imports(path)}
        if name.startswith("pallas_kernels."):
            assert "ds4jax" not in roots and "flax" not in roots, name
        if name.startswith(("pallas_kernels.", "ds4jax.")):
            assert "ds4jax_server" not in roots, name


def test_what_must_do_without_jax_does() -> None:
    files = sources()
    heavy = {"jax", "flax", "pallas_kernels"}
    loads = {f"ds4jax.{m}" for m in NEEDS_JAX}
    for name, path in files.items():
        if not name.startswith("ds4jax.") or name in loads:
            continue
        found = {x for x in imports(path) if x.split(".")[0] in heavy or x in loads}
        assert not found, f"{name} imports {sorted(found)}"


def test_no_module_reads_the_environment_but_the_entry_points() -> None:
    allowed = {"ds4jax.commands.common", "ds4jax.cli", "ds4jax_server.__main__", "ds4jax.system"}
    for name, path in sources().items():
        if name not in allowed and not name.startswith("ds4jax.commands."):
            assert not re.search(r"os\.(environ|getenv)", path.read_text("utf-8")), name


def test_public_functions_say_what_they_do() -> None:
    missing = []
    for name, path in sources().items():
        tree = ast.parse(path.read_text("utf-8"))
        if not ast.get_docstring(tree):
            missing.append(name)
        for node in tree.body:
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
            if public and not node.name.startswith("_") and not ast.get_docstring(node):  # type: ignore[attr-defined]
                missing.append(f"{name}.{node.name}")  # type: ignore[attr-defined]
    assert not missing


def test_shapes_in_names_hold() -> None:
    """Public ops whose arguments carry shape suffixes give the shapes that their docstrings say."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import attention, compressor, hyper, rope

    prime = dict(zip("BTSHDRMNECWK", (2, 3, 5, 7, 22, 8, 13, 4, 17, 19, 23, 29), strict=True))

    def shape(suffix: str) -> tuple[int, ...]:
        return tuple(prime[c] if c.isalpha() else int(c) for c in suffix)

    def arguments(fn: object, dtypes: dict[str, object]) -> dict[str, jax.ShapeDtypeStruct]:
        out = {}
        for name in inspect.signature(fn).parameters:  # type: ignore[arg-type]
            suffix = name.rpartition("_")[2]
            if suffix.isupper() or suffix.isdigit():
                kind = dtypes.get(name, jnp.float32)
                out[name] = jax.ShapeDtypeStruct(shape(suffix), kind)
        return out

    args = arguments(attention.attend, {"window_valid_TW": bool})
    args = {k: v for k, v in args.items() if k in ("q_THD", "sink_H", "window_TWD",
                                                   "window_valid_TW")}  # fmt: skip
    assert jax.eval_shape(attention.attend, **args).shape == shape("THD")
    args = arguments(hyper.write, {})
    assert jax.eval_shape(hyper.write, **args).shape == shape("TND")
    got = jax.eval_shape(
        lambda **a: compressor.pool(**a, ratio=23), **arguments(compressor.pool, {"valid_TW": bool})
    )
    assert got.shape == (prime["T"], prime["C"])
    cs = jax.ShapeDtypeStruct((prime["T"], 2, 8), jnp.float32)
    x = jax.ShapeDtypeStruct(shape("THD"), jnp.bfloat16)
    assert jax.eval_shape(rope.rotate, x, cs).shape == shape("THD")
