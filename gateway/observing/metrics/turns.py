"""Counts turns: tokens, reuse, latencies and ends, for all fronts alike. What a figure means is in families.py.

A turn's tokens count when they come; its sizes and times when it has finished, as vLLM's do.
"""

from __future__ import annotations

from coordinator.errors import QueueFull, Shed
from coordinator.requests import FinishReason, MissKind
from gateway.observing.metrics import families
from gateway.observing.metrics.naming import Naming
from gateway.observing.observers import ABORT, TurnWatch, outcome
from gateway.turns import TurnDelta, TurnEvent, TurnFinished, TurnRequest, TurnStarted


class TurnMetrics:
    """A TurnObserver."""

    def __init__(self, naming: Naming) -> None:
        self.prompt_tokens = naming.counter(families.PROMPT_TOKENS)
        self.cached_tokens = naming.counter(families.PROMPT_TOKENS_CACHED)
        self.generated_tokens = naming.counter(families.GENERATION_TOKENS)
        self.success = naming.counters(families.REQUEST_SUCCESS)
        self.errors = naming.counters(families.REQUEST_ERRORS)
        self._shed = naming.counters(families.SHED)
        self.misses = naming.counters(families.PREFIX_MISS)
        self.first_token = naming.histogram(families.FIRST_TOKEN)
        self.inter_token = naming.histogram(families.INTER_TOKEN)
        self.per_output_token = naming.histogram(families.PER_OUTPUT_TOKEN)
        self.e2e = naming.histogram(families.E2E)
        self.queue = naming.histogram(families.QUEUE_TIME)
        self.prefill = naming.histogram(families.PREFILL_TIME)
        self.decode = naming.histogram(families.DECODE_TIME)
        self.inference = naming.histogram(families.INFERENCE_TIME)
        self.prompt_size = naming.histogram(families.REQUEST_PROMPT)
        self.computed_size = naming.histogram(families.REQUEST_COMPUTED)
        self.generated_size = naming.histogram(families.REQUEST_GENERATION)
        # From the start at 0, so that the first one is seen as an increase.
        for reason in (*FinishReason, ABORT):
            self.success[str(reason)]
        for kind in MissKind:
            self.misses[str(kind)]
        for much in Shed:
            self._shed[str(much)]

    def shed(self, reason: Shed) -> None:
        """A request was turned away, as a turn or before it was one."""
        self._shed[reason.value].inc()

    def opened(self, turn: TurnRequest, at_s: float) -> TurnWatch:
        return _CountedTurn(self, at_s)


class _CountedTurn:
    def __init__(self, metrics: TurnMetrics, opened_s: float) -> None:
        self._metrics = metrics
        self._opened_s = opened_s
        self._last_s: float | None = None  # when the last tokens came
        self._finished: TurnFinished | None = None

    def told(self, event: TurnEvent, at_s: float) -> None:
        match event:
            case TurnDelta():
                if event.token_ids:
                    self._tokens(len(event.token_ids), at_s)
            case TurnStarted():
                self._metrics.prompt_tokens.inc(event.prompt_tokens)
                self._metrics.cached_tokens.inc(event.cached_prefix)
                if event.miss is not None:
                    self._metrics.misses[event.miss.kind.value].inc()
            case TurnFinished():
                self._finished = event

    def _tokens(self, count: int, at_s: float) -> None:
        self._metrics.generated_tokens.inc(count)
        if self._last_s is None:
            self._metrics.first_token.observe(at_s - self._opened_s)
        else:
            self._metrics.inter_token.observe(at_s - self._last_s)
        self._last_s = at_s

    def ended(self, error: BaseException | None, at_s: float) -> None:
        end = outcome(self._finished, error)
        if self._finished is not None:
            self._sizes(self._finished, at_s)
        if self._finished is not None or end == ABORT:
            self._metrics.success[end].inc()
        else:
            self._metrics.errors[end].inc()
        if isinstance(error, QueueFull):
            self._metrics.shed(error.reason)

    def _sizes(self, finished: TurnFinished, at_s: float) -> None:
        metrics, usage, took = self._metrics, finished.usage, finished.timings
        metrics.e2e.observe(at_s - self._opened_s)
        metrics.queue.observe(took.queue_s)
        metrics.prefill.observe(took.prefill_s)
        metrics.decode.observe(took.decode_s)
        metrics.inference.observe(took.prefill_s + took.decode_s)
        metrics.prompt_size.observe(usage.prompt_tokens)
        metrics.computed_size.observe(usage.prompt_tokens - usage.cached_prefix)
        metrics.generated_size.observe(usage.generated_tokens)
        if usage.generated_tokens > 1:
            metrics.per_output_token.observe(took.decode_s / (usage.generated_tokens - 1))
