"""`ds4jax score`: how well the model predicts a text: log-probability, perplexity."""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

from ds4jax.commands import common, running


def add(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "score",
        help="log-probability and perplexity of a text",
        description="How well the model predicts a text after a begin-of-sentence marker: nats per"
        " token and perplexity. Token ids are taken as they are; the first one is given.",
    )
    common.add_model(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-f", "--file", metavar="FILE", help="file with the text; - is stdin")
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the text")
    source.add_argument("--ids", metavar="FILE", help="JSON list of token ids")
    parser.add_argument("--logprobs", action="store_true", help="of every token too")
    common.add_context(parser, "as many as the text has tokens")
    common.add_runtime(parser)
    common.add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compute and print."""
    model = running.open_model(args)
    ids, size = _ids(args, model)
    if len(ids) < 2:
        raise common.Failure("there is nothing to score: give at least one token after the first")
    ctx = running.context_of(args, model, needed=len(ids))
    with running.progress(args) as shown:
        loaded = running.load(args, model, ctx, shown)
        shown.compile(0, 1)
        from ds4jax.evaluate import Evaluator

        started = time.perf_counter()
        losses = Evaluator(loaded.cfg, loaded.params, loaded.run).losses(
            ids, on_done=lambda done: shown.tokens("score", done, len(ids))
        )
    seconds = time.perf_counter() - started
    values = [float(x) for x in losses]
    bad = next((i for i, x in enumerate(values) if not math.isfinite(x)), None)
    if bad is not None:
        raise common.Failure(
            f"the log-probability of token {bad + 1} is not finite: the weights are damaged, or the"
            " model overflows in this --dtype"
        )
    report = _report(values, size)
    report |= {"seconds": seconds, "settings": running.settings_json(loaded, model, ctx)}
    if args.logprobs:
        report["ids"] = ids
        report["logprobs"] = [-x for x in values]
    _print(args, model, report)
    return 0


def _ids(args: argparse.Namespace, model: running.Opened) -> tuple[list[int], int | None]:
    """Ids to score and the bytes of their text (None if they came as ids)."""
    from ds4jax.tokenizer import TokenizerError

    if args.ids is not None:
        where = f"--ids {args.ids}"
        value = common.read_json(args.ids, "--ids")
        ids = common.token_ids(value.get("ids") if isinstance(value, dict) else value, where)
        running.check_ids(ids, model.file.model_config.vocab_size, where)
        return ids, None
    tokenizer = model.need_tokenizer()
    if args.prompt is not None:
        text = args.prompt
    elif args.file is not None:
        text = common.read_text(args.file, "--file")
    elif not common.stdin_is_terminal():
        text = common.read_text("-", "stdin")
    else:
        raise common.UsageError("no text: give --file FILE, --prompt TEXT or --ids FILE")
    try:
        return tokenizer.encode_completion(text), len(text.encode())
    except TokenizerError as error:
        raise common.Failure(f"the text: {error}") from None


def _report(losses: list[float], size: int | None) -> dict[str, Any]:
    total = math.fsum(losses)
    mean = total / len(losses)
    return {
        "tokens": len(losses),
        "nats": total,
        "nats_per_token": mean,
        "perplexity": math.exp(mean) if mean < 700 else None,
        "bytes": size,
        "bits_per_byte": total / math.log(2) / size if size else None,
    }


def _print(args: argparse.Namespace, model: running.Opened, report: dict[str, Any]) -> None:
    if args.json:
        common.print_json(report)
        return
    if args.logprobs:
        for token, logprob in zip(report["ids"][1:], report["logprobs"], strict=True):
            piece = f"  {model.tokenizer.decode([token])!r}" if model.tokenizer else ""
            print(f"{token:>7}  {logprob:9.4f}{piece}")
    per_byte = report["bits_per_byte"]
    print(
        f"{report['tokens']} tokens, {report['nats_per_token']:.4f} nats per token, perplexity"
        f" {report['perplexity'] or math.inf:.4g}"
        + (f", {per_byte:.4f} bits per byte" if per_byte is not None else "")
    )
    common.note(args, f"{report['tokens'] / report['seconds']:.1f} tokens/s with compiling")
