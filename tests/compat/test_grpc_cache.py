"""What an operator sees of the rows that are kept and lets stay, and what a client is told of a miss."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from typer.testing import CliRunner

from coordinator.requests import MissKind, SamplingSpec, SessionId
from gateway.chat.byte_tokenizer import ByteTokenizer
from gateway.chat.messages import Message, Tool
from gateway.cli.app import app
from gateway.client import Client, error_info
from gateway.launch import launch
from gateway.pb import generation_pb2 as pb
from gateway.progress import LineBoard
from gateway.rpc.convert import MISS_REASONS
from gateway.settings import RingKind, ServeSettings
from gateway.turns import ChatPrompt, Prompt, TextPrompt, TokenPrompt, TurnRequest, TurnStarted

if TYPE_CHECKING:
    from pathlib import Path

Sites = Callable[..., AbstractAsyncContextManager[Any]]
STORE = 4096
TEXT = "The same hundred words again and again. " * 8
SYSTEM = Message("system", "You are terse, and you never say more than is asked. " * 4)
TOOL = Tool("get_weather", "Looks it up")
UNKNOWN = "ab" * 16


async def started(client: Client, prompt: Prompt, session: str | None = None) -> TurnStarted:
    turn = TurnRequest(
        prompt,
        session=None if session is None else SessionId(session),
        sampling=SamplingSpec(temperature=0.0),
        max_tokens=4,
        ignore_eos=True,
    )
    async with client.generate(turn) as stream:
        first, *_ = [event async for event in stream]
    assert isinstance(first, TurnStarted)
    return first


async def nodes_of(client: Client) -> list[pb.Node]:
    return [node async for node in client.nodes()]


async def kept(client: Client, rows: int) -> list[pb.Node]:
    """The nodes, once there are so many rows of them: they are stored when the ring has nothing else to do."""
    async with asyncio.timeout(5):
        while True:
            nodes = await nodes_of(client)
            if sum(node.end - node.start for node in nodes) >= rows:
                return nodes


async def refused(call: Any) -> tuple[str, str]:
    """The status and the field at fault."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    info = error_info(error.value)
    return error.value.code().name, "" if info is None else info.metadata.get("field", "")


async def test_the_nodes_of_a_turn_are_listed_as_a_chain(site: Sites) -> None:
    async with site(host_rows=STORE) as it:
        turn = await started(it.client, TextPrompt(TEXT))
        nodes = await kept(it.client, turn.prompt_tokens)
        (ring,) = await it.client.rings()
    assert [node.start for node in nodes] == [0, *(node.end for node in nodes[:-1])]
    assert [node.parent_id for node in nodes[1:]] == [node.id for node in nodes[:-1]]
    assert {(node.ring, node.pinned, len(node.id)) for node in nodes} == {("ring-0", False, 32)}
    assert (ring.host_rows, ring.stored_rows) == (STORE, nodes[-1].end)
    assert ring.pinned_rows == 0


async def test_pages_are_bounded_and_show_each_node_once(site: Sites) -> None:
    async with site(host_rows=STORE) as it:
        turn = await started(it.client, TextPrompt(TEXT))
        whole = await kept(it.client, turn.prompt_tokens)
        shown: list[pb.Node] = []
        request = pb.ListNodesRequest(page_size=2)
        while True:
            page = await it.stub.ListNodes(request)
            assert 1 <= len(page.nodes) <= 2
            shown += page.nodes
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        assert shown == whole
        assert len(whole) > 4
        # What was dropped meanwhile is neither shown nor in the way.
        page = await it.stub.ListNodes(pb.ListNodesRequest(page_size=2))
        assert await it.client.drop_node(whole[1].id)
        request = pb.ListNodesRequest(page_size=2, page_token=page.next_page_token)
        page = await it.stub.ListNodes(request)
        assert (list(page.nodes), page.next_page_token) == ([], "")
        assert await nodes_of(it.client) == whole[:1]


