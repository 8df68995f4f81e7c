"""What of vLLM's request fields this engine does not do: one table, for /v1/completions and /v1/chat/completions.

A client could not see that such a field was left out of its answer, so it is refused by name, unless its value asks for
nothing. Fields that no table names are ignored, as vLLM does. That is right too of those of vLLM's that change nothing
here: `length_penalty` (of beam search), `truncation_side` (of a truncation), `parallel_tool_calls` (of tools),
`include_reasoning` (of a reasoning parser), `spaces_between_special_tokens`, and what says how events are packed.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import orjson

from workers.engine import fields
from workers.engine.errors import HttpError

EMPTY: tuple[Any, ...] = (False, "", [], {})


class AppliesTo(Enum):
    """Requests whose answer a field would change. `ANY`: what the answer holds; of an emulated engine too. Others say
    what the model reads and how it chooses its tokens: an emulated one reads and chooses nothing, and takes requests as
    clients send them to real ones."""

    ANY = "any"
    REAL = "real"
    CHAT = "chat"


class FieldRule(NamedTuple):
    """`nothing`: values that ask for nothing, beside null. `within`: what a number may be, whoever gets it."""

    name: str
    on: AppliesTo
    nothing: tuple[Any, ...] = EMPTY
    within: tuple[float, float] | None = None


TABLE = (
    # What an answer holds.
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
    # How tokens are chosen.
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
    # When they end, and as what text they are read.
    FieldRule("repetition_detection", AppliesTo.REAL),
    FieldRule("thinking_token_budget", AppliesTo.REAL, (-1,)),
    FieldRule("skip_special_tokens", AppliesTo.REAL, (True,)),
    # What the model reads.
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


# What a message says to the model beside its text. What it reasoned is dropped, as templates do with earlier turns.
IN_MESSAGES = ("tool_calls", "tools")


def refuse_unserved(body: fields.Body, chat: bool, real: bool) -> None:
    """Raises HttpError naming the field. `real`: the engine runs a model."""
    on = (AppliesTo.ANY, AppliesTo.REAL, *((AppliesTo.CHAT,) if chat else ())) if real else (AppliesTo.ANY,)
    for row in TABLE:
        value = body.get(row.name)
        if value is None:
            continue
        if row.within is not None:
            fields.number(body, row.name, 0.0, *row.within)
        if row.on in on and not any(_same(value, each) for each in row.nothing):
            raise HttpError(f"{row.name} is not supported by this engine{_but(row)}", row.name)
    if chat and real:
        _refuse_in_messages(body.get("messages"))


def _refuse_in_messages(messages: Any) -> None:
    """What is no message at all is somebody else's to refuse."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        for name in IN_MESSAGES if isinstance(message, dict) else ():
            if message.get(name) not in (None, *EMPTY):
                raise HttpError(f"messages[{index}].{name} is not supported by this engine", "messages")


def _but(row: FieldRule) -> str:
    """What it may be, where that is not plain from its name."""
    if not row.nothing or row.nothing[0] is False:
        return ""
    return f", other than {orjson.dumps(row.nothing[0]).decode()}"


def _same(value: Any, other: Any) -> bool:
    """To Python 0 is False: of `logprobs` one asks for something."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
