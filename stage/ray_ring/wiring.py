"""The sockets between stages, and from and to the coordinator, for one turn of a ring.

Decides by which way frames travel: by the file system within one node, else encrypted. New ones are made for every
turn, so that nothing of an earlier one can arrive. It may not judge what arrives.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import ray

from coordinator.errors import RingLost
from coordinator.frames import Epoch
from coordinator.held import Holding
from stage.messages import ReplyMessage
from stage.mirroring import MirrorPlace
from stage.placement import keeper_shift
from stage.private_folder import PrivateFolder
from stage.ray_ring.member import Member, together
from stage.replies import ReplyQueue
from stage.transport import Endpoint, Link, Listener, Sender


class Wiring:
    def __init__(self, turn: int, epoch: Epoch, replies: ReplyQueue) -> None:
        self.turn = turn
        self.endpoints: tuple[Endpoint, ...] = ()  # where each stage and then we are reached
        self._epoch = epoch
        self._replies = replies
        self._link = Link()
        self._sender: Sender | None = None
        self._folder: PrivateFolder | None = None

    @property
    def sender(self) -> Sender:
        if self._sender is None:
            raise RingLost(None, "an epoch is being opened")
        return self._sender

    async def connect(
        self,
        members: Sequence[Member],
        state_rows: int,
        within_s: float,
        mirror_s: float | None = None,
    ) -> list[Holding]:
        """Binds and connects all sockets; returns what each stage could go on from. Raises RingLost. `mirror_s`: what
        a new stage may take to get back what another one keeps of it; None: they keep nothing.
        """
        where, replies = self._places(members)
        binding = zip(members, where, strict=True)
        stages: list[Endpoint] = await together(
            [member.ask("bind", self.turn, at, within_s=within_s) for member, at in binding]
        )
        self.endpoints = (*stages, replies)
        self._link.admit(stages[-1].public)
        previous = [replies.public, *(stage.public for stage in stages[:-1])]
        calls = zip(members, previous, [*stages[1:], replies], strict=True)
        if mirror_s is not None:
            await self._mirror(members, where, within_s)
            within_s += mirror_s
        # Each knows its predecessor before anybody connects: the door stays closed to all others.
        holdings: list[Holding] = await together(
            [
                member.ask("connect", self.turn, key, to, state_rows, within_s=within_s)
                for member, key, to in calls
            ]
        )
        self._sender = self._link.connect(stages[0])
        return holdings

    async def _mirror(
        self, members: Sequence[Member], where: Sequence[Path | str], within_s: float
    ) -> None:
        """Who keeps whose nodes. They travel by the same ways as frames, over sockets of their own."""
        at = [each.with_suffix(".mirror") if isinstance(each, Path) else each for each in where]
        places: list[MirrorPlace] = await together(
            [
                member.ask("bind_mirror", self.turn, each, within_s=within_s)
                for member, each in zip(members, at, strict=True)
            ]
        )
        nodes = [member.place.node for member in members]
        shift = keeper_shift(nodes, [place.keeps for place in places])
        asked = []
        for index, member in enumerate(members):
            owner, keeper = index - shift, (index + shift) % len(members)
            about = owner % len(members), places[owner].endpoint.public, places[keeper].endpoint
            asked.append(member.ask("admit_mirror", self.turn, *about, within_s=within_s))
        await together(asked)

    async def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
        # To the end, whoever is cancelled: nobody else knows of these sockets.
        await asyncio.shield(asyncio.to_thread(self._close))

    def _close(self) -> None:
        self._link.close()
        if self._folder is not None:
            self._folder.close()

    def _places(self, members: Sequence[Member]) -> tuple[Sequence[Path | str], Endpoint]:
        """By node, not by host: only what Ray counts as one node surely shares a file system."""
        here = ray.get_runtime_context().get_node_id()
        if all(member.place.node == here for member in members):
            try:
                self._folder = PrivateFolder()
            except OSError as error:  # no temporary folder takes any
                raise RingLost(None, f"no folder for its sockets: {error}") from error
            folder = self._folder.path
            where = [folder / str(number) for number in range(len(members))]
            return where, self._listen(folder / "replies")
        hosts = [member.place.host for member in members]
        return hosts, self._listen(ray.util.get_node_ip_address())

    def _listen(self, where: Path | str) -> Endpoint:
        """The listener belongs to its thread from the start: closing the link waits for it to be closed there."""
        listener = self._link.listen(where)
        threading.Thread(target=self._read, args=(listener,), name="replies", daemon=True).start()
        return listener.endpoint

    def _read(self, listener: Listener) -> None:
        """The thread that waits for the tail."""
        while (delivery := listener.receive()) is not None:
            if isinstance(delivery.message, ReplyMessage):
                self._replies.push(delivery.message)
            else:
                reason = "the tail sent something that is no reply"
                self._replies.lose(None, reason, self._epoch)
