"""The Ray that rings run on: an existing cluster, or a small one of our own on this host.

Decides how it is started and reached, and who ends it. It knows nothing of rings.
"""

from __future__ import annotations

import asyncio
import logging
import socket

import ray
from ray.exceptions import RayError

from stage.ray_ring.news import log_what_ray_says
from stage.ray_ring.session import object_store_folder, session_parent
from stage.ray_ring.versions import not_joined

# Of what outlives the process that made it: found there by name.
NAMESPACE = "ringserve"
# Ray's smallest; frames do not pass through its object store.
_OBJECT_STORE_BYTES = 80_000_000
# To find out that nobody listens at a given address.
_REACH_S = 5.0


class RayCluster:
    """A Ray that several rings of this process share; the last one to leave ends it if it was started here."""

    def __init__(self, address: str | None = None) -> None:
        """`address`: an existing cluster; None starts a small one of our own on this host."""
        self._address = address
        self._users = 0
        self._is_ours = False
        self._changing = asyncio.Lock()

    async def acquire(self) -> None:
        """Raises SetupError."""
        async with self._changing:
            if self._users == 0:
                await self._connect_once()
            self._users += 1

    async def release(self) -> None:
        async with self._changing:
            self._users -= 1
            if self._users == 0:
                await self._leave()

    async def _connect_once(self) -> None:
        # In a thread: it takes seconds, and on the main thread Ray would take over SIGTERM. A local Ray dies with
        # the thread that started it (PR_SET_PDEATHSIG); the loop's executor keeps its threads until the loop closes.
        connecting = asyncio.create_task(asyncio.to_thread(self._connect))
        try:
            await asyncio.shield(connecting)
        except asyncio.CancelledError:
            # The thread goes on whoever is cancelled; what it starts is not left behind.
            await asyncio.wait([connecting])
            await self._leave()
            raise

    async def _leave(self) -> None:
        if self._is_ours:
            self._is_ours = False
            await asyncio.to_thread(ray.shutdown)

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        log_what_ray_says()
        try:
            if self._address is None:
                _start_local()
            else:
                _reach(self._address)
                ray.init(
                    self._address,
                    namespace=NAMESPACE,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                )
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise not_joined(self._address, error) from error
        self._is_ours = True


def _reach(address: str) -> None:
    """Raises OSError: Ray itself would try for minutes, in a call that nothing can interrupt."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S):
            return


def _start_local() -> None:
    parent = session_parent()
    ray.init(
        "local",
        _temp_dir=str(parent / "ray"),
        _plasma_directory=object_store_folder(parent, _OBJECT_STORE_BYTES),
        namespace=NAMESPACE,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
        log_to_driver=False,
        # Idle workers for calls that nobody makes: 85 MB.
        _system_config={
            "enable_worker_prestart": False,
            "prestart_worker_first_driver": False,
            # Ray makes its workers nice by 15: right for batch jobs, wrong for a stage that a client waits for.
            "worker_niceness": 0,
        },
    )
