"""Validation of the bodies of the two generation endpoints.

A field of vLLM that this engine does not support is refused by name, unless its value has no effect, since a client
could not see that it was ignored (`TABLE`). Other unknown fields are ignored, as in vLLM. Some of them are vLLM's and
have no effect here: `length_penalty` (of beam search), `truncation_side` (of truncation), `parallel_tool_calls` (of
tools), `include_reasoning` (of a reasoning parser), `spaces_between_special_tokens`, and those that control how events
are packed.
"""

from __future__ import annotations

import math
import uuid
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import orjson

from controller.core.steps import Sampling
from controller.core.told_hints import NO_HINTS, ToldHints
from workers.engine import fields
from workers.engine.checkpoints import LONGEST_LEASE_S
from workers.engine.errors import HttpError
from workers.engine.hints import parse_hints
from workers.engine.kv.disaggregation import offer_in, wants_early_offer, wants_remote_decode
from workers.engine.kv.transfer import Offer
from workers.engine.text.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
ROLES = ("system", "user", "assistant", "developer", "tool")
MOST_STOPS = 16
MOST_STOP_TOKENS = 128  # as in vLLM
SALT_FORBIDDEN = frozenset("@/\\\0")
GREEDY_BELOW = 1e-5  # below this temperature the likeliest token is taken


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The limits that requests are validated against. `context`: tokens. `samples`: whether a real model samples
    tokens; an emulated one accepts sampling parameters and ignores them."""

    model: str
    context: int
    tokenizer: Tokenizer
    samples: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """One valid request. `max_tokens` fits into the context. Targets in seconds (inf: none). `waited_s`: part of the
    TTFT that passed before the request came here. `prefill_only`: its KV is kept for another engine;
    `offers_early`: send the offer shortly before the end of the prefill; `offer`: decode only, where its KV is."""

    name: str
    chat: bool
    tokens: array[int]  # eight bytes a token, while a list takes forty
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_tokens: frozenset[int]
    stops: tuple[str, ...]
    keep_stop: bool
    seed: int | None
    priority: int
    salt: bytes
    stream: bool
    include_usage: bool
    sampling: Sampling
    ttft_s: float
    tpot_s: float
    waited_s: float
    value: float
    prefill_only: bool = False
    offers_early: bool = False
    offer: Offer | None = None
    checkpoint_s: float = 0.0  # how long its KV stays for branches; 0: not at all
    branch_of: str = ""  # the request whose checkpoint it goes on from
    hints: ToldHints = NO_HINTS


def parse_completion(body: fields.Body, headers: Mapping[bytes, bytes], served: RequestRules) -> Generation:
    _check_model(body, served.model)
    refuse_unserved(body, chat=False, real=served.samples)
    return _generation(body, headers, _prompt(body, served), "prompt", served)


def parse_chat(body: fields.Body, headers: Mapping[bytes, bytes], served: RequestRules) -> Generation:
    _check_model(body, served.model)
    refuse_unserved(body, chat=True, real=served.samples)
    return _generation(body, headers, _chat_tokens(body, served), "messages", served)


def _generation(
    body: fields.Body, headers: Mapping[bytes, bytes], tokens: list[int], source: str, served: RequestRules
) -> Generation:
    chat, context = source == "messages", served.context
    if len(tokens) >= context:
        raise too_long(context, len(tokens), source)
    max_tokens = _max_tokens(body, chat, context, len(tokens))
    min_tokens = fields.integer(body, "min_tokens", 0, low=0) or 0
    if min_tokens > max_tokens:
        raise HttpError(f"min_tokens must be at most max_tokens={max_tokens}, got {min_tokens}", "min_tokens")
    stream = fields.boolean(body, "stream")
    return Generation(
        name=_name(body, headers, chat),
        chat=chat,
        tokens=array("q", tokens),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=fields.boolean(body, "ignore_eos"),
        stop_tokens=fields.integers(body, "stop_token_ids", MOST_STOP_TOKENS, 0, served.tokenizer.vocab_size - 1),
        stops=fields.strings(body, "stop", most=MOST_STOPS),
        keep_stop=fields.boolean(body, "include_stop_str_in_output"),
        seed=fields.integer(body, "seed"),
        priority=_priority(body, headers),
        salt=_salt(body),
        stream=stream,
        include_usage=_include_usage(body, stream),
        sampling=_sampling(body, served.samples),
        ttft_s=fields.number(body, "target_ttft", math.inf, 0.0, 86_400.0),
        tpot_s=fields.number(body, "target_tbt", math.inf, 0.0, 86_400.0),
        waited_s=fields.number(body, "waited", 0.0, 0.0, 86_400.0),
        value=fields.number(body, "value", 1.0, 0.0, 1e9),
        prefill_only=_prefill_only(body, max_tokens, stream),
        offers_early=wants_early_offer(body),
        offer=offer_in(body),
        checkpoint_s=fields.number(body, "kv_checkpoint", 0.0, 0.0, LONGEST_LEASE_S),
        branch_of=fields.string(body, "kv_branch_of"),
        hints=parse_hints(body),
    )


def _prefill_only(body: fields.Body, max_tokens: int, stream: bool) -> bool:
    if not wants_remote_decode(body):
        return False
    if max_tokens != 1 or stream:
        raise HttpError("do_remote_decode needs max_tokens 1 and no stream", "kv_transfer_params.do_remote_decode")
    return True


def _check_model(body: fields.Body, model: str) -> None:
    asked = fields.string(body, "model", model)
    if asked != model:
        raise HttpError(f"The model `{asked}` does not exist.", "model", status=404)


def _sampling(body: fields.Body, used: bool) -> Sampling:
    """The sampling parameters, with vLLM's defaults: temperature 1, the whole vocabulary."""
    temperature = fields.number(body, "temperature", 1.0, 0.0, 1e9)
    top_p = fields.number(body, "top_p", 1.0, 0.0, 1.0)
    top_k = fields.integer(body, "top_k", 0, low=-1) or 0
    if used and top_p == 0.0:
        raise HttpError("top_p must be above 0", "top_p")
    return Sampling(0.0 if temperature < GREEDY_BELOW else temperature, max(0, top_k), top_p)


