"""The one error tree.

    RingserveError
    ├── RequestError              the request cannot be served as it stands; a retry changes nothing
    │   ├── InvalidValue          a field holds a value that means nothing here
    │   ├── ContextTooLong        the prompt has more tokens than a lane has rows
    │   ├── InvalidApiKey         no key was shown, or none that is known here
    │   ├── NotAnOperator         the key may ask for turns, and not change the rings
    │   ├── RequestTooLarge       the message is larger than the gateway reads
    │   └── ModelNotFound         another model was asked for than the one that is served
    ├── BusyError                 nothing is wrong with the request; try again later
    │   ├── QueueFull             as many jobs, tokens or bytes wait as may
    │   ├── RateLimited           the caller's key has used what it may for now
    │   ├── TooManyViewers        as many look at the status page as may
    │   ├── TooManyConnections    as many are connected as may
    │   └── RingUnavailable       the ring is loading, re-forming or draining
    │       └── ServerEnded       the server ended before the answer was complete
    ├── JobError                  a job that had been accepted ended early
    │   ├── Cancelled             its client left or asked for it
    │   ├── DeadlineExceeded      its deadline passed
    │   ├── ConstraintFailed      its grammar could not say what may follow
    │   ├── SlowReader            nobody read its answer
    │   └── StageLost             its ring was lost and could not be rebuilt
    ├── RingLost                  a stage died, hung or answered out of order; raised by rings
    │   └── RingTaken             the whole ring is somebody else's now, or was ended by hand
    ├── SetupError                ringserve cannot start as it was told to
    │   ├── InvalidSetting        a flag or setting holds an impossible value
    │   ├── CannotListen          the port is taken, or the address is not this machine's
    │   ├── ModelUnusable         the model's files are absent, damaged or of an unknown kind
    │   ├── ModelDoesNotFit       weights and lanes need more memory than there is
    │   ├── ClusterTooSmall       the cluster lacks the stages' resources
    │   └── NumericsNotExact      exact numerics were demanded and cannot be had
    └── BrokenInvariant           a bug of ours; carries the story of what led to it

Every class has a stable `code` and says whether a retry can help. Edges translate by class, once
(gateway/errors.py). What a stage refuses is no exception but a value in its reply: frames.Refusal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar


class RingserveError(Exception):
    """The root of every error that ringserve raises on purpose."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False


class RequestError(RingserveError):
    """The request cannot be served as it stands."""

    code: ClassVar[str] = "invalid_value"


class InvalidValue(RequestError):
    """A field of the request holds a value that means nothing here."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ContextTooLong(RequestError):
    """The prompt has more tokens than one lane can hold."""

    code: ClassVar[str] = "context_length_exceeded"

    def __init__(self, *, prompt_tokens: int, limit: int, at_least: bool = False) -> None:
        """`at_least`: nobody counted them; it has so many or more."""
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self.counted = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
        super().__init__(
            f"prompt has {self.counted} tokens; "
            f"this model's maximum context length is {limit} tokens"
        )


class InvalidApiKey(RequestError):
    """No key was shown, or none that is known here. It tells nothing of the keys."""

    code: ClassVar[str] = "invalid_api_key"

    def __init__(self, *, given: bool) -> None:
        super().__init__(
            "the API key is not known here" if given else "an API key is needed and none was given"
        )


class NotAnOperator(RequestError):
    """The key may ask for turns, and not change what the rings are or keep."""

    code: ClassVar[str] = "permission_denied"

    def __init__(self) -> None:
        super().__init__("this API key is not an operator's")


class RequestTooLarge(RequestError):
    """The message is larger than the gateway reads."""

    code: ClassVar[str] = "request_too_large"

    def __init__(self, *, received_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"request has {received_bytes} bytes; at most {limit_bytes} are read")
        self.received_bytes = received_bytes
        self.limit_bytes = limit_bytes


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""

    code: ClassVar[str] = "model_not_found"

    def __init__(self, *, model: str, served: str) -> None:
        super().__init__(f"model {model!r} is not served here; this gateway serves {served!r}")
        self.model = model
        self.served = served


class BusyError(RingserveError):
    """Nothing is wrong with the request; the same request may be served later."""

    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Shed(StrEnum):
    """What there is too much of; few, since each one is a series to those who count."""

    JOBS = "jobs"  # turns that wait for a lane
    TOKENS = "tokens"  # prompt tokens of turns that wait for a lane
    READING = "reading"  # prompts that are to be read
    BYTES = "bytes"  # of requests that are being served


class QueueFull(BusyError):
    """As much waits as may. `waiting`: how much, in what `reason` counts."""

    code: ClassVar[str] = "queue_full"

    def __init__(self, *, waiting: int, retry_after_s: float, reason: Shed = Shed.JOBS) -> None:
        super().__init__(
            f"{waiting} {_SHED_WORDS[reason]}; try again in {math.ceil(retry_after_s)} s",
            retry_after_s=retry_after_s,
        )
        self.waiting = waiting
        self.reason = reason


_SHED_WORDS = MappingProxyType(
    {
        Shed.JOBS: "turns are waiting",
        Shed.TOKENS: "prompt tokens are waiting",
        Shed.READING: "prompts are waiting to be read",
        Shed.BYTES: "bytes of requests are being served",
    }
)


class RateLimited(BusyError):
    """The caller's key has used what it may for now; others' requests are served."""

    code: ClassVar[str] = "rate_limit_exceeded"

    def __init__(self, *, what: str, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"this API key may have {limit} {what}; try again in {retry_after_s:.1f} s",
            retry_after_s=retry_after_s,
        )
        self.what = what
        self.limit = limit


class TooManyViewers(BusyError):
    """As many clients look at the status page as may; it costs the others nothing."""

    code: ClassVar[str] = "too_many_viewers"

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} viewers look already; try again later", retry_after_s=5.0)
        self.limit = limit


class TooManyConnections(BusyError):
    """As many are connected as may; what they asked for goes on."""

    code: ClassVar[str] = "too_many_connections"

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} connections are open; try again later", retry_after_s=5.0)
        self.limit = limit


class RingUnavailable(BusyError):
    """No ring can take the job now: loading, re-forming or draining."""

    code: ClassVar[str] = "ring_unavailable"

    def __init__(self, reason: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(f"no ring is available: {reason}", retry_after_s=retry_after_s)
        self.reason = reason


class ServerEnded(RingUnavailable):
    """The server ended while the turn ran or waited; its place, or the next server, may serve it."""

    def __init__(self) -> None:
        told = "the server ended before the answer was complete"
        BusyError.__init__(self, told, retry_after_s=1.0)
        self.reason = "the server ended"


class JobError(RingserveError):
    """A job that had been accepted ended before its answer was complete."""


class Cancelled(JobError):
    """The job's client left or cancelled it; its rows stay reusable."""

    code: ClassVar[str] = "cancelled"

    def __init__(self) -> None:
        super().__init__("the job was cancelled")


