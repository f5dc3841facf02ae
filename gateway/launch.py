"""The composition root: puts a model, its rings, the coordinator and the fronts together, and takes them apart.

The only module that knows the three kinds of rings and the wire at once. What is heavy (torch, ray, transformers) is
imported when a ring needs it, so that a fake ring starts at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.clock import SystemClock
from coordinator.driver import RingDriver
from coordinator.errors import InvalidSetting
from coordinator.ring import Ring, RingInfo
from coordinator.router import Router
from gateway.chat.tokenizer import ChatTokenizer
from gateway.deadlines import Deadlines, deadlines_of
from gateway.drafting import open_drafters
from gateway.fronts import together
from gateway.http.server import serve_http
from gateway.intake import Intake
from gateway.kv_folder import usable_folder
from gateway.models import find_model
from gateway.observing.compose import open_observing
from gateway.observing.loading import LoadRecord
from gateway.observing.recent_turns import RecentTurns
from gateway.observing.sights import Sights
from gateway.progress import ProgressBoard
from gateway.ray_address import check_ray
from gateway.rings import RingSet
from gateway.rpc.server import serve_grpc
from gateway.safety.guard import open_guard
from gateway.safety.quotas import Quotas
from gateway.service import GenerationService
from gateway.settings import Device, Dtype, RingKind, ServeSettings
from gateway.standing import Front, Standing, ring_prefix, standing

if TYPE_CHECKING:
    from stage.config import RingConfig
    from stage.plan import Plan

# Rows of a fake ring's lane when none were asked for.
_FAKE_ROWS = 4096
# Memory of a GPU that this host cannot ask: taken to be enough.
_UNKNOWN_BYTES = 2**62
# What a fake stage keeps of a row, and how many times its lanes' rows when it is not told.
_FAKE_ROW_BYTES = 16
_FAKE_STORE_LANES = 8
# Seconds that a fake stage takes for a frame, so that answers stream as a model's do.
_FAKE_STEP_S = 0.001
# The fake model writes printable ASCII: one byte a token, so that its text has the length of its ids.
_FAKE_LOW, _FAKE_HIGH = 32, 127
# How many times the patience with a probe a stage waits for the next one.
_FENCE_PROBES = 4


@dataclass(frozen=True, slots=True)
class Running:
    """A process that serves."""

    service: GenerationService
    router: Router
    tokenizer: ChatTokenizer
    info: RingInfo
    grpc_address: str
    http_address: str
    model_dir: Path | None  # None: a ring without a model
    deadlines: Deadlines


@dataclass(frozen=True, slots=True)
class _Model:
    name: str
    folder: Path | None
    tokenizer: ChatTokenizer
    make_ring: Callable[[str], Ring]  # by the ring's name
    check_room: Callable[[], None]  # for one more ring; raises SetupError
    config: RingConfig | None = None  # None: a ring without a model
    # A detached ring of that name ends when it is stopped.
    dissolve: Callable[[str], None] = lambda _: None


@asynccontextmanager
async def launch(
    settings: ServeSettings,
    board: ProgressBoard,
    around: Callable[[str, Ring], Ring] = lambda _, ring: ring,
) -> AsyncIterator[Running]:
    """Serves until the block is left; then running turns get their time to end. Raises SetupError.

    gRPC answers from the beginning, so that health tells loading from dead. `around`: what is put around each ring, by
    its name, for who wants to see it at work.
    """
    guard = open_guard(settings.safety)
    async with AsyncExitStack() as stack:
        drafters = await stack.enter_async_context(
            open_drafters(settings, partial(_device_and_dtype, settings), board)
        )
        there, front = await standing(settings, board, stack), Front()
        model = await asyncio.to_thread(_open_model, settings, board, there, front)
        clock, recent = SystemClock(), RecentTurns()
        observing = await stack.enter_async_context(
            open_observing(settings.observe, model.name, recent.digest)
        )
        metrics = observing.metrics

        def make_driver(name: str) -> RingDriver:
            ring, watching = around(name, model.make_ring(name)), (metrics.rings,)
            return RingDriver(name, ring, settings.scheduler, clock, drafters, watching)

        router = Router((), settings.scheduler.session_limit)
        metrics.look_at(router, clock, settings.scheduler.node_rows)
        sights = Sights(recent, LoadRecord(board), metrics)
        rings = RingSet(
            router,
            make_driver,
            sights.loading.sink,
            model.check_room,
            _settle_s(settings),
            ring_prefix(model.name) if settings.detached else "ring",
            model.dissolve,
        )
        rng = random.SystemRandom()
        watching = (recent, *observing.turns)
        quotas = Quotas(settings.safety.limits, clock) if settings.safety.has_keys else None
        intake = Intake(clock, settings.request_bytes, metrics.turns.shed)
        service = GenerationService(
            model.name, router, model.tokenizer, clock, rng, watching, quotas, intake
        )

        async def end_rings(kind: type[BaseException] | None, *_: object) -> None:
            # Whoever is to be gone has no time for rows either.
            await rings.stop(at_once=kind is not None)

        stack.push_async_exit(end_rings)
        rings.announce(settings.rings)
        fronts = (
            serve_grpc(service, settings.grpc, rings, guard),
            serve_http(service, settings.http, sights, guard),
        )
        addresses = await stack.enter_async_context(together(*fronts))
        front.open(addresses, encrypted=guard.tls is not None)
        service.warm()
        await rings.start()
        grpc, http = addresses
        yield Running(
            service,
            router,
            model.tokenizer,
            router.info(),
            grpc,
            http,
            model.folder,
            deadlines_of(settings, model.config),
        )


def _settle_s(settings: ServeSettings) -> float:
    """Rows that end with their process need not be written back before."""
    return 0.0 if settings.kv_disk is None else settings.grpc.drain_s


def plan_model(settings: ServeSettings, board: ProgressBoard) -> Plan:
    """What the model would need of this machine's memory. Loads nothing. Raises SetupError."""
    folder = find_model(settings.model, board.note)
    return _plan(settings, folder.path, _device(settings))


