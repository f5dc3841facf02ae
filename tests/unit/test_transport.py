"""Bytes between stages: what is sent arrives as it was, and no bytes end a receiver."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from coordinator.frames import (
    CopyRows,
    DropNodes,
    Epoch,
    Frame,
    JobId,
    LaneId,
    LaneRows,
    LoadNodes,
    NodeId,
    NodeSpan,
    Op,
    OpenLane,
    Refusal,
    RefusalCode,
    Reply,
    Segment,
    SegmentKind,
    SegmentReply,
    Seq,
    StageTiming,
    StoreNodes,
)
from coordinator.nodes import root_of
from coordinator.prefixes import digest_of
from coordinator.requests import RowLogprobs, SamplingSpec
from stage import wire
from stage.messages import Delivery, FrameMessage, Garbled, Message, ReplyMessage
from stage.transport import Endpoint, Link

LOOPBACK = "127.0.0.1"
NODES = tuple(NodeId(bytes([n] * 16)) for n in (1, 2, 3))

SPEC = SamplingSpec(
    temperature=0.7, top_k=5, seed=(1 << 64) - 1, logit_bias=((3, -1.5),), logprobs=2
)


def segment(lane: int = 0, tokens: tuple[int, ...] = (1, 2), **rest) -> Segment:
    return Segment(LaneId(lane), JobId(9), 4, tokens, SegmentKind.VERIFY, SPEC, 3, **rest)


def frame_message(dtype: torch.dtype = torch.float32, seq: int = 7) -> FrameMessage:
    ops = (
        CopyRows(LaneId(1), LaneId(0), 4),
        DropNodes((NODES[2],)),
        LoadNodes(LaneId(0), 4, 9, NODES[:2]),
        OpenLane(LaneId(0), JobId(9), 4, digest_of((1, 2, 3, 4)), root_of("model", "tenant")),
    )
    after = (StoreNodes(LaneId(0), (NodeSpan(NODES[1], NODES[0], 64, 100),)),)
    segments = (segment(masks=(b"\x01\xff\0", b"")), segment(1, (5,)))
    return FrameMessage(
        opened=Epoch(2),
        frame=Frame(Epoch(3), Seq(seq), ops, segments, alone=True, after=after),
        refusals=(Refusal(RefusalCode.KV_GAP, 0, LaneId(1), "why"),),
        lanes=(LaneRows(LaneId(0), 6),),
        timings=(StageTiming(0, 0.1, 0.2, 0.3),),
        computed=(LaneId(0),),
        hidden=torch.randn(2, 8).to(dtype),
        lost=NODES[2:],
    )


def reply_message() -> ReplyMessage:
    part = SegmentReply(LaneId(0), JobId(9), 4, (1,), (RowLogprobs(-0.5, ((1, -0.5), (2, -1.0))),))
    refusal = Refusal(RefusalCode.STALE_EPOCH, 1, None, "old")
    rows = (LaneRows(LaneId(0), 6),)
    reply = Reply(Epoch(3), Seq(7), (part,), rows, (refusal,), lost=NODES[:1])
    return ReplyMessage(Epoch(2), reply)


def carried(message: FrameMessage | ReplyMessage) -> Message:
    return wire.decode([bytearray(part) for part in wire.encode(message)]).message


def same(left: Message, right: Message) -> bool:
    """Equal in every field; tensors bit for bit."""
    if not isinstance(left, FrameMessage) or not isinstance(right, FrameMessage):
        return left == right
    plain = [replace(message, hidden=None) for message in (left, right)]
    if left.hidden is None or right.hidden is None:
        return plain[0] == plain[1] and left.hidden is right.hidden
    equal = left.hidden.dtype == right.hidden.dtype and torch.equal(left.hidden, right.hidden)
    return plain[0] == plain[1] and equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_frame_arrives_as_it_was_sent(dtype: torch.dtype) -> None:
    sent = frame_message(dtype)
    assert same(carried(sent), sent)


def test_a_frame_without_rows_and_a_reply_arrive_as_they_were_sent() -> None:
    bare = FrameMessage(Epoch(0), Frame(Epoch(0), Seq(0)))
    for sent in (bare, reply_message()):
        assert same(carried(sent), sent)


def test_every_kind_of_op_has_its_place_in_the_table() -> None:
    assert set(wire._OPS) == set(get_args(Op))


def test_received_rows_are_aligned_wherever_their_bytes_lay() -> None:
    parts = [bytearray(part) for part in wire.encode(frame_message())]
    shifted = bytearray(1) + parts[2]
    message = wire.decode([parts[0], parts[1], memoryview(shifted)[1:]]).message
    assert isinstance(message, FrameMessage)
    assert message.hidden is not None
    assert message.hidden.data_ptr() % 64 == 0


def changed_body(change) -> list[bytes]:
    envelope, body, hidden = (bytes(part) for part in wire.encode(frame_message()))
    values = msgspec.msgpack.decode(body)
    change(values)
    return [envelope, msgspec.msgpack.encode(values), hidden]


ILLEGAL = {
    "a negative start": lambda body: body[1][0].update(start=-1),
    "a segment without tokens": lambda body: body[1][0].update(tokens=[]),
    "a token that is no number": lambda body: body[1][0].update(tokens=["x"]),
    "a temperature that is no number": lambda body: body[1][0]["sampling"].update(
        temperature=float("nan")
    ),
    "two segments of a lane": lambda body: body[1][1].update(lane=0),
    "an unknown kind of segment": lambda body: body[1][0].update(kind="think"),
    "an op of an unknown kind": lambda body: body[0][0].__setitem__(0, 99),
    "a copy onto itself": lambda body: body[0][0][1].update(source=0),
    "a body that stops early": lambda body: body.__delitem__(slice(2, None)),
    "a tensor of another size": lambda body: body[6][1].__setitem__(0, 3),
    "a tensor of an unknown type": lambda body: body[6].__setitem__(0, "object"),
    "a node id of another length": lambda body: body[8][0]["spans"][0].update(node=b"short"),
    "a lost node that is no bytes": lambda body: body[9].append(7),
    "a node without rows": lambda body: body[8][0]["spans"][0].update(end=64),
    "a load of no nodes": lambda body: body[0][2][1].update(nodes=[]),
    "a tensor of no rows": lambda body: body[6].__setitem__(1, [0, 8]),
}


@pytest.mark.parametrize("change", ILLEGAL.values(), ids=ILLEGAL.keys())
def test_an_illegal_frame_is_garbled_but_known_by_epoch_and_seq(change) -> None:
    parts = [bytearray(part) for part in changed_body(change)]
    message = wire.decode(parts).message
    assert isinstance(message, Garbled)
    assert (message.opened, message.epoch, message.seq) == (2, 3, 7)
    assert message.detail


def test_an_unchanged_body_is_not_garbled() -> None:
    """The control of the test above."""
    parts = [bytearray(part) for part in changed_body(lambda body: None)]
    assert isinstance(wire.decode(parts).message, FrameMessage)


def damaged(seed: int) -> list[bytearray]:
    draw = random.Random(seed)
    parts = [bytearray(part) for part in wire.encode(frame_message())]
    part = parts[draw.randrange(2)]
    for _ in range(draw.randint(1, 4)):
        part[draw.randrange(len(part))] = draw.randrange(256)
    if draw.random() < 0.3:
        del part[draw.randrange(len(part)) :]
    if draw.random() < 0.2:
        parts.pop()
    return parts


def test_flipped_and_missing_bytes_never_raise_anything_else() -> None:
    seen = set()
    for seed in range(500):
        try:
            seen.add(type(wire.decode(damaged(seed)).message))
        except wire.WireError as error:
            seen.add(type(error))
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}")
    assert {Garbled, wire.WireError} <= seen


@pytest.fixture(params=["ipc", "tcp"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    return tmp_path / "socket" if request.param == "ipc" else LOOPBACK


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    here, there = Link(), Link()
    yield here, there
    for link in (here, there):
        link.close()


def key_of(link: Link) -> bytes:
    """The public key that a link shows to its peers."""
    listener = link.listen(LOOPBACK)
    listener.close()
    assert listener.endpoint.public is not None
    return listener.endpoint.public


def test_messages_come_in_order_and_large_ones_whole(
    links: tuple[Link, Link], where: Path | str
) -> None:
    listener = links[0].listen(where)
    links[0].admit(key_of(links[1]))
    sender = links[1].connect(listener.endpoint)
    large = torch.arange(512 * 576, dtype=torch.float32).view(512, 576)
    sent = [FrameMessage(Epoch(0), Frame(Epoch(0), Seq(n)), hidden=large + n) for n in range(5)]
    for message in sent:
        sender.send(message)
    for message in sent:
        delivery = listener.receive()
        assert delivery is not None
        assert same(delivery.message, message)
    sender.close()
    listener.close()


def test_unreadable_bytes_are_counted_and_passed_over(
    links: tuple[Link, Link], tmp_path: Path
) -> None:
    listener = links[0].listen(tmp_path / "socket")
    sender = links[1].connect(listener.endpoint)
    for garbage in ([b""], [b"hello", b"you"], [bytes(38), b"", b""]):
        sender._socket.send_multipart(garbage)
    sender.send(reply_message())
    delivery = listener.receive()
    assert delivery is not None
    assert delivery.message == reply_message()
    assert listener.unreadable == 3
    sender.close()
    listener.close()


def test_closing_a_link_wakes_its_receiver_and_loses_no_thread(tmp_path: Path) -> None:
    link = Link()
    listener = link.listen(tmp_path / "socket")
    got: list[Delivery | None] = []
    thread = threading.Thread(target=lambda: got.append(listener.receive()))
    thread.start()
    link.close()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert got == [None]
    link.close()


def test_a_sender_without_a_receiver_does_not_wait(
    links: tuple[Link, Link], tmp_path: Path
) -> None:
    sender = links[0].connect(Endpoint(f"ipc://{tmp_path / 'nobody'}"))
    for _ in range(2000):
        sender.send(reply_message())
    sender.close()


def test_a_channel_holds_few_messages_for_a_peer_that_does_not_read(
    links: tuple[Link, Link], where: Path | str
) -> None:
    answers, endpoint = links[0].answer(where)
    links[0].admit(key_of(links[1]))
    channel = links[1].call(endpoint)
    assert channel.send([b"first"])
    assert answers.receive(10.0) == [b"first"]
    assert answers.send([b"answer", b""])
    assert channel.receive(10.0) == [b"answer", b""]
    assert channel._socket is not None
    with pytest.raises(zmq.Again):
        deque(channel._socket.send(bytes(2**20), zmq.NOBLOCK) for _ in range(64))
    channel.close()
    answers.close()


def test_a_channel_whose_link_is_closed_says_so(links: tuple[Link, Link], tmp_path: Path) -> None:
    channel = links[0].call(Endpoint(f"ipc://{tmp_path / 'nobody'}"))
    assert channel.receive(0.0) is None
    assert not channel.is_closed
    waiting: list[object] = []
    thread = threading.Thread(target=lambda: waiting.append(channel.receive()))
    thread.start()
    links[0].close()
    thread.join(timeout=5)
    assert waiting == [None]
    assert channel.is_closed
    assert not channel.send([b"late"])
    assert links[0].call(Endpoint("ipc:///nobody")).is_closed


def stranger(context: zmq.Context[zmq.Socket[bytes]], kind: str, to: Endpoint) -> zmq.Socket[bytes]:
    """A peer that reaches the port and lacks what it would need to be heard."""
    assert to.public is not None
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    mine, other = zmq.curve_keypair(), zmq.curve_keypair()
    if kind != "plaintext":
        socket.setsockopt(zmq.CURVE_PUBLICKEY, mine[0])
        socket.setsockopt(zmq.CURVE_SECRETKEY, mine[1])
        server = other[0] if kind == "another server's key" else to.public
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)
    return socket


FAILURES = {
    "plaintext": zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED,
    "a key of its own": zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    "another server's key": zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED,
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_stranger_who_reaches_the_port_is_not_heard_and_disturbs_nobody(
    links: tuple[Link, Link], kind: str
) -> None:
    with closing(links[0].listen(LOOPBACK)) as listener, zmq.Context() as context:
        links[0].admit(key_of(links[1]))
        with stranger(context, kind, listener.endpoint) as socket:
            event = shout(socket, listener.endpoint, FAILURES[kind])
            # Only once its handshake has failed can its frame no longer be on the way.
            assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
            with closing(links[1].connect(listener.endpoint)) as sender:
                sender.send(reply_message())
                delivery = listener.receive()
        assert delivery is not None
        assert delivery.message == reply_message()
        assert listener.unreadable == 0


def shout(socket: zmq.Socket[bytes], to: Endpoint, failures: int) -> int:
    """Connects and sends a frame; returns how the handshake ended."""
    with socket.get_monitor_socket(failures | zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
        socket.connect(to.address)
        socket.send_multipart(wire.encode(frame_message()))
        event: int = recv_monitor_message(monitor)["event"]
        socket.disable_monitor()
    return event


def test_before_its_peer_is_named_a_listener_hears_nobody(
    links: tuple[Link, Link], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        closing(links[0].listen(LOOPBACK)) as listener,
        closing(links[1].connect(listener.endpoint)) as sender,
    ):
        event = shout(sender._socket, listener.endpoint, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert "refused connections from=127.0.0.1" in caplog.text
    assert key_of(links[1]).decode() not in caplog.text


def test_a_link_shows_one_key_and_tells_nobody_its_secret(links: tuple[Link, Link]) -> None:
    assert key_of(links[0]) == key_of(links[0]) != key_of(links[1])
    keys = links[0]._keys
    assert keys.secret.decode() not in repr(keys)