def too_long(context: int, tokens: int, param: str) -> HttpError:
    return HttpError(
        f"This model's maximum context length is {context} tokens, and one of them must be left for the answer; "
        f"your request has at least {tokens} input tokens. Please shorten the {param}.",
        param,
    )


def _prompt(body: fields.Body, served: RequestRules) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one prompt, which some clients send
    if isinstance(prompt, str):
        return text_tokens(prompt, served, "prompt", special=fields.boolean(body, "add_special_tokens", True))
    if isinstance(prompt, list) and prompt:
        return token_ids(prompt, "prompt", served.tokenizer)
    if prompt is None:
        raise HttpError("prompt is required", "prompt")
    raise HttpError("prompt must be one non-empty string or one non-empty list of token ids", "prompt")


def text_tokens(text: str, served: RequestRules, param: str, special: bool = True) -> list[int]:
    """The tokens of a prompt. A prompt that cannot fit is refused before it is encoded. Raises HttpError."""
    if not text:
        raise HttpError(f"{param} must not be empty", param)
    least = served.tokenizer.estimate(text)
    if least >= served.context:
        raise too_long(served.context, least, param)
    return served.tokenizer.encode(text, special)


def token_ids(values: list[Any], param: str, tokenizer: Tokenizer) -> list[int]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise HttpError(f"{param} must hold token ids (integers) only; one request has one prompt", param)
        if not 0 <= value < tokenizer.vocab_size:
            raise HttpError(
                f"token id {value} in {param} is out of vocabulary (0 to {tokenizer.vocab_size - 1})", param
            )
    return list(values)


