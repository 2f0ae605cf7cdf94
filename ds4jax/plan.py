"""The border between scheduler and executor: lanes, plans, results, and the `Executor` protocol.

The scheduler decides who runs; the executor owns pages, device arrays, compiled programs and
sampling. This module is all that they share. It holds no policy, no arrays of a device and no JAX.

Life of a lane (one candidate of one request), as the executor sees it:

    admit -> step(chunk)... -> step(decode)... -> retire
               |                   |  suspend / resume   (pages stay, no rows)
               |                   |  park -> restore    (pages go; same bytes afterwards)
               |  fork                                   (its chunks, given to other lanes)

Positions are absolute: BOS is 0, the first sampled token of a prompt of N tokens has position N.
Steps run in the order of their dispatch; `step` returns at once and the next step is usually
dispatched before the last one's result is read. A decode row's input token is the one that the
lane's previous step sampled: it stays on the device, and so does the sampler's history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ds4jax import config

MAX_LANE_STOP_IDS = config.MAX_STOP_IDS + 8
"""Most ids that can end one lane: the request's own, the end of text, and the turn markers."""

TokenIds = npt.NDArray[np.int32]
NO_TOKENS: TokenIds = np.zeros((0,), np.int32)


class PlanError(ValueError):
    """A plan or call that contradicts the executor's state. Nothing was changed by it."""


@dataclass(frozen=True, order=True)
class LaneRef:
    """A slot together with the generation that makes results of an earlier lane recognisable."""

    slot: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class ReasoningLimit:
    """At most `max_tokens` tokens of reasoning, then `close_id` is forced.

    The definition is `forced_token`; a device keeps (open, count) as lane state and advances them
    with every token, which gives the same answer.
    """

    max_tokens: int
    starts_open: bool  # the prompt ended inside reasoning
    open_id: int  # <think>
    close_id: int  # </think>, the one that is forced
    also_close_ids: tuple[int, ...] = ()  # at most 1: the tool marker, if tools are declared


def forced_token(limit: ReasoningLimit | None, output: Sequence[int]) -> int | None:
    """The token that must come after `output` (all tokens sampled so far), or None if any may.

    Tokens sampled while reasoning is open are counted, markers that open or close it are not.
    """
    if limit is None:
        return None
    is_open, count = limit.starts_open, 0
    for token in output:
        if token == limit.close_id or token in limit.also_close_ids:
            is_open = False
        elif token == limit.open_id:
            is_open = True
        elif is_open:
            count += 1
    return limit.close_id if is_open and count >= limit.max_tokens else None


@dataclass(frozen=True, kw_only=True, eq=False)
class LaneSpec:
    """All that a lane's tokens depend on; checked and resolved (the seed is present).

    What the device does with it, for the token at position p = len(prompt) + i:

    1. forced: `forced_token(reasoning, output[:i])`, if there is one, is the token;
    2. else `sampling` in its fixed order, with `stop_ids` banned while i < min_output_tokens, and
       noise from (seed, candidate, p, vocabulary index) alone;
    3. repetition penalty looks at prompt and output, the other two at the output only.

    Logprobs are those of the model's own distribution unless `sampling.logprobs_after_sampling`.

    Raises:
        PlanError: values that no request can have after validation.
    """

    prompt: TokenIds  # [N] int32, N >= 1
    sampling: config.SamplingParams  # seed resolved
    max_output_tokens: int  # resolved: N + this <= max_ctx; 0: prefill only
    candidate: int = 0
    stop_ids: tuple[int, ...] = ()  # end the lane; the scheduler looks, the device only bans
    min_output_tokens: int = 0
    reasoning: ReasoningLimit | None = None
    speculate: bool = True  # False: no drafts for this lane
    replay: TokenIds = field(default_factory=lambda: NO_TOKENS)
    """Output tokens known from before (a parked lane that comes back without its snapshot).

    Prefill then covers `known_tokens`, sampler history starts with replay[:-1], and the token that
    the last chunk samples is replay[-1] again.
    """

    def __post_init__(self) -> None:
        if self.prompt.ndim != 1 or self.prompt.dtype != np.int32 or not len(self.prompt):
            raise PlanError(
                f"prompt is {self.prompt.dtype}{self.prompt.shape}, must be int32 [N], N >= 1"
            )
        if self.sampling.seed is None:
            raise PlanError("the seed is absent: draw one and report it before a lane is made")
        if len(self.stop_ids) > MAX_LANE_STOP_IDS:
            raise PlanError(f"{len(self.stop_ids)} stop ids, at most {MAX_LANE_STOP_IDS}")
        if self.max_output_tokens < 0 or self.candidate < 0:
            raise PlanError(f"{self.max_output_tokens=} and {self.candidate=} must not be negative")
        if len(self.replay) > self.max_output_tokens:
            raise PlanError(f"{len(self.replay)} replayed tokens, budget {self.max_output_tokens}")

    @property
    def known_tokens(self) -> TokenIds:
        """Tokens that prefill covers, [N] int32 (N + len(replay) - 1 after a replay)."""
        if not len(self.replay):
            return self.prompt
        return np.concatenate([self.prompt, self.replay[:-1]])

    @property
    def max_rows(self) -> int:
        """Positions that may ever be written: the last token of the budget is never an input."""
        return len(self.prompt) + max(0, self.max_output_tokens - 1)