async def test_a_system_prompt_with_tools_is_pinned_by_itself(site: Sites) -> None:
    async with site(host_rows=STORE) as it:
        chat = ChatPrompt((SYSTEM, Message("user", "Hello")), (TOOL,))
        head = ByteTokenizer().render(chat.messages, chat.tools).anchor
        turn = await started(it.client, chat, "a")
        await kept(it.client, turn.prompt_tokens)
        async with asyncio.timeout(5):
            while not (await it.client.rings())[0].pinned_rows:
                pass
        nodes = await nodes_of(it.client)
        (ring,) = await it.client.rings()
        assert max(node.end for node in nodes if node.pinned) >= head
        assert ring.pinned_rows == sum(node.end - node.start for node in nodes if node.pinned)
        other = ChatPrompt((SYSTEM, Message("user", "Something else")), (TOOL,))
        assert (await started(it.client, other, "b")).cached_prefix >= head


async def test_what_an_operator_pins_stays_until_it_is_dropped(site: Sites) -> None:
    prompt = TextPrompt(TEXT[:200])
    async with site(host_rows=1024) as it:
        await started(it.client, TextPrompt(TEXT))
        pinned = await it.client.pin_prefix(prompt)
        assert (pinned.tokens, list(pinned.rings)) == (200, ["ring-0"])
        async with asyncio.timeout(5):
            while (await it.client.rings())[0].pinned_rows < 200:
                pass
        for other in range(12):  # three times what the lanes hold, and more than the store does
            await started(it.client, TextPrompt(f"{other}" + TEXT))
        left = [node for node in await nodes_of(it.client) if node.pinned]
        assert max(node.end for node in left) >= 200
        assert (await started(it.client, TextPrompt(TEXT))).cached_prefix >= 200
        assert await it.client.drop_node(left[0].id)
        assert not any(node.pinned for node in await nodes_of(it.client))
        assert not await it.client.drop_node(left[0].id)


async def test_a_chat_of_system_and_tools_pins_what_all_such_chats_begin_with(site: Sites) -> None:
    chat = ChatPrompt((SYSTEM, Message("user", "Hello")), (TOOL,))
    rendered = ByteTokenizer().render(chat.messages, chat.tools)
    async with site(host_rows=2 * STORE) as it:
        await started(it.client, chat)
        pinned = await it.client.pin_prefix(ChatPrompt((SYSTEM,), (TOOL,)))
        assert pinned.tokens == rendered.anchor
        whole = await it.client.pin_prefix(chat)
        assert whole.tokens == rendered.boundaries[-1]
        alone = it.client.pin_prefix(ChatPrompt((), (TOOL,)))
        assert await refused(alone) == ("INVALID_ARGUMENT", "prompt")  # nobody computed that


def pin(**fields: Any) -> pb.PinPrefixRequest:
    return pb.PinPrefixRequest(**fields)


BAD_CALLS = {
    "no hexadecimal": ("DropNode", pb.DropNodeRequest(id="xyz"), "id"),
    "no id": ("DropNode", pb.DropNodeRequest(), "id"),
    "half an id": ("DropNode", pb.DropNodeRequest(id=UNKNOWN[:16]), "id"),
    "a page of less than none": ("ListNodes", pb.ListNodesRequest(page_size=-1), "page_size"),
    "a page of millions": ("ListNodes", pb.ListNodesRequest(page_size=10**7), "page_size"),
    "no such ring": ("ListNodes", pb.ListNodesRequest(ring="ring-9"), "ring"),
    "a page that never was": ("ListNodes", pb.ListNodesRequest(page_token="next"), "page_token"),
    "no prompt": ("PinPrefix", pin(), "prompt"),
    "an empty prompt": ("PinPrefix", pin(text=""), "prompt"),
    "a prompt that nobody sent": ("PinPrefix", pin(text="something else"), "prompt"),
    "no such token": ("PinPrefix", pin(token_ids=pb.TokenIds(ids=[1, 300])), "token_ids.ids"),
    "an empty chat": ("PinPrefix", pin(chat=pb.Chat()), "chat.messages"),
    "more than may be pinned": ("PinPrefix", pin(text="x" * 1500), "prompt"),
}


