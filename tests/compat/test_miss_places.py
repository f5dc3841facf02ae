"""Where a prompt leaves what its session had: what is reused, why no more, and which place a client is told, over gRPC.

Each place is worked out here from the rendered token ids alone, and each answer is checked against the fake model's
oracle, which is what a ring gives that computes every row.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.prefixes import common_prefix
from coordinator.requests import GREEDY, Miss, MissKind, SessionId
from coordinator.router import Router
from fakering.model import FakeModel
from fakering.ring import FakeRing
from gateway.chat.byte_tokenizer import ByteTokenizer
from gateway.chat.messages import Message, Tool
from gateway.chat.tokenizer import ChatTokenizer, load_tokenizer
from gateway.client import Client
from gateway.rpc.server import serve_grpc
from gateway.service import GenerationService
from gateway.settings import GrpcSettings
from gateway.turns import ChatPrompt, Excerpt, TextPrompt, TurnDelta, TurnRequest, TurnStarted

if TYPE_CHECKING:
    from pathlib import Path

LANES = 4
STORE = 16384
BLOCK = SchedulerSettings().node_rows
LEAST = SchedulerSettings().min_copy_rows
REPLY = 24  # more than the rows of a last block that are not worth keeping
SIDE = 40  # characters of an excerpt, on each side

# In the manner of Qwen and gpt-oss: it knows tools, and reads an argument in the head and one where the answer begins.
TEMPLATE = """{% if tools or messages[0].role == 'system' %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Reasoning: {{ reasoning_effort | default('medium') }}
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if not enable_thinking | default(true) %}<think>

</think>

{% endif %}{% endif %}"""

SYSTEM = Message(
    "system",
    "You are a careful assistant who keeps to the facts, says when there are none, and never guesses what a tool "
    "could look up. The office is open from nine to five, and closed on Sundays.",
)
ASK = Message("user", "How long does it take to walk to the old mill when it rains?")
WEATHER = Tool("get_weather", "Looks it up", '{"type": "object", "properties": {"city": {}}}')
CLOCK = Tool("get_time", "Reads the clock")
FIRST = ChatPrompt((SYSTEM, ASK), (WEATHER, CLOCK))


@dataclass(frozen=True)
class House:
    client: Client
    tokenizer: ChatTokenizer
    language: FakeModel


@dataclass(frozen=True)
class Told:
    """A turn that was answered: the ids of its prompt, as the template renders it, and of its answer."""

    ids: tuple[int, ...]
    answer: tuple[int, ...]
    started: TurnStarted

    @property
    def rows(self) -> tuple[int, ...]:
        return (*self.ids, *self.answer)[:-1]


@asynccontextmanager
async def served(tokenizer: ChatTokenizer, host_rows: int = 0) -> AsyncIterator[House]:
    # Answers of single printable characters, which a client sends back just as they were.
    low, high = tokenizer.encode("!")[0], tokenizer.encode("~")[0] + 1
    language = FakeModel(tokenizer.vocab_size, quoting=0.0, low=low, high=high)
    ring = FakeRing(
        2, LANES, 2048, vocab_size=language.vocab_size, language=language, host_rows=host_rows
    )
    driver = RingDriver("ring-0", ring, SchedulerSettings(), SystemClock())
    router = Router([driver], session_limit=64)
    service = GenerationService("fake", router, tokenizer, SystemClock(), random.Random(1))
    await driver.start(lambda _: None)
    try:
        async with (
            serve_grpc(service, GrpcSettings(drain_s=0.0)) as address,
            Client(address) as client,
        ):
            yield House(client, tokenizer, language)
    finally:
        await driver.stop()


@pytest.fixture(scope="module")
def templated(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """The built-in model's tokens with a template that reads arguments."""
    from transformers import AutoTokenizer

    raw: Any = AutoTokenizer.from_pretrained(str(smollm2_dir), local_files_only=True)
    raw.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("templated")
    raw.save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.fixture(params=["bytes", "templated"])
def tokenizer(request: pytest.FixtureRequest) -> ChatTokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    made: ChatTokenizer = request.getfixturevalue("templated")
    return made


def turn_of(prompt: ChatPrompt | TextPrompt, session: str) -> TurnRequest:
    return TurnRequest(
        prompt, session=SessionId(session), sampling=GREEDY, max_tokens=REPLY, draft=False
    )


