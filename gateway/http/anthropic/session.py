"""Which conversation a request of Anthropic's clients belongs to. It decides names only; none is a name as well."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
from starlette.datastructures import Headers

from gateway.http.asker import Asker

# Claude Code's user ids: of a hash, an account and, at the end, the session.
_LAST_PART = re.compile(r"_session_([0-9A-Za-z-]+)$")


def asker_of(asker: Asker, headers: Headers) -> Asker:
    """With the session that Claude Code's headers name, unless another header did. Its sub-agents talk for
    themselves: each is a session of its own.
    """
    if asker.session is not None:
        return asker
    session = headers.get("x-claude-code-session-id") or None
    agent = headers.get("x-claude-code-agent-id")
    return replace(asker, session=f"{session}/{agent}" if session and agent else session)


def session_in(user_id: str | None) -> str | None:
    """The session in `metadata.user_id`. A user alone is none: many conversations may be theirs."""
    if not user_id:
        return None
    if last := _LAST_PART.search(user_id):
        return last.group(1)
    if not user_id.startswith("{"):
        return None
    try:
        session = msgspec.json.decode(user_id).get("session_id")
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return session if isinstance(session, str) and session else None