class DeadlineExceeded(JobError):
    """The job's deadline passed; its rows stay reusable."""

    code: ClassVar[str] = "deadline_exceeded"

    def __init__(self) -> None:
        super().__init__("the deadline passed before the answer was complete")


class ConstraintFailed(JobError):
    """The job's grammar could not say what may follow: it met a limit, or nothing may."""

    code: ClassVar[str] = "constraint_failed"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the grammar could not go on: {reason}")
        self.reason = reason


class SlowReader(JobError):
    """The job's answer lay unread for too long, while others could have had its lane."""

    code: ClassVar[str] = "slow_reader"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"nothing was read of the answer for {seconds:g} s")
        self.seconds = seconds


class StageLost(JobError):
    """The job's ring was lost and could not be rebuilt, or was lost again and again under this job."""

    code: ClassVar[str] = "stage_lost"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the ring was lost: {reason}")
        self.reason = reason


class RingLost(RingserveError):
    """A stage died, hung past its deadline or answered out of order."""

    code: ClassVar[str] = "ring_lost"
    retryable: ClassVar[bool] = True
    for_good: ClassVar[bool] = False  # no healing brings it back

    def __init__(self, stage: int | None, reason: str) -> None:
        where = "the ring" if stage is None else f"stage {stage}"
        super().__init__(f"{where}: {reason}")
        self.stage = stage
        self.reason = reason

    def __reduce__(self) -> tuple[type[RingLost], tuple[int | None, str]]:
        """A stage in another process may raise it; by its text alone it could not be made again."""
        return type(self), (self.stage, self.reason)


class RingTaken(RingLost):
    """The ring is not ours any more: another gateway drives it, or somebody has ended it. What is left of it is not
    ours to heal.
    """

    for_good: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.reason


class SetupError(RingserveError):
    """ringserve cannot start as it was told to."""

    code: ClassVar[str] = "setup_failed"


class InvalidSetting(SetupError):
    """A flag or setting holds an impossible value."""

    code: ClassVar[str] = "invalid_setting"

    def __init__(self, setting: str, reason: str) -> None:
        super().__init__(f"{setting}: {reason}")
        self.setting = setting
        self.reason = reason


class CannotListen(SetupError):
    """A front's port is taken, or its address is not this machine's."""

    code: ClassVar[str] = "cannot_listen"


class ModelUnusable(SetupError):
    """The model's files are absent, damaged or of a kind that no slice can be made of."""

    code: ClassVar[str] = "model_unusable"


class ModelDoesNotFit(SetupError):
    """Weights and lanes need more memory than a stage has."""

    code: ClassVar[str] = "model_does_not_fit"


class ClusterTooSmall(SetupError):
    """The cluster cannot give every stage what it was asked for."""

    code: ClassVar[str] = "cluster_too_small"

    def __init__(self, *, wanted: str, available: str) -> None:
        super().__init__(f"the cluster is too small: wanted {wanted}, available {available}")
        self.wanted = wanted
        self.available = available


class NumericsNotExact(SetupError):
    """Exact numerics were demanded, and the probe found that this device does not give them."""

    code: ClassVar[str] = "numerics_not_exact"


class BrokenInvariant(RingserveError):
    """A bug of ours: something happened that must not. Paste the story into a report."""

    def __init__(self, message: str, story: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join((message, *story)))
        self.story = tuple(story)
