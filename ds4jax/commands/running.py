"""What the commands that compute share: from flags to an opened, then a loaded model.

Files, prompts and limits are checked before JAX is imported, so that a wrong name or a text that is
too long is told at once. JAX comes in with `load` and `start`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4jax.commands import common
from ds4jax.commands.progress import Progress

if TYPE_CHECKING:
    from ds4jax.config import RuntimeConfig, SamplingParams, StoppingCriteria
    from ds4jax.local import Loaded, LocalModel, MemoryPlan
    from ds4jax.model_file import ModelFile
    from ds4jax.tokenizer import Tokenizer

DEFAULT_CTX = 4096


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model whose headers are read and checked; `tokenizer` is None if it has none."""

    name: str  # as the user gave it
    file: ModelFile
    tokenizer: Tokenizer | None

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer of a command that takes text.

        Raises:
            Failure: the model has none.
        """
        if self.tokenizer is None:
            raise common.Failure(
                f"{self.file.path}: the model has no tokenizer, and text needs one: give token ids"
                " (--ids FILE), or a file or directory that has one"
            )
        return self.tokenizer


def open_model(args: argparse.Namespace) -> Opened:
    """Open the model that the flags name, with its notes on stderr.

    Raises:
        Failure: there is no such file.
        ModelFileError, TokenizerError: what is wrong with its files.
    """
    from ds4jax import model_file
    from ds4jax.tokenizer import Tokenizer

    name = common.existing_model_of(args)
    file = model_file.open_model(name, rocmfp2=args.rocmfp2)
    if args.verbose:
        for text in file.notes:
            common.note(args, f"note: {text}")
    source, size = file.tokenizer_source, file.model_config.vocab_size
    tokenizer = None
    if isinstance(source, Path):
        tokenizer = Tokenizer.from_path(source, vocab_size=size)
    elif source is not None:
        tokenizer = Tokenizer.from_gguf(source, source=str(file.path), vocab_size=size)
    return Opened(name=name, file=file, tokenizer=tokenizer)


def chat_profile(args: argparse.Namespace, model: Opened) -> Any:
    """The prompt format, with a note if it is a guess."""
    from ds4jax import chat

    file = model.file
    choice = chat.detect_profile(
        args.chat_profile,
        checkpoint=file.path if file.kind == "checkpoint" else None,
        metadata=file.metadata if file.kind == "gguf" else None,
    )
    if choice.warning:
        common.note(args, f"note: {choice.warning}")
    return choice.profile


# -- limits ----------------------------------------------------------------------------------------


def context_of(args: argparse.Namespace, model: Opened, needed: int | None = None) -> int:
    """Tokens that the state is made for.

    Args:
        needed: for commands that know; rounded up to a coarse grid so that texts of similar length
            share compiled programs. None: `DEFAULT_CTX`, or less if the model allows no more.

    Raises:
        Failure: over what the model allows, or more needed than the flag allows.
    """
    most = model.file.model_config.max_position_embeddings
    if needed is not None and needed > most:
        raise common.Failure(f"{needed} tokens are over the model's {most} positions: use fewer")
    if args.ctx is not None:
        if args.ctx > most:
            raise common.Failure(f"--ctx {args.ctx}: the model has {most} positions: lower --ctx")
        if needed is not None and needed > args.ctx:
            raise common.Failure(
                f"{needed} tokens are over --ctx {args.ctx}: raise --ctx (the model allows {most})"
            )
        return int(args.ctx)
    if needed is None:
        return min(DEFAULT_CTX, most)
    grid = 512
    while grid < needed:
        grid *= 2
    return min(grid, most)


def check_length(prompt: int, ctx: int, most: int, stopping: StoppingCriteria) -> None:
    """Refuse a prompt that does not fit, before anything is loaded.

    Args:
        most: tokens that the model itself allows.

    Raises:
        Failure: naming the flags.
    """
    wanted, least = stopping.max_output_tokens, stopping.min_output_tokens
    if prompt + ((least or 1) if wanted is None else wanted) <= ctx:
        return
    text, lower = f"--tokens {wanted}", "--tokens" if wanted else ""
    if wanted is None:
        text, lower = ("1 token of output", "") if not least else (
            f"--min-tokens {least}", "--min-tokens"
        )  # fmt: skip
    fix = f"raise --ctx (the model allows {most})" if ctx < most else "the model allows no more"
    fix += f", lower {lower}" if lower else ""
    raise common.Failure(
        f"a prompt of {prompt} tokens and {text} are over the context of {ctx} tokens: {fix} or"
        " shorten the prompt"
    )


def check_ids(ids: Sequence[int], vocab_size: int, where: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        Failure: naming the first one.
    """
    for i, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise common.Failure(
                f"{where}: entry {i} is {token}, must be in 0..{vocab_size - 1}, the vocabulary"
            )


# -- flags -----------------------------------------------------------------------------------------


_FLAGS = {
    "temperature": "--temp", "top_p": "--top-p", "top_k": "--top-k", "min_p": "--min-p",
    "repetition_penalty": "--repetition-penalty", "frequency_penalty": "--frequency-penalty",
    "presence_penalty": "--presence-penalty", "penalty_window": "--penalty-window",
    "logit_bias": "--logit-bias", "seed": "--seed", "top_logprobs": "--logprobs",
    "max_output_tokens": "--tokens", "min_output_tokens": "--min-tokens",
    "max_reasoning_tokens": "--max-reasoning", "stop_strings": "--stop",
    "stop_token_ids": "--stop-id", "time_limit": "--time-limit", "candidate_count": "--candidates",
}  # fmt: skip
"""Flag by its field in the interface."""

