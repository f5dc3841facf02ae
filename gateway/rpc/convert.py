"""Protobuf messages to typed turns and typed events to protobuf messages, for the server.

Unset and zero are told apart here: only what the client set reaches SamplingSpec. No value is judged except where the
wire's shape allows what the records cannot hold, and counts, before there are as many records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from coordinator.counts import RingCounts
from coordinator.errors import InvalidValue
from coordinator.frames import DIGEST_BYTES, NodeId
from coordinator.requests import FinishReason, Miss, MissKind, RowLogprobs, SamplingSpec
from coordinator.ring import RingInfo
from coordinator.router import RingNode
from coordinator.status import RingStatus
from gateway.chat.messages import Message, Tool, ToolCall
from gateway.limits import (
    LONGEST_TEMPLATE_ARGS,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    at_most,
    check_counts,
)
from gateway.pb import generation_pb2 as pb
from gateway.safety.guard import session_of
from gateway.safety.keys import NOBODY, Caller
from gateway.turns import (
    ChatPrompt,
    Excerpt,
    GrammarKind,
    GrammarSpec,
    Prompt,
    TextPrompt,
    TokenPrompt,
    TurnDelta,
    TurnEvent,
    TurnFinished,
    TurnRecovering,
    TurnRequest,
    TurnStarted,
)

FINISH_REASONS: Mapping[FinishReason, pb.FinishReason] = MappingProxyType(
    {
        FinishReason.STOP: pb.FINISH_REASON_STOP,
        FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    }
)
MISS_REASONS: Mapping[MissKind, pb.MissReason] = MappingProxyType(
    {
        MissKind.NEW_SESSION: pb.MISS_REASON_NEW_SESSION,
        MissKind.DIVERGED: pb.MISS_REASON_DIVERGED,
        MissKind.EVICTED: pb.MISS_REASON_EVICTED,
        MissKind.RING_LOST: pb.MISS_REASON_RING_LOST,
        MissKind.NO_CHECKPOINT: pb.MISS_REASON_NO_CHECKPOINT,
        MissKind.MODEL_CHANGED: pb.MISS_REASON_MODEL_CHANGED,
    }
)
_SAMPLING_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
)


def turn_request(
    message: pb.GenerateRequest, timeout_s: float | None, caller: Caller = NOBODY
) -> TurnRequest:
    """Raises InvalidValue."""
    # The counts alone, before objects are made of them; the rest is checked where every front's turns are.
    at_most("stop", len(message.stop), MAX_STOPS, "strings")
    at_most("stop_token_ids", len(message.stop_token_ids), MAX_STOP_TOKENS, "ids")
    at_most("logit_bias", len(message.sampling.logit_bias), MAX_LOGIT_BIAS, "entries")
    return TurnRequest(
        prompt=prompt(message),
        model=message.model,
        session=session_of(caller.name, message.session_id),
        sampling=_sampling(message.sampling),
        seed=_optional(message.sampling, "seed"),
        max_tokens=_optional(message, "max_tokens"),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        reuse=_optional(message, "reuse") is not False,
        draft=_optional(message, "draft") is not False,
        timeout_s=timeout_s,
        priority=message.priority,
        caller=caller.name,
        tenant=caller.tenant,
        grammar=_grammar(message),
    )


def _grammar(message: pb.GenerateRequest) -> GrammarSpec | None:
    match message.WhichOneof("constraint"):
        case "json_schema":
            return GrammarSpec(GrammarKind.JSON_SCHEMA, message.json_schema)
        case "regex":
            return GrammarSpec(GrammarKind.REGEX, message.regex)
        case "lark_grammar":
            return GrammarSpec(GrammarKind.LARK, message.lark_grammar)
        case "json_object" if message.json_object:
            return GrammarSpec(GrammarKind.JSON_OBJECT)
    return None


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def prompt(message: pb.GenerateRequest | pb.CountTokensRequest | pb.PinPrefixRequest) -> Prompt:
    """The prompt of any request. Raises InvalidValue."""
    match message.WhichOneof("prompt"):
        case "chat":
            return _chat(message.chat)
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
            return TokenPrompt(tuple(message.token_ids.ids))
    raise InvalidValue("prompt", "is missing: set chat, text or token_ids")


def _chat(chat: pb.Chat) -> ChatPrompt:
    calls = sum(len(message.tool_calls) for message in chat.messages[: MAX_MESSAGES + 1])
    check_counts(len(chat.messages), len(chat.tools), calls)
    args = chat.template_args_json
    at_most("template_args", len(args), LONGEST_TEMPLATE_ARGS, "characters")
    return ChatPrompt(
        messages=tuple(_message(message) for message in chat.messages),
        tools=tuple(_tool(tool) for tool in chat.tools),
        template_args=_template_args(args),
    )


def _message(message: pb.ChatMessage) -> Message:
    calls = (
        ToolCall(name=call.name, arguments=call.arguments_json or "{}", id=call.id or None)
        for call in message.tool_calls
    )
    return Message(
        role=message.role,
        content=_optional(message, "content"),
        name=message.name or None,
        tool_calls=tuple(calls),
        tool_call_id=message.tool_call_id or None,
    )


def _tool(tool: pb.Tool) -> Tool:
    return Tool(
        name=tool.name,
        description=tool.description or None,
        parameters=tool.parameters_json or None,
    )


def _template_args(text: str) -> Mapping[str, object]:
    if not text:
        return {}
    try:
        args = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValue("template_args", "is not JSON") from error
    if not isinstance(args, dict):
        raise InvalidValue("template_args", "is not a JSON object")
    return args


def _sampling(message: pb.Sampling) -> SamplingSpec:
    given = {name: getattr(message, name) for name in _SAMPLING_SCALARS if message.HasField(name)}
    bias = tuple(sorted(message.logit_bias.items()))
    return SamplingSpec(logit_bias=bias, **given)


def response(event: TurnEvent) -> pb.GenerateResponse:
    match event:
        case TurnStarted():
            return pb.GenerateResponse(started=_started(event))
        case TurnDelta():
            return pb.GenerateResponse(delta=_delta(event))
        case TurnRecovering(reason):
            return pb.GenerateResponse(recovering=pb.Recovering(reason=reason))
        case TurnFinished():
            return pb.GenerateResponse(finished=_finished(event))


def _started(event: TurnStarted) -> pb.Started:
    return pb.Started(
        prompt_tokens=event.prompt_tokens,
        cached_prefix=event.cached_prefix,
        miss=None if event.miss is None else _miss(event.miss, event.excerpt),
        ring=event.ring,
        lane=event.lane,
        seed=event.seed,
    )


def _miss(miss: Miss, excerpt: Excerpt | None) -> pb.Miss:
    said = None if excerpt is None else pb.Excerpt(before=excerpt.before, after=excerpt.after)
    return pb.Miss(
        reason=MISS_REASONS[miss.kind],
        token_index=miss.token_index,
        message_index=miss.message_index,
        excerpt=said,
    )


def _delta(event: TurnDelta) -> pb.Delta:
    logprobs = (_logprobs(row) for row in event.logprobs)
    return pb.Delta(token_ids=event.token_ids, text=event.text, logprobs=logprobs)


def _logprobs(row: RowLogprobs) -> pb.TokenLogprobs:
    top = (pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in row.top)
    return pb.TokenLogprobs(chosen=row.chosen, top=top)


def _finished(event: TurnFinished) -> pb.Finished:
    matched = event.matched_stop
    usage, timings = event.usage, event.timings
    return pb.Finished(
        finish_reason=FINISH_REASONS[event.reason],
        stop_string=matched if isinstance(matched, str) else None,
        stop_token_id=matched if isinstance(matched, int) else None,
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_prefix,
            generated_tokens=usage.generated_tokens,
        ),
        timings=pb.Timings(
            queue_s=timings.queue_s,
            prefill_s=timings.prefill_s,
            decode_s=timings.decode_s,
            drafted=timings.drafted,
            accepted=timings.accepted,
        ),
    )


def model(name: str, info: RingInfo) -> pb.GetModelResponse:
    return pb.GetModelResponse(
        name=name,
        fingerprint=info.model_fingerprint,
        vocab_size=info.vocab_size,
        max_context=info.max_rows,
        numerics=info.numerics,
        exact=info.exact,
        stages=info.stages,
        devices=info.devices,
        lanes=info.lanes,
    )


def ring_status(status: RingStatus) -> pb.RingStatus:
    return pb.RingStatus(
        name=status.name,
        ready=status.ready,
        reason=status.reason,
        epoch=status.epoch,
        lanes=0 if status.info is None else status.info.lanes,
        busy_lanes=status.busy_lanes,
        waiting_jobs=status.waiting_jobs,
        running_jobs=status.running_jobs,
        sessions=status.sessions,
        counts=_counts(status.counts),
        draining=status.draining,
        host_rows=0 if status.info is None else status.info.host_rows,
        stored_rows=status.stored_rows,
        pinned_rows=status.pinned_rows,
        recovering=status.recovering,
        spares=status.spares,
        replaced_stages=status.replaced,
    )


def _counts(counts: RingCounts) -> pb.RingCounts:
    return pb.RingCounts(
        frames=counts.frames,
        rows=counts.rows,
        discarded_frames=counts.discarded_frames,
        drafted=counts.drafted,
        accepted=counts.accepted,
        refusals=counts.refusals,
        prefilled_rows=counts.prefilled_rows,
        reused_rows=counts.reused_rows,
        stage_busy_s=counts.stage_busy_s,
        restored_rows=counts.restored_rows,
        ahead_rows=counts.ahead_rows,
        misses=(
            pb.MissCount(reason=MISS_REASONS[kind], turns=turns) for kind, turns in counts.misses
        ),
    )


def node(kept: RingNode) -> pb.Node:
    return pb.Node(
        ring=kept.ring,
        id=kept.node.id.hex(),
        parent_id=kept.node.parent.hex(),
        start=kept.node.start,
        end=kept.node.end,
        pinned=kept.node.pinned,
    )


def node_id(text: str) -> NodeId:
    """Raises InvalidValue."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != DIGEST_BYTES:
        raise InvalidValue("id", f"is no node's: they are {2 * DIGEST_BYTES} hexadecimal digits")
    return NodeId(raw)
