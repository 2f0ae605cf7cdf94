"""The executor of a device: compiled programs, cache, pages and lanes. The only mutable object.

Everything is jitted and donated here and nowhere else. Programs are compiled once, for the buckets
of the configuration, and kept as compiled objects: a surprise shape raises instead of compiling. A
step is dispatched without waiting for the one before; its results are read when asked for.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ds4jax import cache as cache_lib
from ds4jax import plan as plan_lib
from ds4jax import sampling, step
from ds4jax.config import ModelConfig, RuntimeConfig, Sampler
from ds4jax.pages import PageAllocator, pages_for
from ds4jax.params import Params
from ds4jax.plan import (
    Chunk,
    DecodeRow,
    ExecutorLimits,
    LaneRef,
    LaneResult,
    LaneSpec,
    PageCounts,
    PlanError,
    PlanLimits,
    StepPlan,
    StepResult,
)
from ds4jax.step import Bucket, LaneRows

SNAPSHOT_PAGES = 64
"""Pages moved by one call of the snapshot programs."""

RESERVE_BYTES = 512 << 20
"""Kept free on a device that tells how much it has, beside everything that is planned."""

Progress = Callable[[str, int, int, float], None]
"""(program name, number, how many, seconds)."""


class CompileCounter:
    """Counts compilations and traces of this process, by JAX's own monitoring events."""

    _shared: CompileCounter | None = None
    _lock = threading.Lock()

    def of_thread(self) -> tuple[int, float]:
        """Compilations that the calling thread made, and their seconds."""
        found: tuple[int, float] = getattr(self._mine, "found", (0, 0.0))
        return found

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.traces = 0
        self._mine = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @classmethod
    def shared(cls) -> CompileCounter:
        """The one counter of the process (listeners cannot be taken back)."""
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            with self._lock:
                self.count += 1
                self.seconds += duration_secs
            count, seconds = self.of_thread()
            self._mine.found = count + 1, seconds + duration_secs
        elif event == "/jax/core/compile/jaxpr_trace_duration":
            self.traces += 1


@dataclass
class _Lane:
    spec: LaneSpec
    length: int = 0  # positions dispatched
    decoding: bool = False
    suspended: bool = False


@dataclass(frozen=True, eq=False)
class _Snapshot:
    slot_data: dict[str, npt.NDArray[Any]]
    pages: list[dict[str, npt.NDArray[Any]]]
    num_pages: int
    length: int
    nbytes: int


class _Handle:
    """A dispatched step; `result` is its one device-to-host transfer."""

    def __init__(self, owner: DeviceExecutor, plan: StepPlan, array: Any, bucket: Bucket) -> None:
        self._owner, self._plan, self._array, self._bucket = owner, plan, array, bucket
        self._lanes = plan.lanes
        self._wants = [owner.spec_of(x).sampling.top_logprobs for x in self._lanes]
        self._started = time.perf_counter()
        self._read = False
        array.copy_to_host_async()

    def names(self, slot: int) -> bool:
        """Whether the step has rows of this slot."""
        return any(x.slot == slot for x in self._lanes)

    def done(self) -> bool:
        """See `plan.StepHandle`."""
        return bool(self._array.is_ready())

    def result(self) -> StepResult:
        """See `plan.StepHandle`."""
        if self._read:
            raise PlanError("a result was read twice")
        self._read = True
        self._owner.forget(self)
        words = np.asarray(self._array)
        plan, out = self._plan, []
        if plan.chunk is not None and not plan.chunk.last:
            out.append(LaneResult(lane=plan.chunk.lane))
            rows = plan.chunk.stop - plan.chunk.start
        else:
            for i, (lane, want) in enumerate(zip(self._lanes, self._wants, strict=True)):
                token, finite = step.read_results(words[i], want)
                out.append(LaneResult(lane=lane, tokens=(token,) if finite else (), finite=finite))
            chunk = plan.chunk
            rows = len(plan.decode) if chunk is None else chunk.stop - chunk.start
        seconds = time.perf_counter() - self._started
        return StepResult(lanes=tuple(out), rows=rows, bucket=self._bucket.rows, device_s=seconds)


