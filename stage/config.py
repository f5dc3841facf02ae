"""What a ring of real stages is made of. Defaults are written here once; the command line shows them from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.errors import InvalidSetting

DTYPES = ("float32", "bfloat16", "float16")
NUMERICS = ("auto", "exact", "fast")
_SECONDS = (
    *("place_s", "start_s", "load_s", "rest_s", "call_s"),
    *("probe_s", "probe_timeout_s", "fence_s", "lease_s", "mirror_s"),
)


@dataclass(frozen=True, slots=True)
class RingConfig:
    """Raises InvalidSetting. The model's folder is read by every stage, under the same path on every host."""

    model_dir: Path
    model: str  # the name that it is served under
    splits: tuple[tuple[int, int], ...]  # each stage's layers [first, last)
    lanes: int = 4
    max_rows: int = 4096
    device: str = "cpu"  # or "cuda": one GPU a stage
    dtype: str = "float32"
    # auto: as exact as the device gives; exact: refuse to start otherwise; fast: no paddings.
    numerics: str = "auto"
    # Threads of one stage's compute. Two stages of one thread fill two cores; more threads only pay on idle cores.
    threads: int = 1
    # What a stage on a CPU asks of Ray. It bounds how many stages fit; it does not pin them.
    cpu_share: float = 0.5
    # A node of the cluster for each stage, where it has that many; else as few nodes as will do.
    spread: bool = False
    # Bytes of a stage's host memory for chain nodes; 0 keeps none; None: a quarter of what its host has available
    # once the weights are loaded, shared by the stages there.
    kv_host_bytes: int | None = None
    # A folder that keeps chain nodes over a restart, on each stage's host; one ring's only.
    kv_disk: Path | None = None
    # Of each stage; beyond it the files used longest ago go.
    kv_disk_bytes: int = 16 * 2**30
    # Each stage also keeps what another one has in host memory, for whatever takes the other one's place.
    mirror: bool = False
    # Rings of this kind that share the hosts.
    rings: int = 1
    # It outlives its gateway: the next one finds it in the cluster by its name.
    detached: bool = False
    name: str = "ring"
    # Loaded processes that wait to take a lost stage's place, each with the share of a stage.
    spares: int = 0
    # Seconds, from here on. Resources that another ring has just given back show up again after a moment.
    place_s: float = 10.0
    # A process and its imports: 5 on 2 idle cores, 30 on crowded ones. Ray takes 5 to end a stopped one before it.
    start_s: float = 120.0
    # Without any progress of a load: the numerics of a large slice are probed for minutes on a CPU.
    load_s: float = 300.0
    # To finish the frame being computed: a chunk of 512 rows takes four on a CPU core.
    rest_s: float = 15.0
    # Any other call, which takes milliseconds: sockets, the cut of what is held.
    call_s: float = 10.0
    # A probe takes 1.2 ms. Torch's imports and a loaded machine may keep one waiting for a second or two.
    probe_s: float = 1.0
    probe_timeout_s: float = 5.0
    # A stage that has heard no probe for so long ends itself; its place was given away long before.
    fence_s: float = 30.0
    # Detached: a gateway that is not heard of for so long has lost the ring to whoever comes next. It shows that it
    # lives every probe_s.
    lease_s: float = 5.0
    # For a new stage to get back what the one before it had: 3 GB between hosts at 1 Gbit/s, last used first.
    mirror_s: float = 30.0

    def __post_init__(self) -> None:
        self._check_splits()
        for name in ("lanes", "max_rows", "threads", "kv_disk_bytes", "rings"):
            if getattr(self, name) < 1:
                raise InvalidSetting(name, f"must be at least 1, got {getattr(self, name)}")
        for name, known in (("dtype", DTYPES), ("numerics", NUMERICS), ("device", ("cpu", "cuda"))):
            if getattr(self, name) not in known:
                raise InvalidSetting(name, f"must be one of {', '.join(known)}")
        if self.kv_host_bytes is not None and self.kv_host_bytes < 0:
            raise InvalidSetting("kv_host_bytes", f"must not be negative, got {self.kv_host_bytes}")
        if self.mirror and self.stages < 2:
            raise InvalidSetting("mirror", "needs another stage to keep a copy")
        if self.spares < 0:
            raise InvalidSetting("spares", f"must not be negative, got {self.spares}")
        for name in ("cpu_share", *_SECONDS):
            if not getattr(self, name) > 0:
                raise InvalidSetting(name, "must be greater than 0")

    def _check_splits(self) -> None:
        ends = (0, *(last for _, last in self.splits))
        if not self.splits or any(
            first != end or last <= first
            for (first, last), end in zip(self.splits, ends, strict=False)
        ):
            raise InvalidSetting("splits", f"{self.splits} does not follow the layers from 0 on")

    @property
    def stages(self) -> int:
        return len(self.splits)