@dataclass(frozen=True)
class Chunk:
    """Prefill of known tokens [start, stop) of one lane.

    `start` is a multiple of the executor's `chunk_tokens`; `stop` is the next multiple or the end
    of the known tokens. `last` chunks sample the token at position `stop`.
    """

    lane: LaneRef
    start: int
    stop: int
    last: bool


@dataclass(frozen=True)
class DecodeRow:
    """One decode turn of one lane: its last token (and drafts) in, its next token(s) out."""

    lane: LaneRef


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step: decode rows of distinct lanes, or one prefill chunk, never both, never nothing.

    `drafts` is the total number of draft tokens that the step may verify (0: plain decode).
    """

    decode: tuple[DecodeRow, ...] = ()
    chunk: Chunk | None = None
    drafts: int = 0

    @property
    def lanes(self) -> tuple[LaneRef, ...]:
        """Lanes that the step names."""
        return tuple(r.lane for r in self.decode) + ((self.chunk.lane,) if self.chunk else ())


@dataclass(frozen=True)
class TokenResult:
    """One sampled token. `logprob` in nats if asked for; `top` by falling logprob, ties by id."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaneResult:
    """What one step did for one lane.

    `tokens`: in order of position; empty for a chunk that is not the last, one per decode row,
    more with accepted drafts. `finite` is False if any logit of the lane's rows that were used was
    NaN or infinite: then `tokens` mean nothing.
    """

    lane: LaneRef
    tokens: tuple[TokenResult, ...] = ()
    finite: bool = True
    proposed: int = 0  # draft tokens made
    verified: int = 0  # draft tokens that had a row in this step
    accepted: int = 0  # leading drafts that the target agreed with


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of one step, one entry per lane of its plan, in the plan's order."""

    lanes: tuple[LaneResult, ...]
    rows: int  # real rows
    bucket: int  # rows of the compiled program, padding included
    device_s: float | None = None  # seconds the step took on the device, if known


