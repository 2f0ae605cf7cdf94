"""Whether an executor keeps the promise that a lane's bits depend on the lane alone.

A few steps on the real device, compared bit by bit: a lane alone, among others, and with tokens
prefilled that it had decoded. A device that differs is not qualified: what it answers would depend
on load. No JAX, no policy about what to do then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ds4jax.config import SamplingParams
from ds4jax.plan import (
    Chunk,
    DecodeRow,
    Executor,
    LaneRef,
    LaneSpec,
    StepPlan,
    TokenResult,
)

MAX_NEIGHBOURS = 5
_PROMPT, _OUTPUT = 5, 6
LEAST_CTX = 2 * (_PROMPT + _OUTPUT)
"""Context below which there is nothing to try."""


def difference(executor: Executor) -> str | None:
    """What depended on more than the lane, or None. All lanes must be free, and are afterwards.

    Raises:
        Exception: the device failed.
    """
    limits = executor.limits
    if limits.max_ctx < LEAST_CTX:
        return None
    prompt = (np.arange(3, 3 + _PROMPT) % limits.vocab_size).astype(np.int32)
    sampling = SamplingParams(seed=0, top_logprobs=min(5, limits.vocab_size))
    probe = LaneSpec(prompt=prompt, sampling=sampling, max_output_tokens=_OUTPUT, speculate=False)
    others = [
        replace(
            probe, prompt=np.roll(prompt, n), sampling=replace(sampling, seed=n),
            max_output_tokens=_OUTPUT + 1,
        )
        for n in range(1, min(limits.num_slots, 1 + MAX_NEIGHBOURS))
    ]  # fmt: skip
    alone = _tokens(executor, probe)
    at = _first_difference(alone, _tokens(executor, probe, others))
    if at is not None:
        return f"output token {at} is another one among {len(others)} lanes"
    known = np.array([t.token for t in alone], np.int32)
    for count in range(2, _OUTPUT, 2):
        again = _tokens(executor, replace(probe, replay=known[:count]))
        at = _first_difference(alone[count - 1 :], again)
        if at is not None:
            return f"output token {count - 1 + at} is another one if those before are prefilled"
    return None


def _first_difference(one: Sequence[TokenResult], two: Sequence[TokenResult]) -> int | None:
    pairs = zip(one, two, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def _tokens(
    executor: Executor, probe: LaneSpec, others: Sequence[LaneSpec] = ()
) -> list[TokenResult]:
    """Tokens of the probe, which moves among the other lanes from step to step."""
    mine = executor.admit(probe)
    if mine is None:
        raise RuntimeError("no lane is free: the executor is in use")
    neighbours = [ref for spec in others if (ref := executor.admit(spec)) is not None]
    for ref, spec in zip(neighbours, others, strict=False):
        _prefill(executor, ref, spec)
    if neighbours:
        _decode(executor, neighbours)
    out = list(_prefill(executor, mine, probe))
    steps = probe.max_output_tokens - max(1, len(probe.replay))
    for step in range(steps):
        place = step % (len(neighbours) + 1)
        group = [*neighbours[:place], mine, *neighbours[place:]]
        out.append(_decode(executor, group)[place])
    for ref in (mine, *neighbours):
        executor.retire(ref)
    return out


def _prefill(executor: Executor, ref: LaneRef, spec: LaneSpec) -> tuple[TokenResult, ...]:
    known, grid = len(spec.known_tokens), executor.limits.chunk_tokens
    tokens: tuple[TokenResult, ...] = ()
    for start in range(0, known, grid):
        stop = min(start + grid, known)
        plan = StepPlan(chunk=Chunk(ref, start, stop, stop == known))
        tokens = executor.step(plan).result().lanes[0].tokens
    return tokens


def _decode(executor: Executor, refs: Sequence[LaneRef]) -> list[TokenResult]:
    if executor.plan_limits(refs).lacking:
        raise RuntimeError("no page is free: the executor is in use")
    result = executor.step(StepPlan(decode=tuple(DecodeRow(ref) for ref in refs))).result()
    return [x.tokens[0] for x in result.lanes]
