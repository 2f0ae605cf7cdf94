"""A model in this process: device chosen, weights loaded, programs compiled, requests run.

One request at a time, in the caller's thread, through the same scheduler and executor as the
server. The commands `generate` and `chat` are thin shells around `LocalModel`; text in and out is
`ds4jax.answer`, and opening files (which needs no JAX) is done before this module is imported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform as host_platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax import cache as cache_lib
from ds4jax import params as params_lib
from ds4jax import weights
from ds4jax.answer import Answer, PromptIds, Result, lane_specs
from ds4jax.config import (
    CpuWeights,
    DType,
    ModelConfig,
    Numerics,
    RuntimeConfig,
    SamplingParams,
    StoppingCriteria,
)
from ds4jax.engine import DeviceExecutor
from ds4jax.model_file import ModelFile
from ds4jax.params import Params
from ds4jax.parser import Event
from ds4jax.plan import TokenResult
from ds4jax.request import Ended, Failed, Request, ServiceError, Started, Tokens
from ds4jax.scheduler import Scheduler, SchedulerConfig
from ds4jax.tokenizer import Tokenizer
from pallas_kernels import backend as backend_lib

Device = Literal["auto", "cpu", "cuda", "rocm"]

LoadProgress = Callable[[int, int, str], None]
"""(bytes done, bytes in all, tensor)."""

CompileProgress = Callable[[str, int, int, float], None]
"""(program, number, how many, seconds it took)."""

GPU_ROWS = (1, 8, 16, 32, 64)
"""Rows of decode programs on a GPU, as far as there are lanes; one lane alone has its own."""

GPU_CHUNKS = (128, 512, 2048)
"""Tokens of prefill programs on a GPU, as far as the context goes."""

CPU_ROWS = 128
"""Rows of the one program that a CPU runs: padded rows cost nothing there."""


class DeviceError(RuntimeError):
    """The device that was asked for is not there."""


class DoesNotFit(RuntimeError):
    """Weights and state need more memory than there is."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user can choose about a run in this process."""

    device: Device = "auto"
    dtype: DType | None = None  # None: float32 on a CPU, else bfloat16
    numerics: Numerics = "plain"
    max_ctx: int = 4096
    num_slots: int = 1
    cpu_weights: CpuWeights | None = None  # None: decoded if they take half of the free memory
    compile_cache: Path | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of a run, known before anything is loaded; work space of programs is not in it."""

    stored: int  # weights as the file has them
    weights: int  # as they are kept on the device
    cache: int
    form: CpuWeights
    free: int | None  # of the device; None: unknown

    @property
    def total(self) -> int:
        """Bytes kept for the whole run."""
        return self.weights + self.cache


# ---- device ------------------------------------------------------------------------------------


def start_device(device: Device = "auto", compile_cache: Path | None = None) -> str:
    """Make JAX use a device and, if given, a directory of compiled programs.

    Returns: cpu, cuda or rocm.

    Raises:
        DeviceError: no such device, or one that there are no kernels for.
    """
    if device != "auto":
        jax.config.update("jax_platforms", device)
    try:
        found = backend_lib.platform()
    except (RuntimeError, NotImplementedError) as error:
        text = str(error).partition("\n")[0]
        raise DeviceError(
            f"--device {device}: {text}; `ds4jax doctor` says what is missing"
        ) from error
    if device not in ("auto", found):
        raise DeviceError(
            f"--device {device}: JAX already runs on {found} in this process; start a new one"
        )
    if compile_cache is not None:
        use_compile_cache(compile_cache, found)
    return found


def use_compile_cache(directory: Path, platform: str) -> None:
    """Keep compiled programs for the next start, apart for every kind of machine."""
    place = directory / f"{platform}-{_machine_digest(platform)}"
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # all of them
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _machine_digest(platform: str) -> str:
    """Tells machines apart whose compiled programs differ: a CPU program uses what that CPU has."""
    facts = [jax.__version__, host_platform.machine()]
    if platform == "cpu":
        try:
            lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
            facts += sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))})
        except OSError:
            facts.append(host_platform.processor())
    else:
        facts += sorted({d.device_kind for d in jax.devices()})
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def free_memory() -> int | None:
    """Bytes that the default device can still give, or None if nobody tells."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    if device.platform != "cpu":
        return None
    limits = [_available(), _group_limit()]
    return min((x for x in limits if x is not None), default=None)