class StepHandle(Protocol):
    """A dispatched step."""

    def done(self) -> bool:
        """Whether `result` would return without waiting."""
        ...

    def result(self) -> StepResult:
        """Wait for the step and return its results (the step's one device-to-host transfer).

        Raises:
            Exception: the device failed. Every live lane is lost; `Executor.reset` comes next.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ExecutorLimits:
    """Capacities, fixed for the life of an executor."""

    num_slots: int
    max_ctx: int  # tokens of one sequence, prompt and output together
    num_pages: int
    chunk_tokens: int  # the prefill grid
    vocab_size: int
    max_drafts: int = 0  # per lane and step


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """What the next decode step may be.

    `lacking` > 0: this many pages are missing for the next positions of the given lanes, and
    nothing was changed; a lane has to be parked first. `drafts`: draft rows worth verifying.
    """

    lacking: int = 0
    drafts: int = 0


@dataclass(frozen=True, kw_only=True)
class PageCounts:
    """Pages of the pool (the trash page not counted): free + owned == total."""

    total: int
    free: int
    owned: int


class Executor(Protocol):
    """Runs plans on a device. Called from one thread only. Usable without a server.

    Calls that name an unknown (slot, generation), or come in a state that does not allow them,
    raise `PlanError` and change nothing. `retire`, `park` and `reset` require that every step which
    names the lane has been read (`StepHandle.result` returned or raised).
    """

    @property
    def limits(self) -> ExecutorLimits:
        """Capacities."""
        ...

    def admit(self, spec: LaneSpec) -> LaneRef | None:
        """Take a slot and reserve pages for all known tokens plus one page of headroom.

        Lanes that decode are first topped up to a page of headroom, all of them or none. None: no
        slot or not enough pages now, nothing taken (top-ups stay).

        Raises:
            PlanError: the lane can never fit (`max_rows` over max_ctx or over the whole pool).
        """
        ...

    def fork(self, source: LaneRef, targets: Sequence[LaneRef], length: int) -> bool:
        """Give lanes without rows what another one has computed of the prompt that they share.

        `length`: positions that `source` has; a multiple of `chunk_tokens`, before the end of its
        prompt. Afterwards the targets are as if they had computed these chunks themselves.

        Returns: False if this executor cannot; nothing was changed.

        Raises:
            PlanError: a lane in another state, or with another prompt.
        """
        ...

    def plan_limits(self, decode: Sequence[LaneRef]) -> PlanLimits:
        """Give each of these lanes the page of its next position, all or none; then headroom."""
        ...

    def step(self, plan: StepPlan) -> StepHandle:
        """Validate and dispatch one step, without waiting for it or for any step before it.

        Raises:
            PlanError: the plan is wrong; nothing was changed.
            Exception: the device failed while dispatching.
        """
        ...

    def suspend(self, lane: LaneRef) -> None:
        """No rows for the lane until `resume`; its pages stay, its headroom is not topped up."""
        ...

    def resume(self, lane: LaneRef) -> None:
        """End of `suspend`."""
        ...

    def park(self, lane: LaneRef) -> Any | None:
        """Release slot and pages of a decoding lane.

        Returns: an opaque snapshot on the host for `restore`, or None if there was no room for one
        (the lane then comes back through `admit` with `replay`). It takes room until it is
        restored, or nobody holds it any more.
        """
        ...

    def restore(self, spec: LaneSpec, snapshot: Any) -> LaneRef | None:
        """Bring a parked lane back, decoding, in any slot. None: no slot or pages now.

        `spec` is the one that was admitted. The snapshot may be used once.
        """
        ...

    def retire(self, lane: LaneRef) -> None:
        """Free slot and pages; the slot's generation grows by one."""
        ...

    def reset(self) -> None:
        """After a failed step: forget all lanes, make the cache new. Snapshots stay valid."""
        ...

    def page_counts(self) -> PageCounts:
        """Pages now."""
        ...

    def counters(self) -> Mapping[str, float]:
        """Monotonic: at least compiles, compile_seconds, compiles_after_ready, host_syncs."""
        ...

    def memory_plan(self) -> Mapping[str, int]:
        """Planned bytes by array name (weights, caches, lane state, program temporaries)."""
        ...

    def close(self) -> None:
        """Release the device. Nothing may be called afterwards."""
        ...


def validate_plan(plan: StepPlan, limits: ExecutorLimits) -> None:
    """Checks of a plan's own form, for any executor to call first.

    Raises:
        PlanError: nothing to do, both kinds of work, a lane twice, or a chunk off the grid.
    """
    if bool(plan.decode) == (plan.chunk is not None):
        raise PlanError("a plan must hold decode rows or one chunk, and not both")
    slots = [lane.slot for lane in plan.lanes]
    if len(set(slots)) != len(slots):
        raise PlanError(f"a slot occurs twice in the plan: {sorted(slots)}")
    if not all(0 <= s < limits.num_slots for s in slots):
        raise PlanError(f"slots {sorted(slots)} must be in 0..{limits.num_slots - 1}")
    if not 0 <= plan.drafts <= limits.max_drafts * len(plan.decode):
        raise PlanError(f"{plan.drafts} drafts, at most {limits.max_drafts} per decode row")
    chunk, grid = plan.chunk, limits.chunk_tokens
    if chunk is None:
        return
    size = chunk.stop - chunk.start
    if chunk.start < 0 or chunk.start % grid or not 1 <= size <= grid:
        raise PlanError(f"chunk [{chunk.start}, {chunk.stop}) is not on the grid of {grid} tokens")
    if size < grid and not chunk.last:
        raise PlanError(
            f"chunk [{chunk.start}, {chunk.stop}) is short but not the last of its lane"
        )


def check_fork(length: int, chunk_tokens: int, known: int) -> None:
    """Checks of a fork's length, for any executor to call first.

    Raises:
        PlanError: not on the grid, or nothing left that the lane has to compute itself.
    """
    if length <= 0 or length % chunk_tokens or length >= known:
        raise PlanError(
            f"a fork at {length} must be on the grid of {chunk_tokens} tokens, before {known}"
        )
