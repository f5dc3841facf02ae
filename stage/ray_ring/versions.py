"""Whether the other hosts of a cluster run what this one runs, found out before any of them unpickles our classes.

Decides what counts as the same, and how a mismatch is said in one line that names the host and both versions. Ray
itself compares its own version and Python's when a host joins; ours are asked for here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coordinator.errors import SetupError
from coordinator.frames import PROTOCOL_VERSION

# As Ray words it, over seven lines.
_MISMATCH = re.compile(
    r"Version mismatch.*?Ray: (\S+)\s+Python: (\S+).*?Ray: (\S+)\s+Python: (\S+)", re.DOTALL
)
_SAME = "install the same on every machine"
# What a host is asked for: versions by name; "" where it has none.
Told = Mapping[str, str]


def not_joined(address: str | None, error: Exception) -> SetupError:
    """Why there is no Ray to be had at that address; None: on this host."""
    where = address or "this host"
    if found := _MISMATCH.search(str(error)):
        theirs, ours = f"{found[1]} on Python {found[2]}", f"{found[3]} on Python {found[4]}"
        return SetupError(f"the Ray at {where} is Ray {theirs}, and this is Ray {ours}: {_SAME}")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return SetupError(f"no Ray at {where}: {(lines or [type(error).__name__])[0]}")


def told_here() -> Told:
    try:
        ours = version("ringserve")
    except PackageNotFoundError:
        ours = ""
    return {"ringserve": ours, "protocol": str(PROTOCOL_VERSION)}


async def check_versions(nodes: Collection[str], import_from: str, within_s: float) -> None:
    """`nodes`: Ray's ids of those that are asked. Raises SetupError with the first that differs."""
    asking = {node: _ask(node, import_from) for node in sorted(nodes)}
    hosts = {each["NodeID"]: each["NodeManagerAddress"] for each in ray.nodes()}
    for node, answer in asking.items():
        host = hosts.get(node, node)
        try:
            theirs = await asyncio.wait_for(answer, within_s)
        except (RayError, TimeoutError) as error:
            lines = str(error).strip().splitlines()
            why = lines[-1] if lines else f"no answer within {within_s:g} s"
            raise SetupError(f"the node {host} cannot run ringserve: {why}") from error
        check_same(host, theirs, told_here())


def check_same(host: str, theirs: Told, ours: Told) -> None:
    """Raises SetupError. A checkout may have no version of its own."""
    if theirs.get("error"):
        raise SetupError(f"the node {host} cannot run ringserve: {theirs['error']}: {_SAME}")
    for what, mine in ours.items():
        other = theirs.get(what, "")
        if other != mine and (what == "protocol" or (other and mine)):
            words = f"{what} {other or 'of no version'}", f"{what} {mine}"
            raise SetupError(f"the node {host} runs {words[0]}, and this is {words[1]}: {_SAME}")


def _ask(node: str, import_from: str) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    environment = {"env_vars": {"PYTHONPATH": import_from}}
    asked = ray.remote(_teller()).options(
        num_cpus=0, max_retries=0, scheduling_strategy=strategy, runtime_env=environment
    )
    return asked.remote()


def _teller() -> Callable[[], dict[str, str]]:
    """A function that travels whole: one of this module's would be looked up over there, where it may not be."""

    def tell() -> dict[str, str]:
        from importlib.metadata import PackageNotFoundError, version

        told = {"ringserve": "", "protocol": "", "error": ""}
        try:
            told["ringserve"] = version("ringserve")
        except PackageNotFoundError:
            pass
        try:
            from coordinator.frames import PROTOCOL_VERSION

            told["protocol"] = str(PROTOCOL_VERSION)
        except Exception as error:
            told["error"] = f"{type(error).__name__}: {error}"
        return told

    return tell
