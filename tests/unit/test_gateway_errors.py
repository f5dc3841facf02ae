"""Every error has one translation for each wire, and a client learns what it can act on."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from coordinator import errors
from gateway.errors import ERROR_TABLE, grpc_status, is_internal, wire_error
from gateway.pb import generation_pb2 as pb

CLIENT_ERRORS = [
    (errors.InvalidValue("top_p", "is too large"), "INVALID_ARGUMENT", 400),
    (errors.ContextTooLong(prompt_tokens=9, limit=8), "INVALID_ARGUMENT", 400),
    (errors.RequestTooLarge(received_bytes=9, limit_bytes=8), "RESOURCE_EXHAUSTED", 413),
    (errors.ModelNotFound(model="a", served="b"), "NOT_FOUND", 404),
    (errors.QueueFull(waiting=3, retry_after_s=1.5), "RESOURCE_EXHAUSTED", 429),
    (
        errors.RateLimited(what="jobs at once", limit=2, retry_after_s=1.0),
        "RESOURCE_EXHAUSTED",
        429,
    ),
    (errors.InvalidApiKey(given=True), "UNAUTHENTICATED", 401),
    (errors.NotAnOperator(), "PERMISSION_DENIED", 403),
    (errors.RingUnavailable("loading"), "UNAVAILABLE", 503),
    (errors.Cancelled(), "CANCELLED", None),
    (errors.DeadlineExceeded(), "DEADLINE_EXCEEDED", 504),
    (errors.StageLost("gone"), "ABORTED", 500),
    (errors.SlowReader(60.0), "ABORTED", 408),
    (errors.TooManyConnections(800), "RESOURCE_EXHAUSTED", 503),
    (errors.ClusterTooSmall(wanted="4 GPU", available="2 GPU"), "RESOURCE_EXHAUSTED", 503),
    (errors.ModelDoesNotFit("needs more"), "RESOURCE_EXHAUSTED", 503),
    (errors.ModelUnusable("no such file"), "FAILED_PRECONDITION", 503),
]


def details(status: grpc.Status) -> dict[str, object]:
    """The google.rpc details of a status, by the name of their type."""
    ((_, packed),) = status.trailing_metadata
    found = {}
    for detail in status_pb2.Status.FromString(packed).details:
        name = detail.TypeName().rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name)()
        detail.Unpack(found[name])
    return found


@pytest.mark.parametrize(("error", "code", "http"), CLIENT_ERRORS)
def test_each_error_has_its_own_status_and_reason(
    error: errors.RingserveError, code: str, http: int | None
) -> None:
    status = grpc_status(error, request_id="r1")
    info = details(status)["ErrorInfo"]
    assert (status.code.name, wire_error(error).http) == (code, http)
    assert (info.reason, info.domain) == (error.code.upper(), "ringserve")
    assert info.metadata["request_id"] == "r1"
    assert not is_internal(error)


def test_the_table_covers_what_a_client_can_meet() -> None:
    kinds = [*errors.RequestError.__subclasses__(), *errors.BusyError.__subclasses__()]
    for kind in [*kinds, *errors.JobError.__subclasses__()]:
        assert any(parent in ERROR_TABLE for parent in kind.__mro__[:2]), kind


def test_a_busy_error_says_when_to_come_back() -> None:
    found = details(grpc_status(errors.QueueFull(waiting=3, retry_after_s=1.5)))
    delay = found["RetryInfo"].retry_delay
    assert (delay.seconds, delay.nanos) == (1, 500_000_000)
    assert found["ErrorInfo"].metadata["waiting"] == "3"


def test_a_bad_value_names_its_field() -> None:
    found = details(grpc_status(errors.InvalidValue("top_p", "is too large")))
    (violation,) = found["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("sampling.top_p", "is too large")


def test_an_overlong_context_tells_both_lengths() -> None:
    info = details(grpc_status(errors.ContextTooLong(prompt_tokens=41_233, limit=32_768)))
    assert dict(info["ErrorInfo"].metadata) == {"prompt_tokens": "41233", "limit": "32768"}


def test_a_status_stays_small_enough_for_trailing_metadata() -> None:
    status = grpc_status(errors.ModelNotFound(model="x" * 1_000_000, served="y"))
    ((_, packed),) = status.trailing_metadata
    assert len(packed) < 4096


@pytest.mark.parametrize(
    "error",
    [
        errors.BrokenInvariant("row 7", story=["secret"]),
        errors.RingLost(1, "secret"),
        KeyError("secret"),
    ],
)
def test_what_is_our_own_fault_is_not_told(error: Exception) -> None:
    status = grpc_status(error)
    assert is_internal(error)
    assert (status.code, status.details) == (grpc.StatusCode.INTERNAL, "internal error")
    assert b"secret" not in status.trailing_metadata[0][1]


@pytest.mark.parametrize(
    ("field", "path"),
    [
        ("messages", "chat.messages"),
        ("messages[3].role", "chat.messages[3].role"),
        ("tools[0]", "chat.tools[0]"),
        ("template_args", "chat.template_args_json"),
        ("token_ids", "token_ids.ids"),
        ("max_new_tokens", "max_tokens"),
        ("seed", "sampling.seed"),
        ("stop", "stop"),
    ],
)
def test_a_field_is_told_as_a_path_that_the_request_has(field: str, path: str) -> None:
    found = details(grpc_status(errors.InvalidValue(field, "is wrong")))
    (violation,) = found["BadRequest"].field_violations
    assert violation.field == found["ErrorInfo"].metadata["field"] == path
    message = pb.GenerateRequest.DESCRIPTOR
    for name in path.replace("[", ".").split("."):
        if not name.rstrip("]").isdigit():
            message = message.fields_by_name[name].message_type or message
