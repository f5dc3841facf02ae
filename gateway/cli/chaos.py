"""`ringserve chaos`: a storm over rings of its own, and the proof that no stream was wrong or lost.

Decides only what the flags mean. Heavy modules are imported when the command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.errors import SetupError
from gateway.cli.exits import fail
from gateway.cli.flags import Json, KvHostBytes, MaxRows, Mirror, Ring, Rings, Spares, Stages
from gateway.settings import RingKind, ServeSettings

_DEFAULTS = ServeSettings(model="default")
# Of a lane, and a conversation has about a thousand at its end; a fake model's tokens are bytes.
_ROWS, _FAKE_ROWS = 2048, 4096


def chaos(
    model: Annotated[
        str,
        typer.Argument(envvar="RINGSERVE_MODEL", help="A folder, a hub id, or the word smollm2."),
    ] = "smollm2",
    ring: Ring = _DEFAULTS.ring,
    stages: Stages = _DEFAULTS.stages,
    rings: Rings = _DEFAULTS.rings,
    spare: Spares = _DEFAULTS.spares,
    mirror: Mirror = _DEFAULTS.mirror,
    streams: Annotated[int, typer.Option(help="Streams that talk at once.")] = 4,
    lanes: Annotated[
        int | None,
        typer.Option(help="Conversations that a ring holds at once.", show_default="--streams"),
    ] = None,
    max_rows: MaxRows = None,
    kv_host_bytes: KvHostBytes = _DEFAULTS.kv_host_bytes,
    faults: Annotated[
        str,
        typer.Option(
            help="Names with commas between them: kill (its moments are kill-prefill, kill-decode, "
            "kill-speculation, kill-restore, kill-publish, kill-load), stop, slow, disk, gateway, all."
        ),
    ] = "all",
    seed: Annotated[int, typer.Option(help="The same seed, the same storm.")] = 0,
    kills: Annotated[
        int | None,
        typer.Option(help="End after so many kills.", show_default="each fault once"),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="End after so many minutes.", show_default="each fault once"),
    ] = None,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", help="From one fault to the next, at least.")
    ] = 5.0,
    soak: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Write what all processes take, every ten seconds, and fail where it grows.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw --soak as a PNG; needs the extra `bench`.", dir_okay=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Strikes a ring while it serves, and compares every stream with its cold answer."""
    try:
        from gateway.chaos.options import StormOptions
        from gateway.chaos.run import chaos_command
        from gateway.chaos.storm import parse_faults

        settings = ServeSettings(
            model=model,
            ring=ring,
            stages=stages,
            rings=rings,
            spares=spare,
            mirror=mirror,
            lanes=lanes or streams,
            max_rows=max_rows or (_FAKE_ROWS if ring is RingKind.FAKE else _ROWS),
            kv_host_bytes=kv_host_bytes,
        )
        options = StormOptions(
            seed=seed,
            faults=parse_faults(faults),
            streams=streams,
            kills=kills,
            minutes=minutes,
            every_s=every,
            soak=soak,
            plot=plot,
        )
        clean = chaos_command(settings, options, as_json)
    except SetupError as error:
        raise typer.Exit(fail(error)) from None
    raise typer.Exit(0 if clean else 1)
