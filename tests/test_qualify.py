"""The check at start that a lane's bits depend on the lane alone: it must find what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds4jax import qualify
from ds4jax.plan import LaneResult, StepPlan, StepResult, TokenResult
from tests.fake_executor import FakeExecutor, FakeHandle


class Wrong(FakeExecutor):
    """Logprobs that depend on something else than their lane."""

    def __init__(self, what: str, **kwargs: int) -> None:
        super().__init__(**kwargs)
        self.what = what

    def step(self, plan: StepPlan) -> FakeHandle:
        handle = super().step(plan)
        result = handle._result
        lanes = tuple(self._spoil(plan, i, x) for i, x in enumerate(result.lanes))
        handle._result = StepResult(lanes=lanes, rows=result.rows, bucket=result.bucket)
        return handle

    def _spoil(self, plan: StepPlan, place: int, lane: LaneResult) -> LaneResult:
        wrong = {
            "number of lanes": len(plan.decode) > 3,
            "place": place == 2,
            "chunk": plan.chunk is not None and plan.chunk.stop > 5,
        }[self.what]
        if not wrong:
            return lane
        tokens = tuple(TokenResult(t.token, (t.logprob or 0) - 1e-7, t.top) for t in lane.tokens)
        return replace(lane, tokens=tokens)


@pytest.mark.parametrize("kwargs", [
    {}, {"num_slots": 1}, {"num_slots": 64}, {"max_ctx": 22, "chunk_tokens": 8}, {"max_ctx": 8},
    {"num_pages": 3},
])  # fmt: skip
def test_what_is_exact_is_qualified(kwargs: dict[str, int]) -> None:
    executor = FakeExecutor(**kwargs)  # type: ignore[arg-type]
    assert qualify.difference(executor) is None
    assert not executor.lanes and executor.pages.free == executor.limits.num_pages


@pytest.mark.parametrize(("what", "says"), [
    ("number of lanes", "among 5 lanes"), ("place", "among 5 lanes"), ("chunk", "prefilled"),
])  # fmt: skip
def test_a_difference_in_the_last_bits_is_found(what: str, says: str) -> None:
    found = qualify.difference(Wrong(what))
    assert found is not None and says in found
