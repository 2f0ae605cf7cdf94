"""`ds4jax convert`: a model into a GGUF file of other types, or into a checkpoint directory."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4jax.commands import common, running
from ds4jax.commands.progress import Progress

if TYPE_CHECKING:
    from ds4jax.convert import Converted
    from ds4jax.convert_types import Types
    from ds4jax.model_file import Draft, ModelFile


def add(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "convert",
        help="a model into a GGUF file of other types, or into a checkpoint",
        description="Write a model as one GGUF file (OUT ends in .gguf), or without loss as a"
        " checkpoint directory (any other OUT). Drafter and tokenizer travel with it.",
    )
    parser.add_argument("model", metavar="MODEL", help="GGUF file, checkpoint directory, or nano")
    parser.add_argument("out", metavar="OUT", type=Path, help="file or directory to write")
    parser.add_argument(
        "-t", "--type", action="append", metavar="TYPE",
        help="preset (default, lossless, mxfp4, rocmfp4, ...), class=type (experts=rocmfp3) or"
        " pattern=type by GGUF tensor name; may be repeated, later ones win",
    )  # fmt: skip
    parser.add_argument("--imatrix", metavar="FILE", help=".npz with importance vectors by tensor")
    parser.add_argument("--draft", metavar="MODEL", help="file with a drafter to take along")
    parser.add_argument("--name", default="", metavar="TEXT", help="name of the result")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument("--workers", type=common.integer(1, 1024), metavar="N",
                        help="threads; one per core")  # fmt: skip
    common.add_rocmfp2(parser)
    parser.add_argument("--no-progress", action="store_true", help="no progress on stderr")
    common.add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert."""
    from ds4jax import model_file

    to_gguf = args.out.suffix == ".gguf"
    if not to_gguf:
        for flag, given in (("--type", args.type), ("--imatrix", args.imatrix),
                            ("--name", args.name), ("--overwrite", args.overwrite)):  # fmt: skip
            if given:
                raise common.UsageError(f"{flag} goes with an OUT that ends in .gguf")
    types = _types(args)
    if not args.out.parent.is_dir():
        raise common.Failure(f"OUT {args.out}: no directory {args.out.parent}: make it first")
    common.check_exists(args.model)
    model = model_file.open_model(args.model, rocmfp2=args.rocmfp2)
    draft = None if args.draft is None else model_file.open_draft(args.draft, model)
    started = time.perf_counter()
    with running.progress(args) as shown:
        try:
            done = _gguf(args, model, types, draft, shown) if to_gguf else _checkpoint(
                args, model, draft, shown
            )  # fmt: skip
        except FileExistsError as error:
            raise common.Failure(f"{error}" + (" with --overwrite" if to_gguf else "")) from None
        except ValueError as error:
            raise common.Failure(str(error)) from None
    seconds = time.perf_counter() - started
    for text in done.notes:
        common.note(args, f"note: {text}")
    if args.json:
        common.print_json(_as_json(done, seconds))
    else:
        _print(args, done, seconds)
    return 0


def _types(args: argparse.Namespace) -> Types:
    from ds4jax import convert_types

    try:
        return convert_types.parse_types(args.type or ())
    except ValueError as error:
        raise common.UsageError(f"-t/--type: {error}") from None


def _gguf(
    args: argparse.Namespace, model: ModelFile, types: Types, draft: Draft | None, shown: Progress
) -> Converted:
    from ds4jax import convert

    imatrix = convert.read_imatrix(args.imatrix) if args.imatrix is not None else None
    return convert.convert(
        model, args.out, types, imatrix=imatrix, draft=draft, name=args.name,
        overwrite=args.overwrite, workers=args.workers, progress=shown.write,
    )  # fmt: skip


def _checkpoint(
    args: argparse.Namespace, model: ModelFile, draft: Draft | None, shown: Progress
) -> Converted:
    from ds4jax import convert_hf

    return convert_hf.convert(
        model, args.out, draft=draft, workers=args.workers, progress=shown.write
    )


def _as_json(done: Converted, seconds: float) -> dict[str, Any]:
    import dataclasses

    return {
        "path": str(done.path),
        "bytes": done.nbytes,
        "seconds": seconds,
        "tensors": [dataclasses.asdict(t) for t in done.tensors],
        "notes": list(done.notes),
    }


def _print(args: argparse.Namespace, done: Converted, seconds: float) -> None:
    by_change: dict[tuple[str, str], list[Any]] = {}
    for tensor in done.tensors:
        by_change.setdefault((tensor.source, tensor.target), []).append(tensor)
    for (source, target), group in by_change.items():
        errors = [t.error for t in group if t.error is not None]
        worst = f", relative error up to {max(errors):.3g}" if errors else ""
        size = common.size_text(sum(t.nbytes for t in group))
        common.note(args, f"{source} to {target}: {len(group)} tensors, {size}{worst}")
    common.note(args, f"{common.size_text(done.nbytes)} in {seconds:.1f} s")
    print(done.path)
