"""The benches on fake rings: what they report is what the log says, and a wrong token is not passed over."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from gateway.bench.endpoints import Answered, Ask, GrpcEndpoint
from gateway.bench.multiturn import measure
from gateway.bench.multiturn_command import MultiturnOptions, Target, run_multiturn
from gateway.bench.multiturn_report import plain_work, report
from gateway.bench.pipeline import Pipeline, PipelinePrompts, PipelineSizes
from gateway.bench.watch import Watch, watching
from gateway.bench.workload import Load
from gateway.cli.app import app
from gateway.client import Client
from gateway.launch import launch
from gateway.progress import SilentBoard
from gateway.settings import RingKind, ServeSettings

_FAKE = ServeSettings(model="fake", ring=RingKind.FAKE, max_rows=16_000)
_LOAD = Load(sessions=1, turns=2, answer_tokens=4)


async def test_a_session_alone_reuses_exactly_what_the_log_says() -> None:
    options = MultiturnOptions(_LOAD, Target(), baseline=False, plot=None)
    found = await run_multiturn(_FAKE, options, SilentBoard())
    told = found.report
    assert told.wrong_turns == 0
    assert told.reused_tokens == told.reusable_tokens
    assert told.turns[1].reused_tokens > 0.9 * told.turns[1].prompt_tokens
    assert told.prefilled_tokens == told.prompt_tokens - told.reused_tokens
    # The control is as long as the solo session's last prompt and shares no more than the template's first word.
    control, last = found.measured.controls[0], found.measured.solo[-1]
    assert abs(control.prompt_tokens - last.prompt_tokens) < 0.02 * last.prompt_tokens
    assert control.cached_tokens < 32
    assert found.samples[-1].prefilled_rows > 0
    work = plain_work(found.measured, "folder", 2)
    assert [len(turn.prompt) for turn in work.solo] == [
        t.prompt_tokens for t in found.measured.solo
    ]


class _Forgetful:
    """An endpoint that gives another last token whenever rows were reused."""

    tells_tokens = True

    def __init__(self, inner: GrpcEndpoint) -> None:
        self._inner = inner

    async def play(self, ask: Ask) -> Answered:
        answer = await self._inner.play(ask)
        if not answer.cached_tokens:
            return answer
        return replace(answer, tokens=(*answer.tokens[:-1], answer.tokens[-1] + 1))


async def test_a_turn_that_differs_from_its_cold_run_is_counted() -> None:
    async with (
        launch(_FAKE, SilentBoard()) as running,
        Client(running.grpc_address) as client,
    ):
        endpoint = _Forgetful(GrpcEndpoint(client, running.tokenizer))
        measured = await measure(endpoint, _LOAD, lanes=2, tell=lambda _: None)
    reused = [turn for turn in (*measured.turns, *measured.solo) if turn.cached_tokens]
    assert report(measured, None).wrong_turns == len(reused) > 0


async def test_the_pipeline_bench_measures_pairs_and_finds_no_wrong_token() -> None:
    one, ring = replace(_FAKE, stages=1, lanes=1, max_rows=600), replace(_FAKE, max_rows=600)
    prompts = PipelinePrompts(
        lanes=tuple((40 + n, 50, 60) for n in range(4)),
        long=tuple(33 + n * 7 % 90 for n in range(300)),
        quoting=(70, 71, 72) * 4,
        fixed=((80, 81), (82, 83)),
    )
    sizes = PipelineSizes(decode_tokens=8, quote_tokens=8, fixed_tokens=4, repeats=1, doubtful=0.0)
    watch = Watch()
    async with (
        launch(one, SilentBoard()) as left,
        launch(ring, SilentBoard()) as right,
        Client(left.grpc_address) as left_client,
        Client(right.grpc_address) as right_client,
        watching(right_client, watch),
    ):
        pipeline = Pipeline(
            GrpcEndpoint(left_client, left.tokenizer),
            GrpcEndpoint(right_client, right.tokenizer),
            prompts,
            sizes,
        )
        decoding = await pipeline.decoding()
        pairs = [await pipeline.prefilling(), await pipeline.quoting()]
        pairs += await pipeline.fixed(lambda _: None)
        async with asyncio.timeout(20):
            stretch = await pipeline.stretch()
    assert min(decoding.one_tps, decoding.ring_tps, stretch.alone_p50_ms) > 0
    assert len(pairs) == 4
    assert all(pair.plain > 0 and pair.other > 0 for pair in pairs)
    assert pipeline.book.wrong_tokens == 0
    assert len(watch.samples[-1].busy_s) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("multiturn", "--sessions", "0"),
        ("multiturn", "--address", "127.0.0.1:1", "--openai", "http://127.0.0.1:1"),
        ("multiturn", "--openai", "http://127.0.0.1:1", "--baseline"),
        ("pipeline", "--repeats", "0"),
    ],
)
def test_an_impossible_bench_is_bad_usage(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments, "--ring", "fake"])
    assert result.exit_code == 2
    assert result.output.startswith("error: ")


def test_the_last_line_of_a_bench_is_one_object() -> None:
    flags = ("--sessions", "1", "--turns", "1", "--answer-tokens", "2", "--max-rows", "16000")
    result = CliRunner().invoke(app, ["bench", "multiturn", "--ring", "fake", *flags, "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.strip().splitlines()[-1])
    assert (told["wrong_turns"], len(told["turns"]), told["baseline"]) == (0, 1, None)