class DeviceExecutor:
    """Runs plans on the device that holds `params`. See `plan.Executor` for the contract.

    Args:
        cfg, params: the model. run: capacities and buckets.
        page_order: order in which pages are first handed out; no result may depend on it.
        batched: test switch for `model.forward`; None is right.

    Raises:
        MemoryError: the planned bytes exceed what the device grants; the message is the plan.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        run: RuntimeConfig,
        *,
        page_order: Sequence[int] | None = None,
        batched: bool | None = None,
    ) -> None:
        self.cfg, self.run, self._params, self._batched = cfg, run, params, batched
        self._limits = ExecutorLimits(
            num_slots=run.num_slots,
            max_ctx=run.max_ctx,
            num_pages=run.pages,
            chunk_tokens=run.prefill_buckets[-1],
            vocab_size=cfg.vocab_size,
        )
        self._planned = planned_bytes(cfg, run, params)
        self._check_memory()
        self._pages = PageAllocator(run.pages, run.num_slots, run.pages_per_slot, page_order)
        self._programs: dict[Any, Any] = {}
        self._generations = [0] * run.num_slots
        self._lanes: dict[int, _Lane] = {}
        self._in_flight: list[_Handle] = []
        self._snapshots: weakref.WeakSet[_Snapshot] = weakref.WeakSet()  # of lanes still parked
        self._counter = CompileCounter.shared()
        self._compiles_before = self._counter.count
        self._seconds_before = self._counter.seconds
        self._ready: tuple[int, int] | None = None  # compilations and traces until then
        self._by_program: dict[str, tuple[int, float]] = {}  # compilations, seconds
        self._temporaries = 0  # bytes of work space of the program that needs most
        self._host_syncs = 0
        self._cache, self._lane_params = self._fresh_state()

    def _fresh_state(self) -> tuple[Any, Any]:
        """Cache and lane parameters of nobody: one small program instead of one per array."""
        cfg, run = self.cfg, self.run
        made: tuple[Any, Any] = self._compiled(
            "fresh", lambda: (cache_lib.init(cfg, run), sampling.init_lanes(run)), ()
        )()
        return made

    # ---- programs ------------------------------------------------------------------------------

    def buckets(self) -> list[Bucket]:
        """Every step program of the configuration."""
        out: dict[Bucket, None] = {}
        for sampler in self.run.samplers:
            for t in self.run.row_buckets:
                out[self._bucket(t, sampler, prefill=False)] = None
        # One row of a chunk is sampled, if any: a faster sampler gains nothing there.
        for t in self.run.prefill_buckets:
            out[self._bucket(t, "full", prefill=True)] = None
        return list(out)

    def _bucket(self, rows: int, sampler: Sampler, *, prefill: bool) -> Bucket:
        if prefill and self._chunked:
            return Bucket(rows, 1, sampler, prefill=True, chunk=True)
        if not self._chunked and rows in self.run.row_buckets and rows in self.run.prefill_buckets:
            # Rows run one after the other, padding costs nothing: one program does both.
            return Bucket(rows, min(rows, self.run.num_slots), sampler)
        return Bucket(rows, 1 if prefill else rows, sampler, prefill=prefill)

    @property
    def _chunked(self) -> bool:
        """Whether prefill programs need the form that may exceed the rings."""
        return self.run.backend != "reference" or bool(self._batched)

    def warm_up(self, progress: Progress | None = None, *, snapshots: bool = True) -> None:
        """Compile every program; afterwards nothing compiles. `progress` after each one.

        Args: snapshots: False leaves out the programs of `park`, `restore` and `fork`.

        Raises:
            MemoryError: the programs' work space does not fit beside the arrays.
        """
        names: list[tuple[str, Callable[[], Any]]] = []
        for bucket in self.buckets():
            names.append((_label(bucket), functools.partial(self._step_program, bucket)))
        names.append(("open", self._open_program))
        if snapshots:
            names += [(k, functools.partial(self._snapshot_program, k)) for k in _SNAPSHOT_PROGRAMS]

        def timed(make: Callable[[], Any]) -> float:
            start = time.perf_counter()
            make()
            return time.perf_counter() - start

        workers = compilers(self.run.backend)
        for i, (name, seconds) in enumerate(at_once(names, timed, workers)):
            if progress is not None:
                progress(name, i + 1, len(names), seconds)
        self._check_work_space()
        self._ready = (self._counter.count, self._counter.traces)

    @property
    def num_programs(self) -> int:
        """Executables made so far."""
        return len(self._programs)

    def _compiled(self, key: Any, fn: Any, donate: tuple[int, ...], *args: Any) -> Any:
        if key not in self._programs:
            count, seconds = self._counter.of_thread()
            program = jax.jit(fn, donate_argnums=donate).lower(*_abstract(args)).compile()
            stats = program.memory_analysis()  # once: it takes the program apart
            if stats is not None:
                self._temporaries = max(self._temporaries, int(stats.temp_size_in_bytes))
            self._programs[key] = program
            after = self._counter.of_thread()
            known = self._by_program.get(_label(key), (0, 0.0))
            self._by_program[_label(key)] = (
                known[0] + after[0] - count, known[1] + after[1] - seconds,
            )  # fmt: skip
        return self._programs[key]

    def _step_program(self, bucket: Bucket) -> Any:
        fn = functools.partial(
            step.run_step, cfg=self.cfg, run=self.run, bucket=bucket, batched=self._batched
        )
        words = np.zeros(bucket.words, np.int32)
        return self._compiled(bucket, fn, (1,), self._params, self._cache, self._lane_params, words)

    def _open_program(self) -> Any:
        words = np.zeros(sampling.LANE_WORDS, np.int32)
        zero = np.int32(0)
        return self._compiled(
            "open", step.open_lane, (0, 1), self._cache, self._lane_params, zero, words, zero
        )

    @property
    def _move_pages(self) -> int:
        return min(SNAPSHOT_PAGES, self.run.pages_per_slot)

    def _snapshot_program(self, name: str) -> Any:
        if name in self._programs:  # the shapes below cost a trace
            return self._programs[name]
        zero, pages = np.int32(0), np.zeros(self._move_pages, np.int32)
        cache = self._cache
        fn = getattr(step, name)
        if name == "take_slot":
            return self._compiled(name, fn, (), cache, zero)
        if name == "take_pages":
            return self._compiled(name, fn, (), cache, pages)
        data = jax.eval_shape(step.take_slot if name == "put_slot" else step.take_pages,
                              cache, zero if name == "put_slot" else pages)  # fmt: skip
        if name == "put_slot":
            return self._compiled(name, fn, (0,), cache, zero, data)
        return self._compiled(name, fn, (0,), cache, zero, zero, pages, data)

    # ---- lanes ---------------------------------------------------------------------------------

    @property
    def limits(self) -> ExecutorLimits:
        """See `plan.Executor`."""
        return self._limits

    def _lane(self, ref: LaneRef) -> _Lane:
        lane = self._lanes.get(ref.slot)
        if lane is None or self._generations[ref.slot] != ref.generation:
            raise PlanError(f"{ref} is not a live lane")
        return lane

    def _at_rest(self, ref: LaneRef) -> _Lane:
        lane = self._lane(ref)
        if any(h.names(ref.slot) for h in self._in_flight):
            raise PlanError(f"a step in flight names {ref}: read its result first")
        return lane

    def spec_of(self, ref: LaneRef) -> LaneSpec:
        """The specification of a live lane."""
        return self._lane(ref).spec

    def forget(self, handle: _Handle) -> None:
        """A step's result has been read."""
        self._host_syncs += 1
        if handle in self._in_flight:
            self._in_flight.remove(handle)

    def _free_slot(self) -> int | None:
        return next((s for s in range(self.run.num_slots) if s not in self._lanes), None)

    def _open(self, slot: int, spec: LaneSpec, length: int) -> None:
        self._cache, self._lane_params = self._open_program()(
            self._cache, self._lane_params, np.int32(slot), sampling.pack_lane(spec),
            np.int32(length),
        )  # fmt: skip

    def admit(self, spec: LaneSpec) -> LaneRef | None:
        """See `plan.Executor`."""
        if spec.max_rows > self.run.max_ctx or not self._pages.fits_ever(spec.max_rows):
            raise PlanError(
                f"{spec.max_rows} positions can never fit: max_ctx is {self.run.max_ctx},"
                f" the pool has {self.run.pages} pages of 128"
            )
        slot = self._free_slot()
        if slot is None or not self._pages.open(slot, len(spec.known_tokens), spec.max_rows):
            return None
        self._open(slot, spec, 0)
        self._lanes[slot] = _Lane(spec)
        return LaneRef(slot, self._generations[slot])

    def suspend(self, lane: LaneRef) -> None:
        """See `plan.Executor`."""
        self._lane(lane).suspended = True
        self._pages.suspend(lane.slot, True)

    def resume(self, lane: LaneRef) -> None:
        """See `plan.Executor`."""
        self._lane(lane).suspended = False
        self._pages.suspend(lane.slot, False)

    def retire(self, lane: LaneRef) -> None:
        """See `plan.Executor`."""
        self._at_rest(lane)
        del self._lanes[lane.slot]
        self._pages.close(lane.slot)
        self._generations[lane.slot] += 1

    def _page_blocks(self, pages: Sequence[int]) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
        size = self._move_pages
        for first in range(0, len(pages), size):
            block = np.full(size, self._pages.trash, np.int32)
            part = pages[first : first + size]
            block[: len(part)] = part
            yield first, block

    def park(self, lane: LaneRef) -> Any | None:
        """See `plan.Executor`."""
        state = self._at_rest(lane)
        if not state.decoding:
            raise PlanError(f"{lane} does not decode")
        pages = self._pages.owned(lane.slot)[: pages_for(state.length)]
        moved = self._slot_bytes() + len(pages) * self._page_bytes()
        snapshot = None
        if sum(x.nbytes for x in self._snapshots) + moved <= self.run.snapshot_bytes:
            data = self._snapshot_program("take_slot")(self._cache, np.int32(lane.slot))
            parts = []
            for first, block in self._page_blocks(pages):
                got = self._snapshot_program("take_pages")(self._cache, block)
                n = min(self._move_pages, len(pages) - first)
                parts.append({k: np.array(np.asarray(v)[:, :n]) for k, v in got.items()})
            snapshot = _Snapshot(
                {k: np.array(np.asarray(v)) for k, v in data.items()},
                parts, len(pages), state.length, moved,
            )  # fmt: skip
            self._snapshots.add(snapshot)
        self.retire(lane)
        return snapshot

    def _slot_bytes(self) -> int:
        shapes = cache_lib.shapes(self.cfg, self.run)
        rings = sum(
            shapes[k].size // shapes[k].shape[1] * shapes[k].dtype.itemsize for k in step.SLOTTED
        )
        return rings + 4 * (self.run.max_ctx + 1) + 4  # token history, length

    def _page_bytes(self) -> int:
        shapes = cache_lib.shapes(self.cfg, self.run)
        return sum(
            shapes[k].size // shapes[k].shape[1] * per_page * shapes[k].dtype.itemsize
            for k, per_page in step.PAGED.items()
        )

    def fork(self, source: LaneRef, targets: Sequence[LaneRef], length: int) -> bool:
        """See `plan.Executor`. False where the programs of `park` and `restore` were left out."""
        given = self._lane(source)
        plan_lib.check_fork(length, self._limits.chunk_tokens, len(given.spec.known_tokens))
        for ref in targets:
            lane = self._lane(ref)
            same = np.array_equal(lane.spec.known_tokens, given.spec.known_tokens)
            if given.decoding or given.length != length or lane.length or not same:
                raise PlanError(f"{ref} cannot go on from {source} at position {length}")
        if not all(name in self._programs for name in _SNAPSHOT_PROGRAMS):
            return False
        data = self._snapshot_program("take_slot")(self._cache, np.int32(source.slot))
        count = pages_for(length)
        blocks = list(self._page_blocks(self._pages.owned(source.slot)[:count]))
        for ref in targets:
            where = np.int32(ref.slot)
            self._cache = self._snapshot_program("put_slot")(self._cache, where, data)
            own = self._page_blocks(self._pages.owned(ref.slot)[:count])
            for (first, block), (_, theirs) in zip(own, blocks, strict=True):
                part = self._snapshot_program("take_pages")(self._cache, theirs)
                self._cache = self._snapshot_program("put_pages")(
                    self._cache, where, np.int32(first), block, part
                )
            self._lane(ref).length = length
            self._pages.advance(ref.slot, length, decoding=False)
        return True

    def restore(self, spec: LaneSpec, snapshot: Any) -> LaneRef | None:
        """See `plan.Executor`."""
        slot = self._free_slot()
        length = snapshot.length
        if slot is None or not self._pages.open(
            slot, length, spec.max_rows, length=length, decoding=True
        ):
            return None
        self._open(slot, spec, length)
        where = np.int32(slot)
        self._cache = self._snapshot_program("put_slot")(self._cache, where, snapshot.slot_data)
        pages = self._pages.owned(slot)[: snapshot.num_pages]
        for (first, block), part in zip(self._page_blocks(pages), snapshot.pages, strict=True):
            full = {k: _padded(v, self._move_pages) for k, v in part.items()}
            self._cache = self._snapshot_program("put_pages")(
                self._cache, where, np.int32(first), block, full
            )
        self._snapshots.discard(snapshot)
        self._lanes[slot] = _Lane(spec, length=length, decoding=True)
        return LaneRef(slot, self._generations[slot])

    def reset(self) -> None:
        """See `plan.Executor`."""
        self._in_flight.clear()
        self._lanes.clear()
        self._pages.reset()
        self._generations = [g + 1 for g in self._generations]
        self._cache, self._lane_params = self._fresh_state()

    # ---- steps ---------------------------------------------------------------------------------

    def plan_limits(self, decode: Sequence[LaneRef]) -> PlanLimits:
        """See `plan.Executor`."""
        for ref in decode:
            self._lane(ref)
        return PlanLimits(lacking=self._pages.top_up([ref.slot for ref in decode]))

    def step(self, plan: StepPlan) -> _Handle:
        """See `plan.Executor`."""
        plan_lib.validate_plan(plan, self._limits)
        lanes = [self._lane(ref) for ref in plan.lanes]
        for ref, lane in zip(plan.lanes, lanes, strict=True):
            if lane.suspended:
                raise PlanError(f"{ref} is suspended")
        if plan.chunk is None:
            rows, sizes = [self._decode_rows(r) for r in plan.decode], self.run.row_buckets
        else:
            rows, sizes = [self._chunk_rows(plan.chunk)], self.run.prefill_buckets
        count = sum(r.count for r in rows)
        size = next((t for t in sizes if t >= count), None)
        if size is None:
            raise PlanError(f"{count} rows do not fit the largest bucket, {sizes[-1]} rows")
        sampler = self._sampler(lanes) if plan.chunk is None else "full"
        bucket = self._bucket(size, sampler, prefill=plan.chunk is not None)
        words = step.pack_plan(bucket, rows, self.run.num_slots)
        program = self._step_program(bucket)
        self._cache, results = program(self._params, self._cache, self._lane_params, words)
        for row, lane in zip(rows, lanes, strict=True):
            lane.length += row.count
            lane.decoding = plan.chunk is None or plan.chunk.last
            self._pages.advance(row.slot, lane.length, decoding=lane.decoding)
        handle = _Handle(self, plan, results, bucket)
        self._in_flight.append(handle)
        return handle

    def _sampler(self, lanes: Sequence[_Lane]) -> Sampler:
        if "greedy" not in self.run.samplers:
            return "full"
        return "greedy" if all(_plain_greedy(lane.spec) for lane in lanes) else "full"

    def _decode_rows(self, row: DecodeRow) -> LaneRows:
        lane = self._lane(row.lane)
        if not lane.decoding or lane.length >= lane.spec.max_rows:
            raise PlanError(f"{row.lane} cannot decode at position {lane.length}")
        pages = self._pages.owned(row.lane.slot)
        if len(pages) <= lane.length // 128:
            raise PlanError(f"{row.lane} has no page for position {lane.length}")
        return LaneRows(row.lane.slot, lane.length, None, pages)

    def _chunk_rows(self, chunk: Chunk) -> LaneRows:
        lane = self._lane(chunk.lane)
        known = lane.spec.known_tokens
        if lane.decoding or chunk.start != lane.length or chunk.last != (chunk.stop == len(known)):
            raise PlanError(f"{chunk} does not continue a lane at {lane.length} of {len(known)}")
        return LaneRows(
            chunk.lane.slot, chunk.start, known[chunk.start : chunk.stop],
            self._pages.owned(chunk.lane.slot), "last" if chunk.last else "none",
        )  # fmt: skip

    # ---- views ---------------------------------------------------------------------------------

    def page_counts(self) -> PageCounts:
        """See `plan.Executor`."""
        self._pages.check()
        owned = sum(len(self._pages.owned(s)) for s in range(self.run.num_slots))
        return PageCounts(total=self.run.pages, free=self._pages.free, owned=owned)

    def counters(self) -> Mapping[str, float]:
        """See `plan.Executor`; besides, by program: "compiles:NAME" and "compile_seconds:NAME"."""
        counter = self._counter
        ready = self._ready or (counter.count, counter.traces)
        out = {
            "compiles": float(counter.count - self._compiles_before),
            "compile_seconds": counter.seconds - self._seconds_before,
            "compiles_after_ready": float(counter.count - ready[0]),
            "traces_after_ready": float(counter.traces - ready[1]),
            "host_syncs": float(self._host_syncs),
        }
        for name, (count, seconds) in self._by_program.items():
            out[f"compiles:{name}"] = float(count)
            out[f"compile_seconds:{name}"] = seconds
        return out

    def memory_plan(self) -> Mapping[str, int]:
        """See `plan.Executor`."""
        return self._planned | {"program_temporaries": self._temporaries}

    def allocated_bytes(self) -> dict[str, int]:
        """Bytes of the arrays that exist, by the names of `memory_plan`."""
        arrays = {k: getattr(self._cache, k) for k in cache_lib.shapes(self.cfg, self.run)}
        out = {k: int(v.nbytes) for k, v in arrays.items()}
        out["lanes"] = sum(int(x.nbytes) for x in jax.tree.leaves(self._lane_params))
        out["weights"] = sum(int(x.nbytes) for x in jax.tree.leaves(self._params))
        return out

    def _free_bytes(self) -> int | None:
        """Bytes that the device still grants, or None if it does not tell."""
        device = next(iter(jax.tree.leaves(self._params)[0].devices()))
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else int(limit) - int(stats.get("bytes_in_use", 0))

    def _check_memory(self) -> None:
        plan = self._planned
        self._refuse_beyond(sum(plan.values()) - plan["weights"], "cache and lane state", plan)

    def _check_work_space(self) -> None:
        """After compilation, when the programs say what they need beside all arrays."""
        plan = dict(self.memory_plan())
        plan["reserve"] = RESERVE_BYTES
        need = plan["program_temporaries"] + RESERVE_BYTES
        self._refuse_beyond(need, "the programs' work space and a reserve", plan)

    def _refuse_beyond(self, need: int, what: str, plan: Mapping[str, int]) -> None:
        free = self._free_bytes()
        if free is None or need <= free:
            return
        table = "\n".join(f"  {k:20} {v:>16,}" for k, v in plan.items())
        raise MemoryError(
            f"{what} need {need:,} bytes, {free:,} are free on the device: lower --ctx or --lanes"
            f"\n{table}"
        )

    def close(self) -> None:
        """See `plan.Executor`."""
        self._programs.clear()
        self._lanes.clear()
        self._in_flight.clear()
        for leaf in jax.tree.leaves((self._cache, self._lane_params)):
            leaf.delete()


