"""What OpenAI's clients ask of an answer's form: a JSON schema or any JSON object, as a grammar. It compiles nothing.

A schema that is not strict holds the answer too, as far as it can be held; of a strict one, all of it must be.
"""

from __future__ import annotations

import json

from coordinator.errors import InvalidValue
from gateway.http.fields import Fields
from gateway.turns import GrammarKind, GrammarSpec


def output_grammar(wanted: Fields, schema: Fields) -> GrammarSpec | None:
    """`wanted` has a type; `schema` is where, for a json_schema, the schema lies. Raises InvalidValue."""
    field = wanted.path("type").removesuffix(".type")
    kind = wanted.text("type")
    match kind:
        case None | "text":
            return None
        case "json_object":
            return GrammarSpec(GrammarKind.JSON_OBJECT, field=field)
        case "json_schema":
            return GrammarSpec(GrammarKind.JSON_SCHEMA, _schema(schema), field)
    raise InvalidValue(wanted.path("type"), f"{kind} is none of text, json_object, json_schema")


def _schema(holder: Fields) -> str:
    schema = holder.plain_object("schema")
    if not schema:
        raise InvalidValue(holder.path("schema"), "is missing")
    if not holder.flag("strict"):
        schema = {"x-guidance": {"lenient": True}, **schema}
    return json.dumps(schema, ensure_ascii=False)
