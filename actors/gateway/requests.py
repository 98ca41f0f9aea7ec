"""Requests of agents: what is served, what is refused, and each API's form of an error.

Sampling is the recipe's. What a client may not change is left out of its request where that only
costs the client its wish (temperature, top_p, top_k, seed), and refused where the answer would have
another form or probability than the policy's own.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Api = Literal["openai", "anthropic"]

MODEL = "policy"
"""Name of the model; a client may ask for any."""
MESSAGES = "/v1/messages"
SERVED = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/responses": "POST",
    MESSAGES: "POST",
    f"{MESSAGES}/count_tokens": "POST",
    "/v1/models": "GET",
}
"""Method of every address that is served."""
FREE = {f"{MESSAGES}/count_tokens", "/v1/models"}
"""Addresses that sample nothing, so that no limit of turns or tokens applies."""
_KEPT = """
    messages prompt input instructions system tools tool_choice parallel_tool_calls
    stream stream_options max_tokens max_completion_tokens max_output_tokens stop stop_sequences
    logprobs top_logprobs include return_token_ids chat_template_kwargs reasoning reasoning_effort
    thinking
"""
KEPT = frozenset(_KEPT.split())
"""Parameters that are passed on; others are ignored, or refused."""
_REFUSED = """
    n best_of logit_bias presence_penalty frequency_penalty repetition_penalty length_penalty min_p
    min_tokens ignore_eos bad_words allowed_token_ids stop_token_ids thinking_token_budget
    structured_outputs response_format text.format output_config.format tool_choice functions echo
    suffix prompt_logprobs prompt_embeds use_beam_search modalities previous_response_id
    previous_input_messages conversation background kv_transfer_params
"""
REFUSED = _REFUSED.split()
"""Parameters that are refused, those within others included, unless they ask for nothing."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("response_format", "text.format"), ({"type": "text"},)),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "modalities": (["text"],),
}
"""Values of such parameters that ask for nothing, besides empty ones, None, 0 and false."""
_NOT_TEXT = """
    image image_url input_image image_embeds audio input_audio audio_url audio_embeds video
    video_url file input_file document
"""
NOT_TEXT = frozenset(_NOT_TEXT.split())
"""Types of parts of a message that are refused."""
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Refused(Exception):
    """A request is answered by an error."""

    def __init__(self, status: int, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.parameter = status, parameter


def api_of(path: str) -> Api:
    """Return the API that an address belongs to."""
    return "anthropic" if path.startswith(MESSAGES) else "openai"


def error_body(api: Api, refused: Refused) -> bytes:
    """Return an error in the form of an API."""
    status, message = refused.status, str(refused)
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if api == "anthropic":
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    else:
        described = {"type": kind, "param": refused.parameter, "code": status}
        body = {"error": {"message": message, **described}}
    return json.dumps(body).encode()


def passed_on(body: bytes) -> bytes:
    """Return a request as it is passed on; raise Refused for what cannot be answered."""
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            raise Refused(400, f"the body must be a JSON object, found {type(request).__name__}")
        _check(request)
        kept = {name: value for name, value in request.items() if name in KEPT}
        return json.dumps({**kept, "model": MODEL}).encode()
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON that can be read: {error}") from None


def _check(request: Mapping[str, Any]) -> None:
    """Raise Refused for a parameter that has no place in training, and for parts but text."""
    for name in REFUSED:
        outer, _, inner = name.partition(".")
        value = request.get(outer)
        if inner:
            value = value.get(inner) if isinstance(value, dict) else None
        if value and value not in NEUTRAL.get(name, ()):
            raise Refused(
                400,
                f"{name} = {json.dumps(value)[:200]} is not served: the policy is sampled as the "
                "recipe says, from whole requests; leave it out",
                name,
            )
    for name in ("messages", "input"):
        for part in _parts(request.get(name)):
            if str(part.get("type")) in NOT_TEXT:
                raise Refused(400, f"{name} has a part of type {part['type']}; only text", name)


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    for part in value if isinstance(value, list) else ():
        if isinstance(part, dict):
            yield part
            for inner in ("content", "output"):
                yield from _parts(part.get(inner))
