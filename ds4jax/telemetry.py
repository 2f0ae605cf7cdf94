"""What the scheduler tells about itself: slot states, totals, step records, and a view of now.

Plain data, written by the engine thread and read by metrics, `top` and benchmarks. No policy.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ds4jax.plan import PageCounts, StepPlan, StepResult


class SlotState(enum.Enum):
    """State of a lane (serving.md 5.1); WAITING is before it has a slot."""

    WAITING = "waiting"
    RESERVED = "reserved"
    PREFILL = "prefill"
    DECODE = "decode"
    SUSPENDED = "suspended"
    PARKED = "parked"
    RETIRING = "retiring"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One finished step, for metrics and profiles. Times in seconds."""

    phase: str  # "prefill" or "decode"
    rows: int
    bucket: int
    lanes: int
    seconds: float  # from the later of dispatch and the previous step's end, to its end
    wait: float  # of that, waiting in `result`
    drafts: int


@dataclass
class Counters:
    """Totals since start; read by metrics, written by the engine thread."""

    steps: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    rows_real: int = 0
    rows_padded: int = 0
    by_bucket: dict[tuple[str, int], int] = field(default_factory=dict)  # steps by phase and rows
    prefill_tokens: int = 0
    forked_tokens: int = 0  # of prompts, given from one candidate to others
    output_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    wait_seconds: float = 0.0
    dispatch_seconds: float = 0.0  # in Executor.step
    host_seconds: float = 0.0  # the rest of the turns that did a step
    host_cpu_seconds: float = 0.0  # the engine thread's part: without waits for a core
    dropped_results: int = 0
    preemptions: int = 0
    suspensions: int = 0
    requests: int = 0
    cancelled: dict[str, int] = field(default_factory=dict)
    slow_clients: int = 0
    non_finite: int = 0
    watchdog: int = 0
    device_errors: int = 0
    self_tests: int = 0
    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    spec_steps: int = 0
    verified_at: dict[int, int] = field(default_factory=dict)
    accepted_at: dict[int, int] = field(default_factory=dict)

    def add_step(
        self, plan: StepPlan, result: StepResult, seconds: float, wait: float
    ) -> StepRecord:
        """Count one finished step; returns its record."""
        chunk = plan.chunk
        self.steps += 1
        self.rows_real += result.rows
        self.rows_padded += result.bucket - result.rows
        self.wait_seconds += wait
        place = ("decode" if chunk is None else "prefill", result.bucket)
        self.by_bucket[place] = self.by_bucket.get(place, 0) + 1
        if chunk is not None:
            self.prefill_steps += 1
            self.prefill_tokens += chunk.stop - chunk.start
            self.prefill_seconds += seconds
        else:
            self.decode_steps += 1
            self.decode_seconds += seconds
        for lane in result.lanes:
            self.proposed += lane.proposed
            self.verified += lane.verified
            self.accepted += lane.accepted
            self.spec_steps += lane.verified > 0
            for depth in range(lane.verified):
                self.verified_at[depth] = self.verified_at.get(depth, 0) + 1
            for depth in range(lane.accepted):
                self.accepted_at[depth] = self.accepted_at.get(depth, 0) + 1
        return StepRecord(
            phase="prefill" if chunk is not None else "decode",
            rows=result.rows,
            bucket=result.bucket,
            lanes=len(plan.lanes),
            seconds=seconds,
            wait=wait,
            drafts=sum(x.verified for x in result.lanes),
        )


@dataclass(frozen=True, kw_only=True)
class LaneView:
    """One lane as an operator sees it."""

    request_id: str
    candidate: int
    slot: int | None
    state: SlotState
    prompt_tokens: int
    prefilled_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of the scheduler at one moment."""

    at: float
    healthy: bool
    draining: bool
    waiting: int
    lanes: tuple[LaneView, ...]
    pages: PageCounts
    num_slots: int
    output_tokens: int
    steps: int
    last_decode_seconds: float
    last_prefill_seconds: float

    @property
    def parked(self) -> int:
        """Lanes whose pages are released."""
        return sum(lane.state is SlotState.PARKED for lane in self.lanes)
