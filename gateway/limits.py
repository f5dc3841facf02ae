"""How much one request may ask for: generous bounds, checked before anything is converted, rendered or tokenized.

Decides numbers and nothing else. A value that is wrong for another reason is refused where it is used.
"""

from __future__ import annotations

from coordinator.errors import ContextTooLong, InvalidValue
from gateway.chat.messages import Message, Tool
from gateway.turns import ChatPrompt, Prompt, TextPrompt, TokenPrompt, TurnRequest

# No limit of a model, but of what is still a conversation: 10,000 messages take 0.3 s to render and tokenize.
MAX_MESSAGES = 10_000
MAX_TOOLS = 1_000
MAX_TOOL_CALLS = 10_000  # of all messages together
LONGEST_TEMPLATE_ARGS = 65_536
# Each is looked for in each piece of text.
MAX_STOPS = 64
LONGEST_STOP = 1_024
MAX_STOP_TOKENS = 1_024
MAX_LOGIT_BIAS = 300  # the bound that OpenAI's API documents
LONGEST_SESSION_ID = 256

# A longer text cannot fit: no common vocabulary averages more characters a token. It spares tokenizing megabytes.
MAX_CHARS_PER_TOKEN = 64


def at_most(field: str, count: int, limit: int, what: str) -> None:
    if count > limit:
        raise InvalidValue(field, f"has {count} {what}; at most {limit} are taken")


def check_turn(turn: TurnRequest) -> None:
    """Raises InvalidValue."""
    if turn.max_tokens is not None and turn.max_tokens < 1:
        raise InvalidValue("max_tokens", f"must be at least 1, got {turn.max_tokens}")
    at_most("session_id", len(turn.session or ""), LONGEST_SESSION_ID, "characters")
    at_most("stop", len(turn.stop), MAX_STOPS, "strings")
    at_most("stop", max(map(len, turn.stop), default=0), LONGEST_STOP, "characters in one string")
    at_most("stop_token_ids", len(turn.stop_token_ids), MAX_STOP_TOKENS, "ids")
    at_most("logit_bias", len(turn.sampling.logit_bias), MAX_LOGIT_BIAS, "entries")


def check_prompt(prompt: Prompt, max_rows: int) -> None:
    """Raises InvalidValue and ContextTooLong."""
    if isinstance(prompt, ChatPrompt) and not prompt.messages:
        raise InvalidValue("messages", "is empty")
    check_size(prompt, max_rows)


def check_size(prompt: Prompt, max_rows: int) -> None:
    """Of a prompt that may be empty. Raises InvalidValue and ContextTooLong."""
    if isinstance(prompt, ChatPrompt):
        calls = sum(len(message.tool_calls) for message in prompt.messages)
        check_counts(len(prompt.messages), len(prompt.tools), calls)
    at_least = _letters(prompt) // MAX_CHARS_PER_TOKEN
    if at_least > max_rows:
        is_counted = isinstance(prompt, TokenPrompt)
        raise ContextTooLong(prompt_tokens=at_least, limit=max_rows, at_least=not is_counted)


def check_counts(messages: int, tools: int, calls: int) -> None:
    at_most("messages", messages, MAX_MESSAGES, "messages")
    at_most("tools", tools, MAX_TOOLS, "tools")
    at_most("messages", calls, MAX_TOOL_CALLS, "tool calls")


def _letters(prompt: Prompt) -> int:
    match prompt:
        case ChatPrompt(messages, tools, args, begun):
            said = sum(map(_message_letters, messages)) + sum(map(_tool_letters, tools))
            return said + len(str(args)) + len(begun)
        case TextPrompt(text):
            return len(text)
        case TokenPrompt(ids):
            return len(ids) * MAX_CHARS_PER_TOKEN


def _message_letters(message: Message) -> int:
    said = (message.role, message.content, message.name, message.tool_call_id)
    calls = sum(
        len(call.name) + len(str(call.arguments)) + len(call.id or "")
        for call in message.tool_calls
    )
    # An empty message has a frame of tokens around it as well.
    return 1 + sum(len(part) for part in said if part) + calls


def _tool_letters(tool: Tool) -> int:
    return len(tool.name) + len(tool.description or "") + len(str(tool.parameters))