async def told(house: House, prompt: ChatPrompt, session: str = "a") -> Told:
    async with house.client.generate(turn_of(prompt, session)) as stream:
        started, *events = [event async for event in stream]
    assert isinstance(started, TurnStarted)
    said = [event.token_ids for event in events if isinstance(event, TurnDelta)]
    ids = house.tokenizer.render(prompt.messages, prompt.tools, prompt.template_args).token_ids
    return Told(ids, tuple(token for part in said for token in part), started)


async def flood(house: House) -> None:
    """Other conversations in every lane: what the first ones left there is in the store alone."""
    for number in range(2 * LANES):
        text = TextPrompt(f"{number} is another conversation. " * 4)
        async with house.client.generate(turn_of(text, f"flood{number}")) as stream:
            _ = [event async for event in stream]


def going_on(house: House, first: Told) -> ChatPrompt:
    """What the client sends next."""
    said = Message("assistant", house.tokenizer.decode(first.answer))
    return replace(FIRST, messages=(*FIRST.messages, said, Message("user", "And by bicycle?")))


Edit = Callable[[ChatPrompt], ChatPrompt]


def tools(*changed: Tool) -> Edit:
    return lambda prompt: replace(prompt, tools=changed)


def args(**changed: object) -> Edit:
    return lambda prompt: replace(prompt, template_args=changed)


def said(index: int, old: str, new: str) -> Edit:
    def edit(prompt: ChatPrompt) -> ChatPrompt:
        messages = list(prompt.messages)
        content = messages[index].content
        assert content is not None
        assert content.count(old) == 1
        messages[index] = replace(messages[index], content=content.replace(old, new))
        return replace(prompt, messages=tuple(messages))

    return edit


def answered_otherwise(prompt: ChatPrompt) -> ChatPrompt:
    answer = prompt.messages[2].content
    assert answer is not None
    return said(2, answer, f"{answer[:10]}\N{WHITE SMILING FACE}{answer[11:]}")(prompt)


@dataclass(frozen=True)
class Change:
    edit: Edit
    message_index: int
    reads: str  # at the place, from the first token that differs or from a few before it
    is_retry: bool = False  # of the first turn, rather than the next one


CHANGES: Mapping[str, Change] = {
    "a tool's description": Change(
        tools(replace(WEATHER, description="Tells it"), CLOCK), 0, "Tells it"
    ),
    "a tool's parameter": Change(
        tools(replace(WEATHER, parameters='{"type": "object", "properties": {"town": {}}}'), CLOCK),
        0,
        "town",
    ),
    "the last tool's name": Change(tools(WEATHER, replace(CLOCK, name="get_date")), 0, "get_date"),
    "a tool more": Change(tools(WEATHER, CLOCK, Tool("get_road")), 0, '{"type": "function"'),
    "a tool less": Change(tools(WEATHER), 0, "}}}}"),
    "the tools' order": Change(tools(CLOCK, WEATHER), 0, "get_time"),
    "a character of the system prompt": Change(said(0, "guesses", "guessed"), 0, "guessed"),
    "the system prompt's last character": Change(said(0, "Sundays.", "Sundays!"), 0, "Sundays!"),
    "a word of the question": Change(said(1, "rains", "snows"), 1, "snows"),
    "a character of the answer": Change(answered_otherwise, 2, "\N{WHITE SMILING FACE}"),
}
# The plain template of bytes reads none.
ARGUMENTS: Mapping[str, Change] = {
    "an argument in the head": Change(args(reasoning_effort="low"), 0, "Reasoning: low"),
    # Behind the client's messages: the place is the answer's, which would be the next one.
    "an argument where the answer begins": Change(
        args(enable_thinking=False), 2, "<think>", is_retry=True
    ),
}


async def changed_turn(house: House, change: Change, *, from_store: bool) -> tuple[Told, Told]:
    first = await told(house, FIRST)
    if from_store:
        await flood(house)
    prompt = FIRST if change.is_retry else going_on(house, first)
    return first, await told(house, change.edit(prompt))


