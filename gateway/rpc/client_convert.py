"""The other direction of convert.py, for our own client: typed turns to protobuf and protobuf to typed events."""

from __future__ import annotations

import json

from coordinator.requests import (
    FinishReason,
    Miss,
    MissKind,
    RowLogprobs,
    SamplingSpec,
    Timings,
    Usage,
)
from gateway.chat.messages import JsonObject, Message, Tool, ToolCall
from gateway.pb import generation_pb2 as pb
from gateway.rpc.convert import FINISH_REASONS, MISS_REASONS
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


def generate_request(turn: TurnRequest, request_id: str = "") -> pb.GenerateRequest:
    message = pb.GenerateRequest(
        request_id=request_id,
        model=turn.model,
        session_id=turn.session or "",
        sampling=_sampling(turn.sampling, turn.given_seed),
        max_tokens=turn.max_tokens,
        stop=turn.stop,
        stop_token_ids=turn.stop_token_ids,
        ignore_eos=turn.ignore_eos,
        reuse=turn.reuse,
        draft=turn.draft,
        priority=turn.priority,
    )
    put_prompt(message, turn.prompt)
    if turn.grammar is not None:
        _put_grammar(message, turn.grammar)
    return message


def _put_grammar(message: pb.GenerateRequest, grammar: GrammarSpec) -> None:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            message.json_schema = grammar.text
        case GrammarKind.REGEX:
            message.regex = grammar.text
        case GrammarKind.LARK:
            message.lark_grammar = grammar.text
        case GrammarKind.JSON_OBJECT:
            message.json_object = True


def put_prompt(
    message: pb.GenerateRequest | pb.CountTokensRequest | pb.PinPrefixRequest, prompt: Prompt
) -> None:
    match prompt:
        case ChatPrompt():
            message.chat.CopyFrom(_chat(prompt))
        case TextPrompt(text):
            message.text = text
        case TokenPrompt(ids):
            message.token_ids.CopyFrom(pb.TokenIds(ids=ids))


def _chat(prompt: ChatPrompt) -> pb.Chat:
    return pb.Chat(
        messages=(_message(message) for message in prompt.messages),
        tools=(_tool(tool) for tool in prompt.tools),
        template_args_json=_json(prompt.template_args) if prompt.template_args else "",
    )


def _message(message: Message) -> pb.ChatMessage:
    return pb.ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=(_call(call) for call in message.tool_calls),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _call(call: ToolCall) -> pb.ToolCall:
    return pb.ToolCall(id=call.id or "", name=call.name, arguments_json=_json(call.arguments))


def _tool(tool: Tool) -> pb.Tool:
    parameters = "" if tool.parameters is None else _json(tool.parameters)
    return pb.Tool(name=tool.name, description=tool.description or "", parameters_json=parameters)


def _json(value: str | JsonObject) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _sampling(spec: SamplingSpec, seed: int | None) -> pb.Sampling:
    return pb.Sampling(
        temperature=spec.temperature,
        top_k=spec.top_k,
        top_p=spec.top_p,
        min_p=spec.min_p,
        repetition_penalty=spec.repetition_penalty,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        logit_bias=dict(spec.logit_bias),
        seed=seed,
        logprobs=spec.logprobs,
    )


def turn_event(message: pb.GenerateResponse) -> TurnEvent | None:
    """None for an event of a newer server that this client does not know."""
    match message.WhichOneof("event"):
        case "started":
            return _started(message.started)
        case "delta":
            return _delta(message.delta)
        case "recovering":
            return TurnRecovering(message.recovering.reason)
        case "finished":
            return _finished(message.finished)
    return None


def _started(message: pb.Started) -> TurnStarted:
    return TurnStarted(
        prompt_tokens=message.prompt_tokens,
        cached_prefix=message.cached_prefix,
        miss=_miss(message.miss) if message.HasField("miss") else None,
        ring=message.ring,
        lane=message.lane,
        seed=message.seed,
        excerpt=_excerpt(message.miss) if message.HasField("miss") else None,
    )


def _excerpt(message: pb.Miss) -> Excerpt | None:
    if not message.HasField("excerpt"):
        return None
    return Excerpt(message.excerpt.before, message.excerpt.after)


def _miss(message: pb.Miss) -> Miss | None:
    kind = miss_kind(message.reason)
    if kind is None:
        return None
    return Miss(
        kind,
        token_index=message.token_index if message.HasField("token_index") else None,
        message_index=message.message_index if message.HasField("message_index") else None,
    )


def miss_kind(reason: pb.MissReason) -> MissKind | None:
    return next((kind for kind, number in MISS_REASONS.items() if number == reason), None)


def _delta(message: pb.Delta) -> TurnDelta:
    logprobs = (
        RowLogprobs(row.chosen, tuple((top.token_id, top.logprob) for top in row.top))
        for row in message.logprobs
    )
    return TurnDelta(tuple(message.token_ids), message.text, tuple(logprobs))


def _finished(message: pb.Finished) -> TurnFinished:
    matched = message.WhichOneof("matched_stop")
    usage, timings = message.usage, message.timings
    return TurnFinished(
        reason=_reason(message.finish_reason),
        matched_stop=None if matched is None else getattr(message, matched),
        usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens),
        timings=Timings(
            queue_s=timings.queue_s,
            prefill_s=timings.prefill_s,
            decode_s=timings.decode_s,
            drafted=timings.drafted,
            accepted=timings.accepted,
        ),
    )


def _reason(reason: pb.FinishReason) -> FinishReason:
    known = (kind for kind, number in FINISH_REASONS.items() if number == reason)
    return next(known, FinishReason.STOP)