_FIELD = re.compile(
    r"\b(?:sampling|stopping|output)\.(?P<path>[a-z_]+)|\b(?P<word>[a-z]+_[a-z_]+)|^(?P<first>[a-z]+)"
)


def in_flags(text: str) -> str:
    """A message about fields of a request in words of the flags that set them."""

    def flag(match: re.Match[str]) -> str:
        name = match["path"] or match["word"] or match["first"]
        return _FLAGS.get(name, match[0])

    return _FIELD.sub(flag, text)


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """Sampling flags; the service's defaults where none was given.

    Raises:
        UsageError: values that contradict each other, or too many.
    """
    from ds4jax.config import ConfigError, SamplingParams

    names = {
        "temperature": args.temp,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "frequency_penalty": args.frequency_penalty,
        "presence_penalty": args.presence_penalty,
    }
    given = {k: v for k, v in names.items() if v is not None}
    try:
        return SamplingParams(
            **given,
            penalty_window=args.penalty_window,
            logit_bias=tuple(sorted(dict(args.logit_bias or ()).items())),
            seed=args.seed,
            top_logprobs=getattr(args, "logprobs", None),
        )
    except ConfigError as error:
        raise common.UsageError("; ".join(map(in_flags, error.problems))) from None


def stopping_of(args: argparse.Namespace) -> StoppingCriteria:
    """Stopping flags.

    Raises:
        UsageError: values that contradict each other, or too many.
    """
    from ds4jax.config import ConfigError, StoppingCriteria

    try:
        return StoppingCriteria(
            max_output_tokens=args.tokens,
            min_output_tokens=args.min_tokens,
            stop_strings=tuple(dict.fromkeys(args.stop or ())),
            stop_token_ids=tuple(dict.fromkeys(args.stop_id or ())),
            ignore_eos=args.ignore_eos,
            max_reasoning_tokens=args.max_reasoning,
            time_limit=args.time_limit,
        )
    except ConfigError as error:
        raise common.UsageError("; ".join(map(in_flags, error.problems))) from None


def compile_cache(args: argparse.Namespace) -> Path | None:
    """Directory of compiled programs, made if need be; None: none.

    Raises:
        Failure: the one that was asked for cannot be written.
    """
    if args.no_compile_cache:
        return None
    given: Path | None = args.compile_cache
    try:
        place = given or _user_cache()
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(13, "cannot be written", str(place))
    except (OSError, RuntimeError) as error:
        if given is None:
            common.note(args, f"note: compiled programs are not kept: {error}")
            return None
        reason = getattr(error, "strerror", None) or error
        raise common.Failure(
            f"--compile-cache {given}: {reason}: give another directory or --no-compile-cache"
        ) from None
    return place


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "ds4jax"


# -- loading ---------------------------------------------------------------------------------------


def progress(args: argparse.Namespace) -> Progress:
    """The progress display that the flags ask for."""
    return Progress(shown=not (args.quiet or args.no_progress))


def load(
    args: argparse.Namespace, model: Opened, ctx: int, shown: Progress, lanes: int = 1
) -> Loaded:
    """Start the device and load the weights.

    Raises:
        As `local.load`.
    """
    from ds4jax import local

    options = local.Options(
        device=args.device,
        dtype=args.dtype,
        numerics=args.numerics,
        max_ctx=ctx,
        num_slots=lanes,
        cpu_weights=None if args.cpu_weights == "auto" else args.cpu_weights,
        compile_cache=compile_cache(args),
    )

    def on_plan(plan: MemoryPlan, run: RuntimeConfig, platform: str) -> None:
        size = common.size_text
        form = f", {plan.form} to {size(plan.weights)}" if plan.form == "decoded" else ""
        free = f" of {size(plan.free)} free" if plan.free is not None else ""
        common.note(
            args,
            f"{model.name}: {size(plan.stored)} of weights{form}, {size(plan.cache)} of cache for"
            f" {lanes} x {ctx} tokens: {size(plan.total)}{free}; {platform}, {run.dtype},"
            f" {run.numerics}, {run.backend}",
        )
        if run.backend != "reference":
            from ds4jax import fused

            for line in fused.backends(run).notes:
                common.note(args, line)

    return local.load(model.file, options, on_plan=on_plan, progress=shown.load)


def start(loaded: Loaded, model: Opened, shown: Progress) -> LocalModel:
    """Compile what a request needs.

    Raises:
        Failure: the state does not fit the device.
    """
    from ds4jax.local import LocalModel

    shown.compile(0, 1)
    try:
        return LocalModel.open(
            loaded,
            model.tokenizer,
            lambda name, done, count, seconds: shown.compile(done, count, name),
        )
    except MemoryError as error:  # its further lines are a table of the plan
        raise common.Failure(str(error).partition("\n")[0] or "out of memory") from None


def settings_json(loaded: Loaded, model: Opened, ctx: int) -> dict[str, Any]:
    """What a result depends on besides the request, JSON-ready."""
    run = loaded.run
    return {
        "model": model.name,
        "device": loaded.platform,
        "dtype": run.dtype,
        "numerics": run.numerics,
        "backend": run.backend,
        "weights": loaded.plan.form if run.backend == "reference" else "packed",
        "ctx": ctx,
    }


def write_out(text: str) -> None:
    """A piece of the result, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