async def test_each_bad_call_names_its_field(site: Sites) -> None:
    async with site(host_rows=STORE) as it:
        await started(it.client, TextPrompt("x" * 1500))
        for name, (method, request, field) in BAD_CALLS.items():
            got = await refused(getattr(it.stub, method)(request))
            assert got == ("INVALID_ARGUMENT", field), name
        missing = it.stub.PinPrefix(pin(text="x", model="other"))
        assert (await refused(missing))[0] == "NOT_FOUND"
        assert not await it.client.drop_node(UNKNOWN)
        assert (await it.client.pin_prefix(TextPrompt("x" * 100))).tokens == 100


async def test_nothing_is_pinned_where_nothing_is_kept(site: Sites) -> None:
    async with site() as it:
        await started(it.client, TextPrompt(TEXT))
        assert await refused(it.client.pin_prefix(TextPrompt(TEXT))) == (
            "INVALID_ARGUMENT",
            "prompt",
        )
        assert await nodes_of(it.client) == []


async def test_while_every_ring_loads_or_drains_a_pin_is_unavailable(site: Sites) -> None:
    async with site(start=False) as it:
        assert await nodes_of(it.client) == []
        assert not await it.client.drop_node(UNKNOWN)
        assert (await refused(it.client.pin_prefix(TextPrompt("x"))))[0] == "UNAVAILABLE"
    async with site(host_rows=STORE) as it:
        await started(it.client, TextPrompt(TEXT))
        it.driver.drain()
        assert (await refused(it.client.pin_prefix(TextPrompt(TEXT))))[0] == "UNAVAILABLE"


async def test_a_diverged_prompt_is_told_where_and_with_which_words_of_its_own(site: Sites) -> None:
    said = "The red fox jumps over the lazy dog. "
    before, after = said * 4 + "A blue ", " car drives by. " + said * 4
    async with site() as it:
        talk = (SYSTEM, Message("user", f"{before}secret{after}"))
        await started(it.client, ChatPrompt(talk), "a")
        edited = (SYSTEM, Message("user", f"{before}yellow{after}"))
        turn = await started(it.client, ChatPrompt(edited), "a")
        (ring,) = await it.client.rings()
    assert turn.miss is not None
    assert turn.excerpt is not None
    assert (turn.miss.kind, turn.miss.message_index) == (MissKind.DIVERGED, 1)
    assert turn.miss.token_index == turn.cached_prefix
    assert turn.excerpt.before == before[-40:]
    assert turn.excerpt.after == f"yellow{after}"[:40]
    counted = {count.reason: count.turns for count in ring.counts.misses}
    assert counted == {
        MISS_REASONS[MissKind.NEW_SESSION]: 1,
        MISS_REASONS[MissKind.DIVERGED]: 1,
    }


async def test_tools_that_became_a_message_are_none_of_the_clients(site: Sites) -> None:
    ask, changed = Message("user", "Hello there. " * 4), Message("user", "Hello here. " * 4)
    async with site() as it:
        await started(it.client, ChatPrompt((ask,), (TOOL,)), "a")
        turn = await started(it.client, ChatPrompt((changed,), (TOOL,)), "a")
        assert turn.miss is not None
        assert turn.miss.message_index == 0
        other = await started(it.client, ChatPrompt((changed,), (Tool("get_time"),)), "a")
    assert other.miss is not None
    assert (other.miss.kind, other.miss.message_index) == (MissKind.DIVERGED, None)
    assert other.excerpt is not None
    assert other.excerpt.after.startswith("time")


