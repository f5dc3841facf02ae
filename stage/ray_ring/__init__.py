"""A ring of Ray actors, one a stage, whose frames travel over ZeroMQ.

Decides what counts as a loss, what takes a lost stage's place, and who ends what. Ray owns life and calls; no frame
goes through it. It ends only what it started: its actors, its placement group, its sockets, and Ray if it started it.
"""

from __future__ import annotations

from stage.ray_ring.cluster import RayCluster
from stage.ray_ring.ring import RayRing

__all__ = ["RayCluster", "RayRing"]