def ring_config(settings: ServeSettings, board: ProgressBoard) -> RingConfig:
    """What a ring of this machine would be made of. Loads nothing. Raises SetupError."""
    folder = find_model(settings.model, board.note)
    return _ring_config(settings, folder.path, folder.name)


def _open_model(
    settings: ServeSettings, board: ProgressBoard, there: Standing | None, front: Front
) -> _Model:
    if settings.ring is RingKind.FAKE:
        return _fake_model(settings)
    from gateway.chat.tokenizer import load_tokenizer

    if settings.ring is RingKind.RAY and settings.ray_address is not None:
        check_ray(settings.ray_address)
    folder = find_model(settings.model, board.note)
    name = settings.served_name or folder.name
    config = _ring_config(settings, folder.path, name, there)
    tokenizer, check_room = load_tokenizer(folder.path), partial(_check_room, settings, config)
    if settings.ring is RingKind.LOCAL:
        return _Model(name, folder.path, tokenizer, _local_rings(config), check_room, config)
    make_ring, dissolve = _ray_rings(settings, config, front)
    return _Model(name, folder.path, tokenizer, make_ring, check_room, config, dissolve)


def _fake_model(settings: ServeSettings) -> _Model:
    from fakering.model import FakeModel
    from fakering.network import check_sizes
    from fakering.ring import FakeRing
    from gateway.chat.byte_tokenizer import byte_tokenizer

    max_rows = settings.max_rows or _FAKE_ROWS
    check_sizes(settings.stages, settings.lanes, max_rows, settings.rings)
    name = settings.served_name or settings.model
    tokenizer = byte_tokenizer()
    language = FakeModel(
        tokenizer.vocab_size,
        low=_FAKE_LOW,
        high=_FAKE_HIGH,
        end_token=min(tokenizer.stop_token_ids),
    )

    def make_ring(_: str) -> Ring:
        return FakeRing(
            settings.stages,
            settings.lanes,
            max_rows,
            vocab_size=tokenizer.vocab_size,
            step_s=_FAKE_STEP_S,
            model=name,
            language=language,
            host_rows=_fake_host_rows(settings, max_rows),
        )

    return _Model(name, None, tokenizer, make_ring, lambda: None)


def _fake_host_rows(settings: ServeSettings, max_rows: int) -> int:
    if settings.kv_host_bytes is None:
        return _FAKE_STORE_LANES * settings.lanes * max_rows
    return settings.kv_host_bytes // _FAKE_ROW_BYTES


def _local_rings(config: RingConfig) -> Callable[[str], Ring]:
    from stage.local_ring import LocalRing

    return lambda name: LocalRing(_named(config, name))


