"""Whether a Ray can be joined at the address that an operator gave, asked before Ray itself is told to join it.

Ray would try for a minute and longer, in a call that nothing can interrupt, and print of each try but not of its cause.
This only asks; it sends no token, since whoever listens there may not be a Ray. Where a token is asked for and this
machine has one, Ray is told to use it, which `ray start` does by itself: a head that found one asks for it.
"""

from __future__ import annotations

import os
from pathlib import Path

import grpc

from coordinator.errors import SetupError

# What any Ray answers without a load: a method of its head. One that asks for a token says so here.
_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_ANSWER_S = 5.0


def check_ray(address: str) -> None:
    """Blocks for a few seconds at most. Raises SetupError, whose one line says what is wrong."""
    # The keys of its TLS are Ray's own business.
    if os.environ.get("RAY_USE_TLS") == "1":
        return
    error = _ask(address)
    if error is None:
        return
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        _check_token(address)
    else:
        raise SetupError(f"no Ray at {address}: {_reason(error)}") from error


def _ask(address: str) -> grpc.RpcError | None:
    # Ray, too, goes past a proxy.
    options = (("grpc.enable_http_proxy", 0),)
    with grpc.insecure_channel(address, options=options) as channel:
        ask = channel.unary_unary(_METHOD)
        try:
            ask(b"", timeout=_ANSWER_S)
        except grpc.RpcError as error:
            return error
    return None


def _check_token(address: str) -> None:
    """Told to use its token, Ray finds it by itself, or says where it looked. To be called before Ray is imported."""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode.lower() == "token":
        return
    if mode:
        way = f"RAY_AUTH_MODE={mode} is set here; unset it"
    elif _has_token():
        os.environ["RAY_AUTH_MODE"] = "token"
        return
    else:
        way = "put its ~/.ray/auth_token on this machine"
    raise SetupError(f"the Ray at {address} asks for a token: {way}")


def _has_token() -> bool:
    """Where Ray looks for it."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return (Path(named) if named else Path.home() / ".ray" / "auth_token").is_file()


def _reason(error: grpc.RpcError) -> str:
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer within {_ANSWER_S:g} s"
        case grpc.StatusCode.UNIMPLEMENTED:
            return "something else listens there"
        case _:
            # gRPC puts the cause last, behind all that it tried.
            return str(error.details()).rpartition(": ")[2].rstrip("]")