def check_place(house: House, first: Told, turn: Told, change: Change) -> None:
    shared = common_prefix(first.rows, turn.ids)
    assert LEAST < shared < len(turn.ids) - 1, "the rule that one token is computed takes nothing"
    started, decode = turn.started, house.tokenizer.decode
    assert started.prompt_tokens == len(turn.ids)
    assert started.cached_prefix == shared
    assert started.miss == Miss(MissKind.DIVERGED, shared, change.message_index)
    before = decode(turn.ids[:shared], skip_special=False)[-SIDE:]
    after = decode(turn.ids[shared:], skip_special=False)[:SIDE]
    assert started.excerpt == Excerpt(before, after)
    assert change.reads in before + after
    assert after != decode(first.rows[shared:], skip_special=False)[:SIDE]
    assert turn.answer == house.language.oracle(turn.ids, REPLY)


@pytest.mark.parametrize("from_store", [False, True], ids=["lane", "store"])
@pytest.mark.parametrize("name", CHANGES)
async def test_one_change_is_a_miss_at_its_place(
    tokenizer: ChatTokenizer, name: str, from_store: bool
) -> None:
    async with served(tokenizer, STORE) as house:
        first, turn = await changed_turn(house, CHANGES[name], from_store=from_store)
        (ring,) = await house.client.rings()
    check_place(house, first, turn, CHANGES[name])
    assert (ring.counts.restored_rows >= turn.started.cached_prefix) == from_store


@pytest.mark.parametrize("from_store", [False, True], ids=["lane", "store"])
@pytest.mark.parametrize("name", ARGUMENTS)
async def test_a_changed_argument_is_a_miss_where_the_template_reads_it(
    templated: ChatTokenizer, name: str, from_store: bool
) -> None:
    async with served(templated, STORE) as house:
        first, turn = await changed_turn(house, ARGUMENTS[name], from_store=from_store)
    check_place(house, first, turn, ARGUMENTS[name])


@pytest.mark.parametrize("from_store", [False, True], ids=["lane", "store"])
async def test_without_a_change_nothing_is_missed(
    tokenizer: ChatTokenizer, from_store: bool
) -> None:
    """The control: whatever the tests above see is the change's doing."""
    async with served(tokenizer, STORE) as house:
        first = await told(house, FIRST)
        if from_store:
            await flood(house)
        turn = await told(house, going_on(house, first))
    kept = len(first.rows) % BLOCK
    lost = kept if from_store and kept < LEAST else 0
    assert turn.started.cached_prefix == len(first.rows) - lost
    assert (turn.started.miss is None) == (lost == 0)


async def test_an_argument_that_only_opens_the_answer_costs_the_next_turn_nothing(
    templated: ChatTokenizer,
) -> None:
    async with served(templated) as house:
        first = await told(house, FIRST)
        turn = await told(house, args(enable_thinking=False)(going_on(house, first)))
    assert (turn.started.cached_prefix, turn.started.miss) == (len(first.rows), None)


@pytest.mark.parametrize("from_store", [False, True], ids=["lane", "store"])
@pytest.mark.parametrize("session", ["a", "b"])
async def test_the_same_tools_after_another_system_prompt_are_computed_anew(
    tokenizer: ChatTokenizer, session: str, from_store: bool
) -> None:
    """The trap: the tools' text is the same at the same rows, but the rows depend on all tokens before them."""
    other = said(0, "to five", "to four")(FIRST)
    async with served(tokenizer, STORE) as house:
        first = await told(house, FIRST)
        if from_store:
            await flood(house)
        turn = await told(house, other, session)
        back = await told(house, FIRST, session)
        nodes = [node async for node in house.client.nodes() if node.pinned]
    shared = common_prefix(first.ids, turn.ids)
    head = tokenizer.render(FIRST.messages, FIRST.tools).anchor
    assert len(first.ids) == len(turn.ids)
    assert first.ids[shared + 4 :] == turn.ids[shared + 4 :], "all but one word is the same"
    assert head - shared > BLOCK
    assert turn.started.cached_prefix == shared
    kind = MissKind.DIVERGED if session == "a" else MissKind.NEW_SESSION
    assert turn.started.miss is not None
    assert turn.started.miss.kind is kind
    for one in (first, turn, back):
        assert one.answer == house.language.oracle(one.ids, REPLY)
    # Both heads are kept beside one another, and share the blocks before the change alone.
    assert back.started.cached_prefix >= head
    blocks = range(0, head, BLOCK)
    assert sorted(node.start for node in nodes) == sorted(
        (*blocks, *(start for start in blocks if start + BLOCK > shared))
    )