def _ray_rings(
    settings: ServeSettings, config: RingConfig, front: Front
) -> tuple[Callable[[str], Ring], Callable[[str], None]]:
    """Makes one, and lets one that outlives us end."""
    from stage.lease import Served
    from stage.ray_ring import RayCluster, RayRing

    cluster = RayCluster(settings.ray_address)
    made: dict[str, RayRing] = {}

    def where() -> Served:
        return Served(front.grpc, front.http)

    def make(name: str) -> Ring:
        made[name] = RayRing(_named(config, name), cluster, where)
        return made[name]

    return make, lambda name: made[name].dissolve()


def _named(config: RingConfig, name: str) -> RingConfig:
    """A folder of its own: what one ring gives up, another one may count on."""
    if config.detached:
        config = replace(config, name=name)
    return config if config.kv_disk is None else replace(config, kv_disk=config.kv_disk / name)


def _ring_config(
    settings: ServeSettings, folder: Path, name: str, there: Standing | None = None
) -> RingConfig:
    """Refuses what does not fit, before anything loads. What is loaded already fits."""
    from stage.config import RingConfig

    device = _device(settings)
    plan = _plan(settings, folder, device)
    if there is None:
        plan.check()
        _check_host_bytes(settings)
    config = RingConfig(
        model_dir=folder,
        model=name,
        splits=plan.splits if there is None else there.splits,
        lanes=settings.lanes,
        max_rows=plan.max_rows if there is None else there.max_rows,
        device=device,
        dtype=plan.dtype,
        numerics=settings.numerics,
        spread=settings.spread,
        detached=settings.detached,
        kv_host_bytes=settings.kv_host_bytes,
        kv_disk=usable_folder(settings.kv_disk),
        kv_disk_bytes=settings.kv_disk_bytes,
        mirror=settings.mirror,
        rings=settings.rings,
        spares=settings.spares,
        probe_s=settings.probe_s,
        probe_timeout_s=settings.probe_timeout_s,
        load_s=settings.load_timeout_s,
    )
    # A stage that nobody probes ends itself, and not before it counts as lost here.
    return replace(config, fence_s=max(config.fence_s, _FENCE_PROBES * settings.probe_timeout_s))


def _check_host_bytes(settings: ServeSettings) -> None:
    """Raises InvalidSetting: a store that grows beyond the memory ends in the kernel's hands, hours later."""
    from stage.host_memory import available_bytes

    wanted, here = settings.kv_host_bytes or 0, _stages_here(settings)
    wanted *= 2 if settings.mirror else 1
    if wanted * here > (free := available_bytes()):
        told = f"{here} stages of {wanted} bytes are more than the {free} that this host has free"
        raise InvalidSetting("kv_host_bytes", told)


def _check_room(settings: ServeSettings, config: RingConfig) -> None:
    """Raises ModelDoesNotFit. Which GPUs are free, and whether there are any, is for the cluster to say."""
    if config.device == "cpu":
        one_more = replace(settings, rings=1, max_rows=config.max_rows)
        _plan(one_more, config.model_dir, config.device).check()


def _plan(settings: ServeSettings, folder: Path, device: str) -> Plan:
    from stage.plan import plan

    return plan(
        folder,
        settings.stages,
        settings.lanes,
        settings.max_rows,
        _dtype(settings, device),
        _memory(settings, device),
        device=device,
    )


def _device(settings: ServeSettings) -> str:
    if settings.device is not Device.AUTO:
        return settings.device
    import torch

    return "cuda" if torch.cuda.device_count() >= _stages_here(settings) else "cpu"


def _stages_here(settings: ServeSettings) -> int:
    """How many stages this machine holds, as far as that can be known before the cluster is asked."""
    return settings.rings * (1 if settings.spread else settings.stages + settings.spares)


def _device_and_dtype(settings: ServeSettings) -> tuple[str, str]:
    device = _device(settings)
    return device, _dtype(settings, device)


def _dtype(settings: ServeSettings, device: str) -> str:
    """float32 on a CPU, where it is the fastest and exact; bfloat16 on a GPU."""
    if settings.dtype is not Dtype.AUTO:
        return settings.dtype
    return "bfloat16" if device == "cuda" else "float32"


def _memory(settings: ServeSettings, device: str) -> tuple[int, ...]:
    """Bytes for each stage of one ring, as if the cluster's other hosts were like this one."""
    if device == "cpu":
        from stage.host_memory import host_memory_per_stage

        (each, *_) = host_memory_per_stage(_stages_here(settings))
        return (each,) * settings.stages
    import torch

    free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    # Fewer GPUs than stages are for the ring to refuse: it knows the whole cluster.
    elsewhere = min(free, default=_UNKNOWN_BYTES)
    return tuple((free + [elsewhere] * settings.stages)[: settings.stages])