def messages_of(body: fields.Body) -> list[tuple[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise HttpError("messages must be a non-empty list", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise HttpError(f"{where} must be an object with role and content", "messages")
    role = message.get("role")
    if role not in ROLES:
        raise HttpError(f"{where}.role must be one of {', '.join(ROLES)}", "messages")
    return role, _content(message.get("content"), where)


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise HttpError(f"{where}.content must be a string or a list of text parts", "messages")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise HttpError(f'{where}.content may hold parts {{"type": "text", "text": ...}} only', "messages")
    return "".join(part["text"] for part in content)


def _chat_tokens(body: fields.Body, served: RequestRules) -> list[int]:
    messages = messages_of(body)
    estimate = sum(served.tokenizer.estimate(content) for _, content in messages)
    if estimate >= served.context:
        raise too_long(served.context, estimate, "messages")
    return served.tokenizer.encode_chat(messages)


def _max_tokens(body: fields.Body, chat: bool, context: int, prompt_tokens: int) -> int:
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    room = context - prompt_tokens
    asked = fields.integer(body, name, low=1)
    if asked is None:
        return room if chat else min(DEFAULT_COMPLETION_TOKENS, room)
    if asked > room:
        raise HttpError(
            f"{name} is too large: {asked}. This model's maximum context length is {context} tokens and your request "
            f"has {prompt_tokens} input tokens ({asked} > {context} - {prompt_tokens}).",
            name,
        )
    return asked


def _name(body: fields.Body, headers: Mapping[bytes, bytes], chat: bool) -> str:
    named = headers.get(b"x-request-id", b"").decode("latin-1") or fields.string(body, "request_id")
    return f"{'chatcmpl' if chat else 'cmpl'}-{named or uuid.uuid4().hex}"


def _priority(body: fields.Body, headers: Mapping[bytes, bytes]) -> int:
    header = headers.get(b"x-vllm-priority")
    if header is None:
        return fields.integer(body, "priority", 0) or 0
    try:
        value = int(header)
    except ValueError:
        raise HttpError("X-Vllm-Priority must be an integer", "priority") from None
    return fields.integer({"priority": value}, "priority", 0) or 0


def _salt(body: fields.Body) -> bytes:
    if body.get("cache_salt") is None:
        return b""
    salt = fields.string(body, "cache_salt")
    if not 1 <= len(salt) <= 128 or SALT_FORBIDDEN.intersection(salt):
        raise HttpError("cache_salt must have 1 to 128 characters without @, /, \\ and NUL", "cache_salt")
    return salt.encode("utf-8", "surrogatepass")


def _include_usage(body: fields.Body, stream: bool) -> bool:
    options = fields.mapping(body, "stream_options")
    if options and not stream:
        raise HttpError("stream_options is only allowed with stream=true", "stream_options")
    return fields.boolean(options, "include_usage")


EMPTY: tuple[Any, ...] = (False, "", [], {})


class AppliesTo(Enum):
    """The requests that a field affects. `ANY`: all, also those of an emulated engine, since it changes the format of
    the response. `REAL`, `CHAT`: all requests, or chat requests, of an engine with a real model, since it changes the
    prompt or the sampling. An emulated engine ignores these, so that it accepts what clients send to real engines."""

    ANY = "any"
    REAL = "real"
    CHAT = "chat"


class FieldRule(NamedTuple):
    """`nothing`: values without effect, besides null. `within`: the valid range of a number, checked for all
    engines."""

    name: str
    on: AppliesTo
    nothing: tuple[Any, ...] = EMPTY
    within: tuple[float, float] | None = None


TABLE = (
    # Content of the response.
    FieldRule("n", AppliesTo.ANY, (1,)),
    FieldRule("best_of", AppliesTo.ANY, (1,)),
    FieldRule("use_beam_search", AppliesTo.ANY),
    FieldRule("echo", AppliesTo.ANY),
    FieldRule("suffix", AppliesTo.ANY),
    FieldRule("logprobs", AppliesTo.ANY),
    FieldRule("top_logprobs", AppliesTo.ANY, (*EMPTY, 0)),
    FieldRule("prompt_logprobs", AppliesTo.ANY),
    FieldRule("logprob_token_ids", AppliesTo.ANY),
    FieldRule("return_token_ids", AppliesTo.ANY),
    FieldRule("return_prompt_text", AppliesTo.ANY),
    # Sampling.
    FieldRule("presence_penalty", AppliesTo.REAL, (0,), (-2.0, 2.0)),
    FieldRule("frequency_penalty", AppliesTo.REAL, (0,), (-2.0, 2.0)),
    FieldRule("repetition_penalty", AppliesTo.REAL, (1,), (0.0, 1e9)),
    FieldRule("min_p", AppliesTo.REAL, (0,), (0.0, 1.0)),
    FieldRule("logit_bias", AppliesTo.REAL),
    FieldRule("bad_words", AppliesTo.REAL),
    FieldRule("allowed_token_ids", AppliesTo.REAL),
    FieldRule("logits_processors", AppliesTo.REAL),
    FieldRule("watermarking", AppliesTo.REAL),
    FieldRule("response_format", AppliesTo.REAL, (*EMPTY, {"type": "text"})),
    FieldRule("structured_outputs", AppliesTo.REAL),
    FieldRule("guided_json", AppliesTo.REAL),
    FieldRule("guided_regex", AppliesTo.REAL),
    FieldRule("guided_choice", AppliesTo.REAL),
    FieldRule("guided_grammar", AppliesTo.REAL),
    FieldRule("structural_tag", AppliesTo.REAL),
    # End of the output, and its text.
    FieldRule("repetition_detection", AppliesTo.REAL),
    FieldRule("thinking_token_budget", AppliesTo.REAL, (-1,)),
    FieldRule("skip_special_tokens", AppliesTo.REAL, (True,)),
    # The prompt.
    FieldRule("prompt_embeds", AppliesTo.REAL),
    FieldRule("truncate_prompt_tokens", AppliesTo.REAL, ()),
    FieldRule("add_special_tokens", AppliesTo.CHAT),
    FieldRule("add_generation_prompt", AppliesTo.CHAT, (True,)),
    FieldRule("continue_final_message", AppliesTo.CHAT),
    FieldRule("chat_template", AppliesTo.CHAT),
    FieldRule("chat_template_kwargs", AppliesTo.CHAT),
    FieldRule("documents", AppliesTo.CHAT),
    FieldRule("reasoning_effort", AppliesTo.CHAT),
    FieldRule("tools", AppliesTo.CHAT),
    FieldRule("tool_choice", AppliesTo.CHAT, ("none", "auto")),
)


# Fields of messages besides the text. Reasoning in earlier messages is dropped, as chat templates do.
IN_MESSAGES = ("tool_calls", "tools")


def refuse_unserved(body: fields.Body, chat: bool, real: bool) -> None:
    """Raises HttpError naming the field. `real`: whether the engine runs a real model."""
    on = (AppliesTo.ANY, AppliesTo.REAL, *((AppliesTo.CHAT,) if chat else ())) if real else (AppliesTo.ANY,)
    for row in TABLE:
        value = body.get(row.name)
        if value is None:
            continue
        if row.within is not None:
            fields.number(body, row.name, 0.0, *row.within)
        if row.on in on and not any(_same(value, each) for each in row.nothing):
            raise HttpError(f"{row.name} is not supported by this engine{_exception(row)}", row.name)
    if chat and real:
        _refuse_in_messages(body.get("messages"))


def _refuse_in_messages(messages: Any) -> None:
    """Invalid messages are refused elsewhere."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        for name in IN_MESSAGES if isinstance(message, dict) else ():
            if message.get(name) not in (None, *EMPTY):
                raise HttpError(f"messages[{index}].{name} is not supported by this engine", "messages")


def _exception(row: FieldRule) -> str:
    """The value that is allowed, if it is not obvious."""
    if not row.nothing or row.nothing[0] is False:
        return ""
    return f", other than {orjson.dumps(row.nothing[0]).decode()}"


def _same(value: Any, other: Any) -> bool:
    """Equality that distinguishes 0 from False: `logprobs` 0 has an effect, False has none."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
