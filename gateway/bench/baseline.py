"""The plain baseline: transformers with a cropped cache, one process, one conversation after the other.

Runs as a process of its own (`measure_baseline` starts it), so that its threads and its memory are not the bench's.
It answers the very prompts that the ring was asked, as many tokens each, and tells times alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coordinator.errors import SetupError
from coordinator.prefixes import common_prefix
from gateway.bench.figures import median

_CODE = "from gateway.bench.baseline import main; main()"


@dataclass(frozen=True, slots=True)
class PlainTurn:
    prompt: tuple[int, ...]
    n_tokens: int


@dataclass(frozen=True, slots=True)
class PlainWork:
    """`sessions` are played for the wall time, `solo` for the times of one stream."""

    model_dir: str
    threads: int
    sessions: tuple[tuple[PlainTurn, ...], ...]
    solo: tuple[PlainTurn, ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    cold_ttft_ms: float | None
    warm_ttft_ms: float | None
    decode_tps: float | None
    wall_s: float


@dataclass(frozen=True, slots=True)
class _Times:
    ttft_ms: float
    decode_tps: float | None


async def measure_baseline(work: PlainWork) -> Baseline:
    """Raises SetupError."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _CODE,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await process.communicate(json.dumps(asdict(work)).encode())
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        said = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise SetupError(f"the baseline ended with {process.returncode}: {' '.join(said)}")
    return Baseline(**json.loads(out.decode().splitlines()[-1]))


def main() -> None:
    """The process: work on stdin, times on stdout."""
    told = json.load(sys.stdin)
    sys.stdout.write(json.dumps(asdict(run(_work(told)))) + "\n")


def _work(told: dict[str, Any]) -> PlainWork:
    sessions = tuple(_turns(session) for session in told["sessions"])
    return PlainWork(told["model_dir"], told["threads"], sessions, _turns(told["solo"]))


def _turns(told: Sequence[dict[str, Any]]) -> tuple[PlainTurn, ...]:
    return tuple(PlainTurn(tuple(turn["prompt"]), turn["n_tokens"]) for turn in told)


def run(work: PlainWork) -> Baseline:
    """Wall time first, on an empty cache, as the ring began; then the solo conversation, cold and warm."""
    plain = _Plain(Path(work.model_dir), work.threads)
    plain.answer(PlainTurn(work.solo[0].prompt[:64], 4))
    plain.forget()
    begin_s = time.perf_counter()
    for session in work.sessions:
        for turn in session:
            plain.answer(turn)
    wall_s = time.perf_counter() - begin_s
    warm = [plain.answer(turn) for turn in work.solo]
    cold = [plain.answer_cold(turn) for turn in work.solo]
    return Baseline(
        cold_ttft_ms=median(times.ttft_ms for times in cold),
        warm_ttft_ms=median(times.ttft_ms for times in warm[1:]),
        decode_tps=median(times.decode_tps for times in warm),
        wall_s=round(wall_s, 2),
    )


class _Plain:
    """One model, one DynamicCache: what a script without a server would hold."""

    def __init__(self, model_dir: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._torch = torch
        self._make_cache = DynamicCache
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.forget()

    def forget(self) -> None:
        self._cache = self._make_cache()
        self._held: tuple[int, ...] = ()

    def answer_cold(self, turn: PlainTurn) -> _Times:
        self.forget()
        return self.answer(turn)

    def answer(self, turn: PlainTurn) -> _Times:
        sent_s = time.perf_counter()
        kept = min(common_prefix(self._held, turn.prompt), len(turn.prompt) - 1)
        if not kept:
            self.forget()
        elif kept < len(self._held):
            self._cache.crop(kept - len(self._held))  # negative: how many to remove
        tokens = [self._step(turn.prompt[kept:])]
        first_s = time.perf_counter()
        while len(tokens) < turn.n_tokens:
            tokens.append(self._step(tokens[-1:]))
        decode_s = time.perf_counter() - first_s
        self._held = (*turn.prompt, *tokens[:-1])
        steps = turn.n_tokens - 1
        return _Times((first_s - sent_s) * 1e3, steps / decode_s if steps > 0 else None)

    def _step(self, tokens: Sequence[int]) -> int:
        ids = self._torch.tensor([list(tokens)])
        out = self._model(
            input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        return int(out.logits[0, -1].argmax())
