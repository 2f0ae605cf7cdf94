"""`ds4jax logits`: the logits after every given id, into a NumPy file."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds4jax.commands import common, running


def add(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "logits",
        help="logits after every given token id",
        description="Feed token ids and write the logits after each of them: float32 [ids,"
        " vocabulary] as `logits` of an .npz file, with the ids as `ids`. However the ids are cut"
        " into pieces, the file is the same.",
    )
    common.add_model(parser)
    parser.add_argument("--ids", metavar="FILE", required=True,
                        help="JSON list of token ids; - is stdin")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", required=True, type=Path,
                        help="the .npz file to write")  # fmt: skip
    pieces = parser.add_mutually_exclusive_group()
    pieces.add_argument("--stepwise", type=common.integer(0, 1 << 22, "tokens"), metavar="N",
                        help="prefill N ids (0: none), then one at a time")  # fmt: skip
    pieces.add_argument("--chunks", type=_sizes, metavar="A,B,C", default=(),
                        help="prefill in these pieces, what is left over as one more")  # fmt: skip
    common.add_context(parser, "as many as there are ids")
    common.add_runtime(parser)
    common.add_output(parser)
    parser.set_defaults(run=run)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(common.integer(1, 1 << 22, "tokens")(part) for part in text.split(","))


def run(args: argparse.Namespace) -> int:
    """Compute and write."""
    where = f"--ids {args.ids}"
    value = common.read_json(args.ids, "--ids")
    ids = common.token_ids(value.get("ids") if isinstance(value, dict) else value, where)
    if not ids:
        raise common.Failure(f"{where}: holds no ids")
    _check_pieces(args, len(ids))
    model = running.open_model(args)
    vocab = model.file.model_config.vocab_size
    running.check_ids(ids, vocab, where)
    ctx = running.context_of(args, model, needed=len(ids))
    if not args.output.parent.is_dir():
        raise common.Failure(f"--output {args.output}: no directory {args.output.parent}")
    with running.progress(args) as shown:
        loaded = running.load(args, model, ctx, shown)
        shown.compile(0, 1)
        from ds4jax.evaluate import Evaluator, split

        started = time.perf_counter()
        pieces = split(len(ids), stepwise=args.stepwise, chunks=args.chunks)
        evaluator = Evaluator(loaded.cfg, loaded.params, loaded.run)
        blocks = evaluator.logits(
            ids, pieces, on_done=lambda done: shown.tokens("logits", done, len(ids))
        )
        size = write_npz(args.output, blocks, ids, vocab)
    seconds = time.perf_counter() - started
    report = {
        "output": str(args.output), "bytes": size, "tokens": len(ids), "vocab_size": vocab,
        "pieces": len(pieces), "seconds": seconds, "load_seconds": loaded.seconds,
        "settings": running.settings_json(loaded, model, ctx),
    }  # fmt: skip
    if args.json:
        common.print_json(report)
    else:
        common.note(
            args,
            f"{args.output}: logits [{len(ids)}, {vocab}], {common.size_text(size)}, in"
            f" {seconds:.1f} s with compiling",
        )
    return 0


def _check_pieces(args: argparse.Namespace, count: int) -> None:
    if args.stepwise is not None and args.stepwise > count:
        raise common.UsageError(f"--stepwise {args.stepwise}: there are only {count} ids")
    if sum(args.chunks) > count:
        raise common.UsageError(
            f"--chunks add up to {sum(args.chunks)}, there are only {count} ids: make them smaller"
        )


def write_npz(path: Path, blocks: Iterator[Any], ids: list[int], vocab: int) -> int:
    """Write `logits` and `ids` as they come, completely or not at all.

    Args:
        blocks: float32 [n, vocab] for the next n ids at a time.

    Returns: bytes of the file.

    Raises:
        Failure: a logit that is not finite, or no room on the disk.
    """
    import numpy as np
    from numpy.lib import format as npy

    need = 4 * len(ids) * (vocab + 1) + 4096
    free = shutil.disk_usage(path.parent).free
    if need > free:
        raise common.Failure(
            f"--output {path}: needs {common.size_text(need)}, {common.size_text(free)} are free"
        )
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.part"
    try:
        with zipfile.ZipFile(temporary, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
            with archive.open("logits.npy", "w", force_zip64=True) as member:
                shape = (len(ids), vocab)
                head = {"descr": "<f4", "fortran_order": False, "shape": shape}
                npy.write_array_header_1_0(member, head)
                done = 0
                for block in blocks:
                    bad = np.flatnonzero(~np.isfinite(block).all(axis=1))
                    if bad.size:
                        raise common.Failure(
                            f"the logits after id {done + int(bad[0])} are not finite: the weights"
                            " are damaged, or the model overflows in this --dtype"
                        )
                    member.write(np.ascontiguousarray(block, "<f4").data)
                    done += len(block)
            with archive.open("ids.npy", "w") as member:
                npy.write_array(member, np.array(ids, np.int32))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    return path.stat().st_size
