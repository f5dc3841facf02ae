"""OpenTelemetry's names for generative AI, and our own beside them.

The conventions are still marked as in development (open-telemetry/semantic-conventions-genai): when a name changes
there, it changes here.
"""

from __future__ import annotations

OPERATION = "gen_ai.operation.name"
CHAT = "chat"
TEXT_COMPLETION = "text_completion"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_SEED = "gen_ai.request.seed"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
ERROR_TYPE = "error.type"

RING = "ringserve.ring"
LANE = "ringserve.lane"
MISS = "ringserve.miss"
QUEUE_S = "ringserve.queue_s"
PREFILL_S = "ringserve.prefill_s"
DECODE_S = "ringserve.decode_s"
DRAFTED = "ringserve.drafted_tokens"
ACCEPTED = "ringserve.accepted_tokens"

# Events of the span
FIRST_TOKEN = "ringserve.first_token"
RECOVERING = "ringserve.recovering"
