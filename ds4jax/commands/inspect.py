"""`ds4jax inspect`: what a model file holds, what it needs, and what is wrong with it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4jax.commands import common

if TYPE_CHECKING:
    from ds4jax.model_file import ModelFile


def add(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "inspect",
        help="what a model file holds and what is wrong with it",
        description="Configuration, sizes by type, tokenizer, drafter, prompt format, memory plan"
        " and every problem of a model, from its headers alone. Exit status 1 if it would be"
        " refused.",
    )
    common.add_model(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--tokenizer", action="store_true", help="load and check the tokenizer too")
    common.add_capacity(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16",
                        help="compute type, for the memory plan")  # fmt: skip
    common.add_rocmfp2(parser)
    common.add_chat_profile(parser, ("v4-0731", "v4-preview"))
    common.add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    from ds4jax.errors import ModelFileError
    from ds4jax.model_file import open_model

    name = common.model_of(args)
    try:
        model = open_model(name, rocmfp2=args.rocmfp2, keep_problems=True)
    except ModelFileError as error:
        if args.json:
            common.print_json({"path": name, "problems": [p.as_dict() for p in error.problems]})
        raise
    report = model.describe(args.tensors)
    report["chat_profile"] = _profile(args, model)
    report["memory"] = _memory(args, model)
    if args.tokenizer:
        report["tokenizer"] = _tokenizer(model)
    if args.json:
        common.print_json(report)
    else:
        _print(report)
    if report["problems"]:
        count = len(report["problems"])
        raise common.Failure(
            f"{name}: {count} problem{'s' if count > 1 else ''}, the model would be refused: "
            + _line(report["problems"][0])
            + (f" (and {count - 1} more, see the report)" if count > 1 else "")
        )
    return 0


def _profile(args: argparse.Namespace, model: ModelFile) -> dict[str, Any]:
    from ds4jax import chat

    directory = model.path if model.kind == "checkpoint" else None
    metadata = model.metadata if model.kind == "gguf" else None
    choice = chat.detect_profile(args.chat_profile, checkpoint=directory, metadata=metadata)
    return choice._asdict()


def _memory(args: argparse.Namespace, model: ModelFile) -> dict[str, Any] | None:
    from ds4jax import memory
    from ds4jax.config import RuntimeConfig

    if model.config is None:
        return None
    run = RuntimeConfig(dtype=args.dtype, max_ctx=args.ctx, num_slots=args.lanes)
    stored = sum(tensor.nbytes for tensor in model.tensors.values())
    return memory.plan(model.config, run, stored)


def _tokenizer(model: ModelFile) -> dict[str, Any] | None:
    """What loading the tokenizer gives, or why it fails."""
    from ds4jax.tokenizer import Tokenizer, TokenizerError

    source = model.tokenizer_source
    if source is None:
        return None
    size = None if model.config is None else model.config.vocab_size
    try:
        if isinstance(source, Path):
            tokenizer = Tokenizer.from_path(source, vocab_size=size)
        else:
            tokenizer = Tokenizer.from_gguf(source, source=str(model.path), vocab_size=size)
    except TokenizerError as error:
        return {"problem": str(error)}
    markers = {s: i for s, i in tokenizer.specials.items() if i in vars(tokenizer.markers).values()}
    return {
        "source": tokenizer.source,
        "vocab_size": tokenizer.vocab_size,
        "added_tokens": len(tokenizer.specials),
        "markers": markers,
        "digest": tokenizer.digest,
        "problem": None,
    }


def _line(problem: dict[str, str]) -> str:
    place = f"{problem['file']}: {problem['where']}" if problem["where"] else problem["file"]
    text = f"{place}: found {problem['found']}, expected {problem['expected']}"
    return f"{text}; {problem['fix']}" if problem["fix"] else text


def _print(report: dict[str, Any]) -> None:
    """The report for people: what matters first, problems last."""
    size = common.size_text
    totals, config, memory = report["totals"], report["config"], report["memory"]

    def row(label: str, text: Any) -> None:
        print(f"{label:<14}{text}")

    row("path", report["path"])
    row("files", f"{len(report['files'])} ({report['kind']})")
    row("architecture", report["architecture"])
    if report["name"]:
        row("name", report["name"])
    if config is not None:
        row(
            "config",
            f"{config['num_layers']} layers, hidden {config['hidden_size']},"
            f" {config['num_experts']} experts ({config['num_experts_per_tok']} used),"
            f" vocabulary {config['vocab_size']}, context {config['max_position_embeddings']}",
        )
    row("weights", f"{size(totals['bytes'])} in {totals['tensors']} tensors,"
        f" {common.count_text(totals['parameters'])} parameters")  # fmt: skip
    for name, part in sorted(totals["by_type"].items(), key=lambda kv: -kv[1]["bytes"]):
        row("", f"{name:<22} {part['tensors']:>6} tensors  {size(part['bytes']):>9}")
    if report["rocmfp2"] is not None:
        choice = report["rocmfp2"]
        row("type 107", f"read as {choice['reading'] or 'nothing'}: {choice['reason']}")
    row("tokenizer", _tokenizer_line(report["tokenizer"]))
    drafter = report["drafter"]
    row("drafter", "none" if drafter is None else
        f"{drafter['tensors']} tensors, {size(drafter['bytes'])}")  # fmt: skip
    profile = report["chat_profile"]
    row("chat profile", f"{profile['profile']} ({profile['source']})")
    if memory is not None:
        row(
            "memory",
            f"{size(memory['total_bytes'])} = {size(memory['weights_bytes'])} weights +"
            f" {size(memory['cache_bytes'])} cache for {memory['lanes']} x {memory['ctx']} tokens"
            f" in {memory['dtype']}; programs need work space besides",
        )
    for tensor in report.get("tensors", ()):
        shape = " x ".join(map(str, tensor["shape"]))
        print(f"  {tensor['name']:<44} {tensor['type']:<18} {shape:<22} {size(tensor['bytes'])}")
    for text in (*report["notes"], profile["warning"]):
        if text:
            row("note", text)
    for problem in report["problems"]:
        row("problem", _line(problem))


def _tokenizer_line(tokenizer: dict[str, Any] | None) -> str:
    if tokenizer is None:
        return "none: commands that take ids work, for text one is needed"
    if tokenizer.get("problem"):
        return f"cannot be used: {tokenizer['problem']}"
    if "vocab_size" in tokenizer:
        return (
            f"{tokenizer['vocab_size']} tokens, {tokenizer['added_tokens']} of them added"
            f" ({tokenizer['source']})"
        )
    count = tokenizer.get("tokens")
    return f"{count} tokens ({tokenizer['source']})" if count else str(tokenizer["source"])
