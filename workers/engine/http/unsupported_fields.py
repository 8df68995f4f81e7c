"""The request fields of vLLM that this engine does not support, in one table for /v1/completions and
/v1/chat/completions.

Such a field is refused by name, unless its value has no effect, since a client could not see that it was ignored.
Fields that are not in the table are ignored, as in vLLM. Some of them are vLLM's and have no effect here:
`length_penalty` (of beam search), `truncation_side` (of truncation), `parallel_tool_calls` (of tools),
`include_reasoning` (of a reasoning parser), `spaces_between_special_tokens`, and those that control how events are
packed.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import orjson

from workers.engine import fields
from workers.engine.errors import HttpError

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
