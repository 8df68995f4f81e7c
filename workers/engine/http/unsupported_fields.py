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


class On(Enum):
    """Requests whose answer a field would change. `ANY`: what the answer holds; of an emulated engine too. Others say
    what the model reads and how it chooses its tokens: an emulated one reads and chooses nothing, and takes requests as
    clients send them to real ones."""

    ANY = "any"
    REAL = "real"
    CHAT = "chat"


class Row(NamedTuple):
    """`nothing`: values that ask for nothing, beside null. `within`: what a number may be, whoever gets it."""

    name: str
    on: On
    nothing: tuple[Any, ...] = EMPTY
    within: tuple[float, float] | None = None


TABLE = (
    # What an answer holds.
    Row("n", On.ANY, (1,)),
    Row("best_of", On.ANY, (1,)),
    Row("use_beam_search", On.ANY),
    Row("echo", On.ANY),
    Row("suffix", On.ANY),
    Row("logprobs", On.ANY),
    Row("top_logprobs", On.ANY, (*EMPTY, 0)),
    Row("prompt_logprobs", On.ANY),
    Row("logprob_token_ids", On.ANY),
    Row("return_token_ids", On.ANY),
    Row("return_prompt_text", On.ANY),
    # How tokens are chosen.
    Row("presence_penalty", On.REAL, (0,), (-2.0, 2.0)),
    Row("frequency_penalty", On.REAL, (0,), (-2.0, 2.0)),
    Row("repetition_penalty", On.REAL, (1,), (0.0, 1e9)),
    Row("min_p", On.REAL, (0,), (0.0, 1.0)),
    Row("logit_bias", On.REAL),
    Row("bad_words", On.REAL),
    Row("allowed_token_ids", On.REAL),
    Row("logits_processors", On.REAL),
    Row("watermarking", On.REAL),
    Row("response_format", On.REAL, (*EMPTY, {"type": "text"})),
    Row("structured_outputs", On.REAL),
    Row("guided_json", On.REAL),
    Row("guided_regex", On.REAL),
    Row("guided_choice", On.REAL),
    Row("guided_grammar", On.REAL),
    Row("structural_tag", On.REAL),
    # When they end, and as what text they are read.
    Row("repetition_detection", On.REAL),
    Row("thinking_token_budget", On.REAL, (-1,)),
    Row("skip_special_tokens", On.REAL, (True,)),
    # What the model reads.
    Row("prompt_embeds", On.REAL),
    Row("truncate_prompt_tokens", On.REAL, ()),
    Row("add_special_tokens", On.CHAT),
    Row("add_generation_prompt", On.CHAT, (True,)),
    Row("continue_final_message", On.CHAT),
    Row("chat_template", On.CHAT),
    Row("chat_template_kwargs", On.CHAT),
    Row("documents", On.CHAT),
    Row("reasoning_effort", On.CHAT),
    Row("tools", On.CHAT),
    Row("tool_choice", On.CHAT, ("none", "auto")),
)


# What a message says to the model beside its text. What it reasoned is dropped, as templates do with earlier turns.
IN_MESSAGES = ("tool_calls", "tools")


def refuse_unserved(body: fields.Body, chat: bool, real: bool) -> None:
    """Raises HttpError naming the field. `real`: the engine runs a model."""
    on = (On.ANY, On.REAL, *((On.CHAT,) if chat else ())) if real else (On.ANY,)
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


def _but(row: Row) -> str:
    """What it may be, where that is not plain from its name."""
    if not row.nothing or row.nothing[0] is False:
        return ""
    return f", other than {orjson.dumps(row.nothing[0]).decode()}"


def _same(value: Any, other: Any) -> bool:
    """To Python 0 is False: of `logprobs` one asks for something."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