async def test_half_a_character_is_told_whole(site: Sites) -> None:
    async with site() as it:
        await started(it.client, TextPrompt("a" * 60 + "é" + "b" * 60), "a")
        turn = await started(it.client, TextPrompt("a" * 60 + "è" + "b" * 60), "a")
        assert turn.excerpt is not None
        assert (turn.excerpt.before, turn.excerpt.after[:2]) == ("a" * 40, "èb")
        ids = TokenPrompt(tuple(b"a" * 20))
        short = await started(it.client, ids, "a")
        assert short.excerpt is None  # it is what the session began with


async def test_rows_that_come_back_are_counted(site: Sites) -> None:
    async with site(host_rows=STORE) as it:
        first = await started(it.client, TextPrompt(TEXT), "a")
        await kept(it.client, first.prompt_tokens)
        for other in range(8):
            await started(it.client, TextPrompt(f"{other}" * 400), f"b{other}")
        turn = await started(it.client, TextPrompt(TEXT), "a")
        (ring,) = await it.client.rings()
    assert turn.cached_prefix == turn.prompt_tokens - 1
    assert ring.counts.restored_rows >= turn.cached_prefix
    assert ring.counts.reused_rows >= ring.counts.restored_rows


async def test_an_operator_lists_pins_and_drops_on_the_command_line(tmp_path: Path) -> None:
    fake = ServeSettings("fake", RingKind.FAKE, kv_host_bytes=16 * STORE)
    chat = tmp_path / "chat.json"
    tool = {"type": "function", "function": {"name": "get_weather", "description": "Looks it up"}}
    system = {"role": "system", "content": SYSTEM.content}
    chat.write_text(json.dumps({"messages": [system], "tools": [tool]}))
    prompt = ChatPrompt((SYSTEM, Message("user", "Hello")), (TOOL,))
    head = ByteTokenizer().render(prompt.messages, prompt.tools).anchor
    async with (
        launch(fake, LineBoard(lambda _: None)) as running,
        Client(running.grpc_address) as client,
    ):

        async def ringserve(*arguments: str) -> tuple[int, str]:
            told = [*arguments, "--address", running.grpc_address]
            result = await asyncio.to_thread(CliRunner().invoke, app, told)
            return result.exit_code, result.output

        turn = await started(client, prompt, "a")
        await kept(client, turn.prompt_tokens)
        got = await ringserve("cache", "pin", "--chat", str(chat))
        assert got == (0, f"pinned {head} tokens on ring-0\n")
        code, told = await ringserve("cache", "ls", "--json")
        nodes = json.loads(told)["nodes"]
        assert (code, nodes[0]["start"], nodes[0]["pinned"]) == (0, 0, True)
        code, told = await ringserve("cache", "ls", "--ring", "ring-0")
        assert told.startswith(f"ring-0 {nodes[0]['id']} rows 0 to 64, pinned\n")
        assert told.splitlines()[-1].startswith(f"{len(nodes)} nodes, ")
        _, told = await ringserve("rings", "ls", "--json")
        (ring,) = json.loads(told)["rings"]
        assert (ring["host_rows"], ring["misses"]) == (STORE, {"new_session": 1})
        _, told = await ringserve("rings", "ls")
        assert f" of {STORE} rows stored (" in told
        assert told.endswith("misses: 1 new_session\n")
        drop = await ringserve("cache", "drop", nodes[0]["id"])
        assert drop == (0, f"dropped {nodes[0]['id']}\n")
        code, told = await ringserve("cache", "drop", nodes[0]["id"])
        assert (code, told) == (1, f"error: no ring has a node {nodes[0]['id']}\n")
        for wrong in ("nothing", "[]", '{"messages": [{"role": 3}]}', '{"tools": [1]}'):
            chat.write_text(wrong)
            code, told = await ringserve("cache", "pin", "--chat", str(chat))
            assert (code, told.startswith("error: chat: is no")) == (2, True), told
        code, told = await ringserve("cache", "pin")
        assert (code, told) == (2, "error: text: give one of --text, --file and --chat\n")
        code, told = await ringserve("cache", "pin", "--text", "never seen")
        assert code == 1
        assert told.startswith("error: prefix: only 0 of its 10 tokens")