_SNAPSHOT_PROGRAMS = ("take_slot", "put_slot", "take_pages", "put_pages")


def planned_bytes(cfg: ModelConfig, run: RuntimeConfig, params: Any) -> dict[str, int]:
    """Bytes of weights, every cache array and lane state; the allocator's own formulas."""
    lanes = sampling.lane_shapes(run).values()
    weights = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(params))
    return cache_lib.plan_bytes(cfg, run) | {
        "lanes": sum(s.size * s.dtype.itemsize for s in lanes),
        "weights": weights,
    }


def _label(key: Any) -> str:
    """Name of a program for people and metrics."""
    if isinstance(key, Bucket):
        return f"{'prefill' if key.prefill else 'rows'} {key.rows} {key.sampler}"
    return str(key)


def compilers(backend: str) -> int:
    """How many programs to compile at a time.

    A GPU's compiler uses one core, more or less; the CPU's own one uses all of them.
    """
    return 1 if backend == "reference" else max(1, min(4, (os.cpu_count() or 2) // 2))


def at_once(
    jobs: Sequence[tuple[str, Callable[[], Any]]], run: Callable[[Callable[[], Any]], float],
    workers: int,
) -> Iterator[tuple[str, float]]:  # fmt: skip
    """What `run` says of every job as it ends; the rest is dropped if one fails."""
    if workers < 2:
        yield from ((name, run(make)) for name, make in jobs)
        return
    with ThreadPoolExecutor(workers, "compile") as pool:
        running = {pool.submit(run, make): name for name, make in jobs}
        try:
            yield from ((running[job], job.result()) for job in as_completed(running))
        finally:
            pool.shutdown(cancel_futures=True)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), a.dtype), tree)


def _padded(a: npt.NDArray[Any], pages: int) -> npt.NDArray[Any]:
    return np.pad(a, [(0, 0), (0, pages - a.shape[1]), *[(0, 0)] * (a.ndim - 2)])


def _plain_greedy(spec: LaneSpec) -> bool:
    s = spec.sampling
    penalised = s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty
    return (
        s.greedy
        and not penalised
        and not s.logit_bias
        and s.top_logprobs is None
        and spec.min_output_tokens == 0
        and spec.reasoning is None
    )
