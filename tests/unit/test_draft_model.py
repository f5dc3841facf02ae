"""A small model that drafts: the tokens stay, whatever it proposes, and nobody waits for what it has to catch up."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from coordinator.config import SchedulerSettings
from coordinator.drafters import DrafterFactory
from coordinator.drafters.first_of import first_of
from coordinator.drafters.ngram import ngram_drafter
from coordinator.driver import RingDriver
from coordinator.errors import Cancelled, InvalidSetting, ModelUnusable
from coordinator.requests import GREEDY, Finished, Request, SamplingSpec, TokenDelta
from fakering.clock import VirtualClock
from gateway.settings import RingKind, ServeSettings
from stage.attention import Numerics
from stage.config import RingConfig
from stage.draft_model import DraftModel, load_draft_model
from stage.local_ring import LocalRing
from stage.model.slice import ModelSlice, RowBatch, SliceOutput, load_slice

_VOCABULARY = 199
_WARM = SamplingSpec(temperature=0.8, seed=11)


def _prompt(n: int, length: int = 40) -> tuple[int, ...]:
    return tuple((7 + 31 * n + 13 * k * k) % _VOCABULARY for k in range(length))


# Over a real ring


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As small as can be, and random: hardly a draft of it is right."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(8)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("other")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _slice(folder: Path, layers: int, lanes: int) -> ModelSlice:
    return load_slice(
        folder,
        0,
        layers,
        lanes=lanes,
        max_rows=256,
        dtype=torch.float32,
        device=torch.device("cpu"),
        numerics=Numerics.FAST,
    )


@contextmanager
def _drafting(model: ModelSlice) -> Iterator[DraftModel]:
    drafts = DraftModel(model)
    try:
        yield drafts
    finally:
        drafts.close()


@asynccontextmanager
async def _ring(folder: Path, drafters: DrafterFactory) -> AsyncIterator[RingDriver]:
    ring = LocalRing(RingConfig(folder, "tiny", ((0, 2), (2, 4)), lanes=4, max_rows=256))
    # On a clock that stands still thinking costs nothing: else a draft model as slow as the ring's own
    # would soon be asked no more, and that is right.
    driver = RingDriver("ring", ring, SchedulerSettings(), VirtualClock(), drafters)
    await driver.start(lambda progress: None)
    try:
        yield driver
    finally:
        await driver.stop()


async def _answer(driver: RingDriver, request: Request) -> tuple[tuple[int, ...], Finished]:
    tokens: list[int] = []
    async with asyncio.timeout(60), driver.submit(request) as stream:
        async for event in stream:
            if isinstance(event, TokenDelta):
                tokens.extend(event.tokens)
            elif isinstance(event, Finished):
                return tuple(tokens), event
    raise AssertionError("the stream ended without a word")


def _turn(n: int, sampling: SamplingSpec = GREEDY, *, draft: bool = True) -> Request:
    return Request(_prompt(n), sampling, max_new_tokens=48, draft=draft, reuse=False)


_TURNS = [(n, sampling) for n in range(3) for sampling in (GREEDY, _WARM)]


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[tuple[int, ...]]:
    """What each of _TURNS gives without drafts."""
    return asyncio.run(_plain(tiny_model))


async def _plain(tiny_model: Path) -> list[tuple[int, ...]]:
    async with _ring(tiny_model, ngram_drafter) as driver:
        jobs = (_answer(driver, _turn(n, sampling, draft=False)) for n, sampling in _TURNS)
        return [tokens for tokens, _ in await asyncio.gather(*jobs)]


async def test_a_perfect_draft_model_saves_frames_and_changes_no_token(
    tiny_model: Path, plain: list[tuple[int, ...]]
) -> None:
    with _drafting(_slice(tiny_model, 4, 2)) as model:
        async with _ring(tiny_model, model.drafter) as driver:
            tokens, finished = await _answer(driver, _turn(0))
            frames = driver.status().counts.frames
    assert tokens == plain[0]
    assert finished.timings.drafted > 20
    assert finished.timings.accepted > 0.9 * finished.timings.drafted
    assert frames < 30  # 48 tokens, one a frame, and the prompt's when nothing is drafted


@pytest.mark.parametrize("own", [True, False], ids=["same_model", "another_model"])
async def test_several_jobs_at_once_get_the_tokens_of_plain_decoding(
    tiny_model: Path, other_model: Path, plain: list[tuple[int, ...]], own: bool
) -> None:
    """More jobs than the ring has lanes, and more lanes there than the draft model has."""
    slice_ = _slice(tiny_model, 4, 2) if own else _slice(other_model, 1, 2)
    with _drafting(slice_) as model:
        async with _ring(tiny_model, model.drafter) as driver:
            jobs = (_answer(driver, _turn(n, sampling)) for n, sampling in _TURNS)
            answers = await asyncio.gather(*jobs)
        assert model.idle_lanes == 2
    assert [tokens for tokens, _ in answers] == plain
    greedy = [finished.timings for _, finished in answers[::2]]
    drafted, accepted = sum(t.drafted for t in greedy), sum(t.accepted for t in greedy)
    assert drafted > 0
    assert accepted > 0.9 * drafted if own else accepted < 0.5 * drafted


async def test_prompt_lookup_goes_first_and_the_model_knows_the_rest(
    tiny_model: Path, plain: list[tuple[int, ...]]
) -> None:
    with _drafting(_slice(tiny_model, 4, 2)) as model:
        async with _ring(tiny_model, first_of(ngram_drafter, model.drafter)) as driver:
            tokens, finished = await _answer(driver, _turn(1))
    assert tokens == plain[2]
    assert finished.timings.accepted > 0


async def test_a_draft_model_that_raises_is_not_asked_again_and_fails_no_stream(
    tiny_model: Path, plain: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    model = _slice(tiny_model, 4, 2)
    calls: list[RowBatch] = []

    def forward(batch: RowBatch) -> SliceOutput:
        calls.append(batch)
        if batch.asked:
            raise ValueError("no idea")
        return ModelSlice.forward(model, batch)

    model.forward = forward
    with caplog.at_level(logging.ERROR, "stage.draft_model"), _drafting(model) as drafts:
        async with _ring(tiny_model, drafts.drafter) as driver:
            jobs = (_answer(driver, _turn(n, sampling)) for n, sampling in _TURNS)
            answers = await asyncio.gather(*jobs)
    assert [tokens for tokens, _ in answers] == plain
    assert sum(bool(batch.asked) for batch in calls) == 1
    assert [record.getMessage()[:22] for record in caplog.records] == ["the draft model failed"]


async def test_a_job_cancelled_while_its_drafts_are_thought_leaves_nothing_behind(
    tiny_model: Path, plain: list[tuple[int, ...]]
) -> None:
    model, thinking, may_go_on = _slice(tiny_model, 4, 1), threading.Event(), threading.Event()

    def forward(batch: RowBatch) -> SliceOutput:
        if batch.asked:
            thinking.set()
            may_go_on.wait(30)
        return ModelSlice.forward(model, batch)

    model.forward = forward
    with _drafting(model) as drafts:
        async with _ring(tiny_model, drafts.drafter) as driver:
            stream = driver.submit(_turn(2))
            reading = asyncio.create_task(_drain(stream))
            assert await asyncio.to_thread(thinking.wait, 30)
            stream.cancel()
            with pytest.raises(Cancelled):
                await reading
            assert drafts.idle_lanes == 1
            may_go_on.set()
            tokens, finished = await _answer(driver, _turn(0))
    assert tokens == plain[0]
    assert finished.timings.accepted > 0.9 * finished.timings.drafted > 0


async def _drain(stream: object) -> None:
    async for _ in stream:  # type: ignore[attr-defined]
        pass


# Which models may draft


def _with_tokenizer(folder: Path, words: Sequence[str]) -> Path:
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _copy(model: Path, folder: Path, **changed: int) -> Path:
    import json
    import shutil

    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def _load(folder: Path, served: Path) -> DraftModel:
    return load_draft_model(folder, served, lanes=1, max_rows=64, dtype="float32", device="cpu")


def test_only_a_model_of_the_same_vocabulary_is_loaded(other_model: Path, tmp_path: Path) -> None:
    words = ["?", *(f"w{n}" for n in range(_VOCABULARY - 1))]
    served = _with_tokenizer(_copy(other_model, tmp_path / "served"), words)
    same = _with_tokenizer(_copy(other_model, tmp_path / "same"), words)
    _load(same, served).close()
    swapped = _with_tokenizer(_copy(other_model, tmp_path / "swapped"), ["?", *words[:0:-1]])
    with pytest.raises(ModelUnusable, match="swapped cannot draft for served: its tokens have"):
        _load(swapped, served)
    larger = _with_tokenizer(_copy(other_model, tmp_path / "larger", vocab_size=256), words)
    with pytest.raises(ModelUnusable, match="larger cannot draft .* 256 tokens, not 199"):
        _load(larger, served)
    bare = _copy(other_model, tmp_path / "bare")
    with pytest.raises(ModelUnusable, match=r"no tokenizer\.json"):
        _load(bare, served)


def test_a_ring_without_a_model_takes_no_draft_model() -> None:
    with pytest.raises(InvalidSetting, match="draft_model"):
        ServeSettings(model="any", ring=RingKind.FAKE, draft_model="small")
