"""OpenAI's chat and completion bodies to typed turns. Raises InvalidValue with the field's path; renders nothing.

What cannot be honoured is refused rather than ignored, where ignoring it would change an answer's meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from coordinator.errors import InvalidValue
from coordinator.requests import MAX_LOGPROBS, SamplingSpec
from gateway.chat.billing import without_billing
from gateway.chat.messages import Message, ToolCall
from gateway.chat.parts import AnswerForm
from gateway.http.asker import Asker
from gateway.http.fields import Fields
from gateway.http.openai.chat_tools import answer_form, name_of, tools_of
from gateway.http.openai.output_format import output_grammar
from gateway.limits import MAX_LOGIT_BIAS, MAX_STOPS, at_most
from gateway.turns import ChatPrompt, GrammarSpec, Prompt, TextPrompt, TokenPrompt, TurnRequest

# The bound that OpenAI's API documents is 128; a lane each is more than rings have.
_MOST_CHOICES = 16
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
# Efforts that templates know by these names; others would be refused by some.
_EFFORTS = frozenset({"low", "medium", "high"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


@dataclass(frozen=True, slots=True)
class Asked:
    """One body: a turn for each choice, and how the answer is to be sent."""

    turns: tuple[TurnRequest, ...]
    stream: bool
    include_usage: bool


def chat(body: Fields, asker: Asker) -> Asked:
    tools = tools_of(body)
    prompt = ChatPrompt(
        messages=tuple(_message(each) for each in body.objects("messages")),
        tools=tools,
        template_args=template_args(body),
    )
    wanted = _logprobs(body)
    form = answer_form(body, tools)
    return _asked(body, prompt, asker, wanted, form)


def _logprobs(body: Fields) -> int | None:
    most = body.whole("top_logprobs") or 0
    if not 0 <= most <= MAX_LOGPROBS:
        raise InvalidValue("top_logprobs", f"must be between 0 and {MAX_LOGPROBS}")
    if most and not body.flag("logprobs"):
        raise InvalidValue("top_logprobs", "needs logprobs")
    return most if body.flag("logprobs") else None


def completion(body: Fields, asker: Asker) -> Asked:
    _refuse_unserved(body)
    return _asked(body, _prompt(body), asker, body.whole("logprobs"))


def _refuse_unserved(body: Fields) -> None:
    """What would change the answer, and does not."""
    for name, unserved in (("echo", body.flag("echo")), ("suffix", body.text("suffix"))):
        if unserved:
            raise InvalidValue(name, "is not served")
    if (body.whole("best_of") or 1) > 1:
        raise InvalidValue("best_of", "is not served; use n")


def tokenized(body: Fields) -> Prompt:
    """Of /tokenize: messages or a prompt."""
    if body.has("messages"):
        return chat(body, Asker()).turns[0].prompt
    return _prompt(body)


def template_args(body: Fields) -> dict[str, Any]:
    effort = body.text("reasoning_effort")
    if effort is None and isinstance(body.raw("reasoning"), dict):
        effort = body.object("reasoning").text("effort")
    args: dict[str, Any] = {}
    if effort == "none":
        args["enable_thinking"] = False
    elif effort in _EFFORTS:
        args["reasoning_effort"] = effort
    return {**args, **body.plain_object("chat_template_kwargs")}


def _asked(
    body: Fields,
    prompt: Prompt,
    asker: Asker,
    logprobs: int | None,
    form: AnswerForm | None = None,
) -> Asked:
    asked = body.whole("n")
    choices = 1 if asked is None else asked
    if not 1 <= choices <= _MOST_CHOICES:
        raise InvalidValue("n", f"must be between 1 and {_MOST_CHOICES}, got {choices}")
    limit = body.whole("max_completion_tokens")
    seed = body.whole("seed")
    turn = TurnRequest(
        prompt=prompt,
        model=body.text("model") or "",
        session=asker.owner(body.text("prompt_cache_key")),
        sampling=sampling(body, logprobs),
        seed=None if seed is None else seed % 2**64,
        max_tokens=body.whole("max_tokens") if limit is None else limit,
        stop=stops(body),
        ignore_eos=body.flag("ignore_eos"),
        grammar=_grammar(body),
        form=form,
    )
    # One conversation is one session: further choices are branches of it, with seeds of their own.
    others = (
        replace(turn, session=None, seed=None if seed is None else (seed + n) % 2**64)
        for n in range(1, choices)
    )
    usage = body.object("stream_options").flag("include_usage")
    return Asked((turn, *others), body.flag("stream"), usage)


def _grammar(body: Fields) -> GrammarSpec | None:
    wanted = body.object("response_format")
    return output_grammar(wanted, wanted.object("json_schema"))


def stops(body: Fields) -> tuple[str, ...]:
    stops = body.texts("stop")
    at_most("stop", len(stops), MAX_STOPS, "strings")
    return tuple(stop for stop in stops if stop)


def sampling(body: Fields, logprobs: int | None) -> SamplingSpec:
    values = {name: body.number(name) for name in _FLOATS}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    top_k = body.whole("top_k") or 0
    return SamplingSpec(
        top_k=max(top_k, 0),  # -1 is off, as clients of other servers write it
        logit_bias=_bias(body),
        logprobs=logprobs,
        **given,
    )


def _bias(body: Fields) -> tuple[tuple[int, float], ...]:
    entries = body.plain_object("logit_bias")
    at_most("logit_bias", len(entries), MAX_LOGIT_BIAS, "entries")
    bias = Fields(entries, "logit_bias")
    try:
        return tuple(sorted((int(token), bias.number(token) or 0.0) for token in entries))
    except ValueError as error:
        raise InvalidValue("logit_bias", "has a key that is no token id") from error


def _prompt(body: Fields) -> Prompt:
    value = body.raw("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return TokenPrompt(tuple(value))
    raise InvalidValue("prompt", "must be one string, or one list of token ids")


def _message(message: Fields) -> Message:
    role = message.text("role")
    if role is None:
        raise InvalidValue(message.path("role"), "is missing")
    return Message(
        role="tool" if role == "function" else role,
        content=_content(message),
        name=message.text("name"),
        tool_calls=tuple(_call(call) for call in message.objects("tool_calls")),
        tool_call_id=message.text("tool_call_id"),
        reasoning=_reasoning(message),
    )


def _reasoning(message: Fields) -> str | None:
    """Clients send thoughts back by one of two names; other things of these names are theirs."""
    given = (message.raw("reasoning_content"), message.raw("reasoning"))
    return next((text for text in given if text and isinstance(text, str)), None)


def _content(message: Fields) -> str | None:
    value = message.raw("content")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidValue(message.path("content"), "must be a string or a list of parts")
    texts = [_part(part) for part in message.objects("content")]
    if message.text("role") in ("system", "developer"):
        texts = [without_billing(text) for text in texts]
    return "".join(texts)


def _part(part: Fields) -> str:
    kind = part.text("type") or "text"
    if kind not in _TEXT_PARTS:
        raise InvalidValue(part.path("type"), f"{kind} is nothing that this model reads")
    return part.text("refusal" if kind == "refusal" else "text") or ""


def _call(call: Fields) -> ToolCall:
    function = call.object("function")
    arguments = function.raw("arguments")
    if not isinstance(arguments, str | dict | None):
        raise InvalidValue(function.path("arguments"), "must be JSON text or an object")
    return ToolCall(name_of(function), "{}" if arguments is None else arguments, call.text("id"))