def _available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _group_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the container that this process lives in leaves it."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        return None if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return None


# ---- choices -----------------------------------------------------------------------------------


def runtime_config(options: Options, platform: str) -> RuntimeConfig:
    """The run that the options mean on a platform.

    Raises:
        ConfigError: values out of range.
    """
    if platform == "cpu":
        return RuntimeConfig(
            dtype=options.dtype or "float32", numerics=options.numerics, backend="reference",
            max_ctx=options.max_ctx, num_slots=options.num_slots,
            row_buckets=(CPU_ROWS,), prefill_buckets=(CPU_ROWS,),
        )  # fmt: skip
    return RuntimeConfig(
        dtype=options.dtype or "bfloat16", numerics=options.numerics, backend="triton",
        max_ctx=options.max_ctx, num_slots=options.num_slots,
        row_buckets=up_to(options.num_slots, GPU_ROWS),
        prefill_buckets=up_to(options.max_ctx, GPU_CHUNKS), samplers=("full", "greedy"),
    )  # fmt: skip


def up_to(most: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes up to the first that holds `most`."""
    below = [s for s in sizes if s < most]
    return sizes[: len(below) + 1]


def plan_memory(
    file: ModelFile, run: RuntimeConfig, wanted: CpuWeights | None, free: int | None
) -> MemoryPlan:
    """Sizes, and (on the reference backend, if none is wanted) the form of the weights.

    Raises:
        DoesNotFit: saying what to lower.
    """
    cache = sum(cache_lib.plan_bytes(file.model_config, run).values())
    stored = sum(t.nbytes for t in file.tensors.values())

    def made(form: CpuWeights) -> MemoryPlan:
        loaded = _loaded_bytes(file, run, form == "packed")
        return MemoryPlan(stored=stored, weights=loaded, cache=cache, form=form, free=free)

    plan = made(wanted or "packed")
    if wanted is None and run.backend == "reference":
        decoded = made("decoded")
        if free is not None and decoded.weights <= free // 2:
            plan = decoded
    if free is not None and plan.total > free:
        help_ = "lower --ctx or --lanes" if plan.cache > plan.weights else "use a smaller file"
        if plan.form == "decoded":
            help_ = "give --cpu-weights packed"
        raise DoesNotFit(
            f"the model needs {_mb(plan.weights)} for weights ({plan.form}) and {_mb(cache)} for"
            f" the cache of {run.num_slots} x {run.max_ctx} tokens, {_mb(free)} are free: {help_}"
        )
    return plan


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def _loaded_bytes(file: ModelFile, run: RuntimeConfig, packed: bool) -> int:
    packed = packed or run.backend != "reference"
    total = 0
    for spec in file.specs():
        form = weights.form_of(file.tensors[spec.name], run, packed)
        for leaf in jax.tree.leaves(weights.abstract_leaf(spec, form.name, 1)):
            total += int(np.prod(leaf.shape)) * leaf.dtype.itemsize
    return total


@dataclass(kw_only=True)
class Loaded:
    """Weights on the device and how they came there."""

    cfg: ModelConfig
    params: Params
    run: RuntimeConfig
    plan: MemoryPlan
    platform: str
    seconds: float


def load(
    file: ModelFile,
    options: Options,
    *,
    on_plan: Callable[[MemoryPlan, RuntimeConfig, str], None] = lambda plan, run, platform: None,
    progress: LoadProgress = lambda done, total, name: None,
) -> Loaded:
    """Start the device and load an opened model onto it.

    Args:
        on_plan: called with sizes and choices before the first weight is read.

    Raises:
        DeviceError, DoesNotFit, ConfigError, ModelFileError: see `start_device`, `plan_memory`,
            `RuntimeConfig` and `weights.load`.
    """
    started = time.perf_counter()
    platform = start_device(options.device, options.compile_cache)
    run = runtime_config(options, platform)
    plan = plan_memory(file, run, options.cpu_weights, free_memory())
    on_plan(plan, run, platform)
    cfg, params = weights.load(
        file, run, cpu_weights=plan.form,
        progress=lambda done, name: progress(done, plan.stored, name),
    )  # fmt: skip
    jax.block_until_ready(params)
    seconds = time.perf_counter() - started
    return Loaded(
        cfg=cfg, params=params, run=run, plan=plan, platform=platform, seconds=seconds
    )  # fmt: skip


def with_context(loaded: Loaded, file: ModelFile, max_ctx: int) -> Loaded:
    """The same weights for sequences of another length: only the angle tables are made anew.

    Raises:
        DoesNotFit: the state for it.
    """
    run = dataclasses.replace(loaded.run, max_ctx=max_ctx)
    free = free_memory()
    held = loaded.plan.weights  # already taken
    plan = plan_memory(file, run, loaded.plan.form, None if free is None else free + held)
    main, compress = params_lib.rope_tables(loaded.cfg, max_ctx)
    tables = {"rope_main": jnp.asarray(main), "rope_compress": jnp.asarray(compress)}
    params = loaded.params.replace(**tables)  # type: ignore[attr-defined]
    return dataclasses.replace(loaded, run=run, plan=plan, params=params)


# ---- requests ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one step added to one candidate."""

    candidate: int
    tokens: tuple[TokenResult, ...] = ()
    events: tuple[Event, ...] = ()  # reasoning, content, tool calls; none without a tokenizer


@dataclass(kw_only=True)
class Timings:
    """Seconds of one request. `decode` runs from the first token to the last of any candidate."""

    prefill: float = 0.0
    decode: float = 0.0
    total: float = 0.0
    decode_tokens: int = 0  # tokens that came after the first one of their candidate

    @property
    def tokens_per_second(self) -> float | None:
        """Rate of decoding, first tokens left out; None if there was only one."""
        return self.decode_tokens / self.decode if self.decode > 0 else None


class Generation:
    """One request. Iterate for the output as it comes; afterwards read `results` and `timings`.

    Attributes:
        seed: in use, drawn if none was given.
        results: by candidate, each as soon as it has ended.
        timings: complete when the iteration has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        request: Request,
        answers: dict[int, Answer],
    ) -> None:
        self.seed = int(request.lanes[0].sampling.seed or 0)
        self.results: dict[int, Result] = {}
        self.timings = Timings()
        self.max_output_tokens = request.lanes[0].max_output_tokens
        self._scheduler = scheduler
        self._request = request
        self._answers = answers
        self._submitted = False
        self._cancelled = False

    def cancel(self) -> None:
        """End it soon; the iteration then raises ServiceError CANCELLED. For signal handlers."""
        self._cancelled = True
        if self._submitted:  # the scheduler knows nothing of it before
            error = ServiceError("CANCELLED", "INTERRUPTED", "interrupted")
            self._scheduler.cancel(self._request, "interrupted", error)

    def partial(self, candidate: int = 0) -> Result:
        """What a candidate has said, where the request was cancelled before its end."""
        if candidate not in self.results:
            self.results[candidate] = self._answers[candidate].finish(None)[1]
        return self.results[candidate]

    def __iter__(self) -> Iterator[Output]:
        """Run it.

        Raises:
            ServiceError: it failed, or was cancelled.
        """
        scheduler, request = self._scheduler, self._request
        live = set(self._answers)
        scheduler.submit(request)
        self._submitted = True
        try:
            if self._cancelled:
                self.cancel()
            while live:
                delay = scheduler.turn()
                while (event := request.stream.pop()) is not None:
                    if isinstance(event, Failed):
                        live.clear()
                        raise event.error
                    if not isinstance(event, Started):
                        yield from self._take(event, live)
                if delay and live:
                    time.sleep(delay)
        finally:
            self._measure()
            if live:
                scheduler.cancel(request)
            while scheduler.turn() == 0.0:
                pass

    def _take(self, event: Tokens | Ended, live: set[int]) -> Iterator[Output]:
        candidate = event.candidate
        if candidate not in live:  # its own text has ended it; a step was in flight
            return
        answer = self._answers[candidate]
        if isinstance(event, Tokens):
            before = answer.num_tokens
            events = answer.push(event)
            taken = event.tokens[: answer.num_tokens - before]
            yield Output(candidate=candidate, tokens=taken, events=tuple(events))
            if not answer.done:
                return
            self._scheduler.stop_candidate(self._request, candidate)
        live.discard(candidate)
        last, result = answer.finish(event if isinstance(event, Ended) else None)
        self.results[candidate] = result
        if last:
            yield Output(candidate=candidate, events=tuple(last))

    def _measure(self) -> None:
        begun = self._request.arrival
        first = [a.first_token_at for a in self._answers.values() if a.first_token_at is not None]
        last = [a.last_token_at for a in self._answers.values() if a.last_token_at is not None]
        now = self._scheduler.clock()
        self.timings = Timings(
            prefill=(min(first) if first else now) - begun,
            decode=max(last) - min(first) if last else 0.0,
            total=now - begun,
            decode_tokens=sum(max(0, a.num_tokens - 1) for a in self._answers.values()),
        )


@dataclass(kw_only=True)
class LocalModel:
    """A loaded model with its programs compiled."""

    loaded: Loaded
    tokenizer: Tokenizer | None
    executor: DeviceExecutor
    scheduler: Scheduler
    compile_seconds: float
    _requests: int = field(default=0, repr=False)

    @classmethod
    def open(
        cls,
        loaded: Loaded,
        tokenizer: Tokenizer | None,
        progress: CompileProgress | None = None,
    ) -> LocalModel:
        """Allocate the state and compile what a request needs.

        Raises:
            MemoryError: the state does not fit the device.
        """
        started = time.perf_counter()
        executor = DeviceExecutor(loaded.cfg, loaded.params, loaded.run)
        executor.warm_up(progress, snapshots=False)
        # One request in one thread: nobody to wait for, and no watchdog needed.
        settings = SchedulerConfig(coalesce=0.0, watchdog=float("inf"))
        return cls(
            loaded=loaded,
            tokenizer=tokenizer,
            executor=executor,
            scheduler=Scheduler(executor, settings),
            compile_seconds=time.perf_counter() - started,
        )

    def generate(
        self,
        prompt: PromptIds,
        sampling: SamplingParams,
        stopping: StoppingCriteria,
        *,
        candidates: int = 1,
    ) -> Generation:
        """A request; nothing runs before it is iterated.

        Raises:
            ServiceError: prompt and output do not fit the context.
            ConfigError: ids outside the vocabulary, or no room for the minimum asked for.
        """
        lanes = lane_specs(
            prompt, sampling, stopping, limits=self.executor.limits,
            tokenizer=self.tokenizer, candidates=candidates,
        )  # fmt: skip
        self._requests += 1
        request = Request(id=f"local-{self._requests}", lanes=lanes, time_limit=stopping.time_limit)
        answers = {c: Answer(prompt, stopping, self.tokenizer) for c in range(candidates)}
        return Generation(self.scheduler, request, answers)

    def close(self) -> None:
        """Release the device's state."""
        self.executor.close()


__all__ = [
    "DeviceError", "DoesNotFit", "Generation", "Loaded", "LocalModel", "MemoryPlan", "Options",
    "Output", "Timings", "free_memory", "load", "plan_memory", "runtime_config", "start_device",
    "up_to", "use_compile_cache", "with_context",
]  # fmt: skip
