"""What a turn's form asks of its answer: the parser that takes it apart, and the grammar that it is held to.

Decides nothing about models: how the served one writes its answers is the tokenizer's word.
"""

from __future__ import annotations

import random
from functools import partial

from coordinator.errors import InvalidValue
from gateway.chat.conversation import template_tools
from gateway.chat.parsing.demands import demanded
from gateway.chat.parsing.formats import AnswerFormat
from gateway.chat.parts import AnswerParser, PlainParser
from gateway.chat.templates import RenderedPrompt
from gateway.turns import ChatPrompt, GrammarSpec, TurnRequest

_ID_BITS = 96


def answer_parser(
    answers: AnswerFormat, turn: TurnRequest, prompt: RenderedPrompt, rng: random.Random
) -> AnswerParser | None:
    """None where nobody asked for parts."""
    if turn.form is None:
        return None
    if not isinstance(turn.prompt, ChatPrompt):
        return PlainParser()
    tools = template_tools(turn.prompt.tools)
    return answers.parser(prompt.text, tools, turn.form, partial(_call_id, rng))


def answer_grammar(
    answers: AnswerFormat, turn: TurnRequest, prompt: RenderedPrompt
) -> GrammarSpec | None:
    """Raises InvalidValue."""
    if turn.form is None:
        return turn.grammar
    if not isinstance(turn.prompt, ChatPrompt):
        if turn.form.must_call:
            raise InvalidValue("tool_choice", "needs messages and tools")
        return turn.grammar
    tools = template_tools(turn.prompt.tools)
    return demanded(answers, prompt.text, tools, turn.form, turn.grammar)


def _call_id(rng: random.Random) -> str:
    return f"call_{rng.getrandbits(_ID_BITS):024x}"
