"""Bodies of /v1/completions and /v1/chat/completions: checked here, in full, before anything is queued.

Fields that the gateway uses are validated; those only the engine uses pass through if they are listed (`PASSED_ON`).
All others are stripped: our own, those with which engines transfer KV, and what nobody has thought of. A request has
one choice and one prompt: with `n` above 1 there would be no single time per output token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import orjson

from api.openai.protocol.errors import ApiError
from controller.core.snapshot import ModelConfig
from controller.predict.lengths import HIGHEST, MESSAGE_TOKENS, PromptText
from controller.slo.classes import SloError, SloFields, parse_slo_fields
from workers.vllm_plugin.hints import PREFIX

OUR_FIELDS = (
    "target_ttft", "target_tbt", "deadline", "waiting_time", "slo_class", "priority", "workflow_deadline",
    "thinking_deadline", "workflow_steps_left", "share_call", "checkpoint", "branch",
    "request_id",
)  # fmt: skip
# What engines tell each other through the gateway: a client could send them to any host with it.
BETWEEN_ENGINES = (
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "rid",
)
# What an engine gets of a body, besides the model and what the gateway adds. Engines take more: code to run
# (`custom_logit_processor`), folders to load (`lora_path`), templates, tensors, and fields of their next release.
PASSED_ON = frozenset((
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options", "n",
    "best_of", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "length_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "bad_words",
    "logit_bias", "allowed_token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix",
    "use_beam_search", "early_stopping", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "add_special_tokens", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs", "documents", "reasoning_effort", "include_reasoning", "separate_reasoning",
    "thinking_token_budget", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call",
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_decoding_backend", "guided_whitespace_pattern", "structural_tag", "json_schema", "regex", "ebnf",
    "return_token_ids", "return_tokens_as_token_ids", "return_prompt_text", "logprob_token_ids", "watermarking",
    "repetition_detection", "no_stop_trim", "modalities", "metadata", "user", "store", "service_tier", "verbosity",
    "vllm_xargs",
))  # fmt: skip
PART_TYPES = frozenset((
    "text", "input_text", "output_text", "refusal", "thinking", "image_url", "video_url", "audio_url", "input_audio",
))  # fmt: skip
TEXT_MARGIN = 1.25  # text is estimated: only what is clearly too long is refused here, the rest by the engine
_NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_WORKFLOW_FIELDS = ("workflow_id", "stage", "step_key")
_NOT_THE_ENGINES = (*_WORKFLOW_FIELDS, "parents", "state_ref")
LONGEST_STATE_REF = 512
MOST_PARENTS = 32  # of one step
_NOT_ASKED = ("stream", "stream_options", "metadata", "user")  # of a step: they do not change its answer
# Of `apply_chat_template`, in transformers and in engines.
TEMPLATE_ARGUMENTS = frozenset((
    "chat_template", "conversation", "messages", "tools", "documents", "tokenize", "tokenizer", "tokenizer_kwargs",
    "processor_kwargs", "padding", "truncation", "max_length", "add_generation_prompt", "continue_final_message",
))  # fmt: skip
MOST_OPTIONS = 32
LONGEST_OPTION = 4_096  # characters
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
LONGEST_CHECKPOINT_S = 3_600
LONGEST_NAME = 120  # characters of a workflow or stage, as records keep them


class NamedPlace(NamedTuple):
    """Of a step in its workflow, as its client names it. `parents`: None: not told. `tool_steps`: as records have
    them."""

    key: str
    parents: tuple[str, ...] | None
    tool_steps: tuple[Mapping[str, Any], ...] = ()


class NamedStep(NamedTuple):
    """A step of a workflow whose answer is to be kept. `asked`: digest of what it asks for, streamed or not."""

    workflow: str
    key: str
    asked: bytes
    state_ref: str = ""  # the client's own, given back with the answer


Item = dict[str, Any]  # of /v1/responses


class KeptInput(NamedTuple):
    """What is kept of the input of a response. `items`: the whole conversation."""

    items: list[Item]
    background: bool


class Parsed(NamedTuple):
    """What the gateway keeps of a body. `head`: the JSON for the engine, without its closing brace."""

    model: ModelConfig
    head: bytes
    streamed: bool
    keep_usage: bool
    prompt_tokens: int  # exact when the prompt came as token ids, else 0
    text: PromptText  # when the prompt came as text
    max_tokens: int | None
    asked: SloFields
    workflow: str
    stage: str
    step: NamedStep | None = None  # whose answer is to be kept
    checkpoint_s: float = 0.0  # how long the KV of that answer is to stay for branches
    branch: str = ""  # of a fork
    parents: tuple[str, ...] | None = None  # names of the steps that it depends on; None: not told
    equal: bytes = b""  # of a request that may share a call: the same for each that asks for the same
    echo: dict[str, Any] | None = None  # /v1/responses: what its answer repeats of the request
    kept: KeptInput | None = None  # the same: the response is kept with this


class Count(Protocol):
    """Tokens of texts by the model's tokenizer; None without one. `special`: with those around a text."""

    def __call__(self, model: ModelConfig, texts: Sequence[str], *, special: bool) -> int | None: ...


def uncounted(model: ModelConfig, texts: Sequence[str], *, special: bool) -> int | None:
    return None


Body = bytes | bytearray


def parse_request(raw: Body, models: Mapping[str, ModelConfig], count: Count = uncounted, *, chat: bool) -> Parsed:
    """Raises ApiError naming the field."""
    return parse_body(load(raw), models, count, chat=chat, shown="messages" if chat else "prompt")


def parse_body(
    body: dict[str, Any], models: Mapping[str, ModelConfig], count: Count, *, chat: bool, shown: str
) -> Parsed:
    """`shown`: what the client calls the field that holds its text. Raises ApiError naming the field."""
    model = _model(body, models)
    asked = _asked(body)
    streamed, keep_usage = _stream(body)
    if asked.thinking_deadline is not None and not (chat and streamed):
        told = "needs stream true" if chat else "is for chats and responses: engines tell no reasoning apart here"
        raise wrong("thinking_deadline", told)
    _numbers(body)
    _single_choice(body)
    workflow, stage, key, parents, state_ref = _metadata(body)
    for field in ("workflow_deadline", "workflow_steps_left"):
        if getattr(asked, field) is not None and not workflow:
            raise wrong(field, "needs metadata.workflow_id, which says which requests share it")
    max_tokens = _max_tokens(body, chat)
    tokens, texts = (0, _messages(body)) if chat else _prompt(body)
    messages = len(body["messages"]) if chat else 0
    special = not chat and body.get("add_special_tokens") is not False
    chars = sum(map(len, texts))
    countable = 0 < chars <= HIGHEST * model.context_tokens  # a text that is far too long is not counted
    counted = count(model, texts, special=special) if countable else None
    text = PromptText(chars, counted, messages)
    shares = _may_share(body)
    checkpoint_s, branch = _checkpoint(body, key), _branch(body)
    for field in body.keys() - PASSED_ON:
        del body[field]
    _extras(body)
    _template_options(body)
    _structure(body)
    body["model"] = model.name
    head = dump(body)[:-1]
    equal = _equal(body, chat=chat, keep_usage=keep_usage) if shares else b""
    step = NamedStep(workflow, key, _asked_for(body, chat), state_ref) if key else None
    parsed = Parsed(model, head, streamed, keep_usage, tokens, text, max_tokens, asked, workflow, stage, step)
    parsed = parsed._replace(equal=equal, checkpoint_s=checkpoint_s, branch=branch, parents=parents)
    _fits(parsed, shown)
    return parsed


def load(raw: Body) -> dict[str, Any]:
    """The JSON object of a body. Raises ApiError."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError("invalid_json", f"The body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError("invalid_json", "The body must be a JSON object.")
    return body


def dump(body: object) -> bytes:
    """The inverse of `load`. Raises ApiError, since reading allows deeper nesting than writing."""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        raise ApiError("invalid_json", f"The body is nested too deeply: {error}") from None


def wrong(field: str, what: str) -> ApiError:
    return ApiError("invalid_value", f"{field}: {what}", param=field)


def name_of(value: object, field: str, what: str = "", *, least: int = 1) -> str:
    """A name as a client gives it, which records keep: so without NUL, which PostgreSQL cannot store. `what`: said of
    it beside its length. Raises ApiError."""
    if not isinstance(value, str) or not least <= len(value) <= LONGEST_NAME:
        size = f"{least} to {LONGEST_NAME}" if least else f"at most {LONGEST_NAME}"
        raise wrong(field, f"must be a string of {size} characters{what}")
    if "\0" in value:
        raise wrong(field, "must not contain a NUL character, which cannot be recorded")
    return value


def _model(body: Mapping[str, Any], models: Mapping[str, ModelConfig]) -> ModelConfig:
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise wrong("model", "must be the name of a model")
    model = models.get(name)
    if model is None:
        raise ApiError("model_not_found", f"The model {name[:100]!r} does not exist.", param="model")
    return model


def _asked(body: Mapping[str, Any]) -> SloFields:
    try:
        return parse_slo_fields(body)
    except SloError as error:
        raise ApiError("invalid_slo", str(error), param=error.field) from None


def flag(body: Mapping[str, Any], field: str, shown: str | None = None) -> bool:
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise wrong(shown or field, "must be true or false")
    return bool(value)


def _stream(body: dict[str, Any]) -> tuple[bool, bool]:
    """(streamed, the client wants the usage event). Other stream options stay; usage is always requested."""
    streamed = flag(body, "stream")
    options = body.pop("stream_options", None)
    if options is not None and not isinstance(options, dict):
        raise wrong("stream_options", "must be an object")
    if options is not None and not streamed:
        raise wrong("stream_options", "is only allowed when stream is true")
    if not streamed:
        return False, False
    options = options or {}
    wanted = flag(options, "include_usage", "stream_options.include_usage")
    body["stream_options"] = {**options, "include_usage": True}
    return True, wanted


def integer(body: Mapping[str, Any], field: str, low: int, high: int) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(field, "must be an integer")
    if not low <= value <= high:
        raise wrong(field, f"must be between {low} and {high}")
    return value


def _numbers(body: Mapping[str, Any]) -> None:
    for field, (low, high) in _NUMBERS.items():
        value = body.get(field)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(field, "must be a number")
        if not low <= value <= high:
            raise wrong(field, f"must be between {low:g} and {high:g}")


def _single_choice(body: Mapping[str, Any]) -> None:
    for field in ("n", "best_of"):
        value = integer(body, field, 1, 1_000)
        if value is not None and value > 1:
            raise wrong(field, "must be 1: latency targets hold for one answer, send several requests instead")


def _max_tokens(body: Mapping[str, Any], chat: bool) -> int | None:
    """OpenAI's default for completions is 16; a chat answer is bounded by the context alone."""
    given = integer(body, "max_tokens", 1, 1 << 24)
    if chat:
        newer = integer(body, "max_completion_tokens", 1, 1 << 24)
        return newer if newer is not None else given
    return given if given is not None else 16


def _may_share(body: Mapping[str, Any]) -> bool:
    """Whether it may get the answer of an equal request. Only what has one answer may."""
    if not flag(body, "share_call"):
        return False
    seed = body.get("seed")
    seeded = isinstance(seed, int) and not isinstance(seed, bool)
    if not seeded and body.get("temperature") != 0 and body.get("top_k") != 1:
        raise wrong("share_call", "needs temperature 0 or a seed: otherwise equal requests get different answers")
    return True


def _checkpoint(body: Mapping[str, Any], key: str) -> float:
    """Seconds."""
    value = body.get("checkpoint")
    if value is None:
        return 0.0
    if not key:
        raise wrong("checkpoint", "needs metadata.step_key, the step whose KV is to be kept")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= LONGEST_CHECKPOINT_S:
        raise wrong("checkpoint", f"must be a number of seconds from 1 to {LONGEST_CHECKPOINT_S}")
    return float(value)


def _branch(body: Mapping[str, Any]) -> str:
    value = body.get("branch")
    if value is None:
        return ""
    return name_of(value, "branch", ", as the fork named it")


def _equal(body: Mapping[str, Any], *, chat: bool, keep_usage: bool) -> bytes:
    """The order of its fields does not matter. The stream's bytes are shared too, so what asks for other ones is not
    equal."""
    what = sha256(b"%d %d " % (chat, keep_usage))
    what.update(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))
    return what.digest()


def _asked_for(body: Mapping[str, Any], chat: bool) -> bytes:
    """The same for what has the same answer, however it is sent and whoever's it is."""
    what = sha256(b"%d " % chat)
    asked = {name: value for name, value in body.items() if name not in _NOT_ASKED}
    what.update(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS))
    return what.digest()


def _metadata(body: dict[str, Any]) -> tuple[str, str, str, tuple[str, ...] | None, str]:
    """(workflow id, stage, step key, parents, state_ref). The client's other metadata goes to the engine."""
    metadata = body.get("metadata")
    if metadata is None:
        return "", "", "", None, ""
    if not isinstance(metadata, dict):
        raise wrong("metadata", "must be an object")
    found = [name_of(metadata.get(field, ""), f"metadata.{field}", least=0) for field in _WORKFLOW_FIELDS]
    parents = parents_of(metadata.get("parents"), found[2], "metadata.")
    rest = {key: value for key, value in metadata.items() if key not in _NOT_THE_ENGINES}
    body.pop("metadata")
    if rest:
        body["metadata"] = rest
    if found[2] and not found[0]:
        raise wrong("metadata.step_key", "needs metadata.workflow_id, the workflow whose step it names")
    if parents is not None and not found[0]:
        raise wrong("metadata.parents", "needs metadata.workflow_id, the workflow whose steps they are")
    state_ref = state_ref_of(metadata.get("state_ref"), found[2], "metadata.", "step_key")
    return found[0], found[1], found[2], parents, state_ref


def state_ref_of(given: object, key: str, where: str, needs: str) -> str:
    """What a client says of its own state at a step, which nobody but it reads; "" without one. It is sent as a header:
    so printable ASCII. Raises ApiError."""
    if given is None:
        return ""
    if not isinstance(given, str) or not 0 < len(given) <= LONGEST_STATE_REF or not given.isprintable():
        raise wrong(f"{where}state_ref", f"must be a string of 1 to {LONGEST_STATE_REF} printable ASCII characters")
    if not given.isascii():
        raise wrong(f"{where}state_ref", "must be ASCII: encode other bytes")
    if given != given.strip():
        raise wrong(f"{where}state_ref", "must not begin or end with a space, which headers lose")
    if not key:
        raise wrong(f"{where}state_ref", f"needs {where}{needs}, the step that it is given back with")
    return given


def parents_of(given: object, own: str, where: str) -> tuple[str, ...] | None:
    """Names of the steps that one with the key `own` depends on; None: not told. `where`: what the field's name begins
    with. Raises ApiError."""
    field = f"{where}parents"
    if given is None:
        return None
    if not isinstance(given, list) or len(given) > MOST_PARENTS:
        raise wrong(field, f"must be a list of at most {MOST_PARENTS} step keys or request ids")
    for name in given:
        if name_of(name, field, " each, a step key or a request id") == own:
            raise wrong(field, f"{name!r} is this step itself: a step cannot depend on itself")
    if len(set(given)) < len(given):
        raise wrong(field, "names a step twice")
    return tuple(given)


def _extras(body: dict[str, Any]) -> None:
    """vLLM hands these on unread, to KV connectors too, where a value of another shape ends its engine. Hints to the
    plug-in come from the gateway alone, or a client would choose its own place in the queue."""
    extras = body.get("vllm_xargs")
    if extras is None:
        return
    if not isinstance(extras, dict):
        raise wrong("vllm_xargs", "must be an object")
    for name, value in extras.items():
        if name in BETWEEN_ENGINES or not isinstance(value, bool | int | float | str):
            raise wrong("vllm_xargs", f"{name[:100]!r} must be a string or a number, and none of the engines' own")
    body["vllm_xargs"] = {name: value for name, value in extras.items() if not name.lower().startswith(PREFIX)}


def _template_options(body: Mapping[str, Any]) -> None:
    """Engines pass these to `apply_chat_template` as they come: options of the template, none of that function's own
    arguments, among them a template to run."""
    options = body.get("chat_template_kwargs")
    if options is None:
        return
    field = "chat_template_kwargs"
    if not isinstance(options, dict):
        raise wrong(field, "must be an object")
    if len(options) > MOST_OPTIONS:
        raise wrong(field, f"must have at most {MOST_OPTIONS} entries")
    for name, value in options.items():
        if not _OPTION.fullmatch(name) or name in TEMPLATE_ARGUMENTS or name.startswith("return_"):
            raise wrong(field, f"{name[:100]!r} is not an option of a template")
        if not isinstance(value, bool | int | float | str) or (isinstance(value, str) and len(value) > LONGEST_OPTION):
            raise wrong(
                field, f"{name} must be true, false, a number or a string of at most {LONGEST_OPTION} characters"
            )


def _structure(body: Mapping[str, Any]) -> None:
    """vLLM keeps fields of its own, such as the library it has chosen, beside those that a client may set."""
    for field in ("structured_outputs", "response_format"):
        wanted = body.get(field)
        if wanted is None:
            continue
        if not isinstance(wanted, dict):
            raise wrong(field, "must be an object")
        within = wanted.get("json_schema")
        for name in (*wanted, *(within if isinstance(within, dict) else ())):
            if name.startswith("_"):
                raise wrong(field, f"{name[:100]!r} is not a field of it")


def _prompt(body: Mapping[str, Any]) -> tuple[int, list[str]]:
    """(tokens, texts) of a completion's prompt: text, token ids, or a list holding one of either."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if not prompt:
            raise wrong("prompt", "must not be empty")
        return 0, [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise wrong("prompt", "must be a string or a list of token ids")
    if isinstance(prompt[0], str | list):
        raise wrong("prompt", "must be one prompt: send several requests instead")
    # Exact types first: that scan runs in C even for a long prompt.
    if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= 1 << 31:
        raise wrong("prompt", "token ids must be non-negative integers")
    return len(prompt), []


def _messages(body: Mapping[str, Any]) -> list[str]:
    """The texts of a conversation, with its tools, which templates write out about as they came."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "must be a list with at least one message")
    texts = [dump(body["tools"]).decode()] if body.get("tools") else []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise wrong(where, "must be an object")
        if not isinstance(message.get("role"), str):
            raise wrong(f"{where}.role", "must be a string")
        texts += _content(message.get("content"), f"{where}.content")
    return texts


def _content(content: Any, where: str) -> list[str]:
    if content is None:  # an assistant's tool calls have no text
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise wrong(where, "must be a string or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise wrong(where, "each part must be an object with a type")
        _media(part, where)
        text = part.get("text", "")
        if not isinstance(text, str):
            raise wrong(where, "the text of a part must be a string")
        texts.append(text)
    return texts


def _media(part: Mapping[str, Any], where: str) -> None:
    """The engine fetches what a part links to, from within our network: data in the request, or a listed host."""
    if part["type"] not in PART_TYPES:
        raise wrong(where, f"a part's type must be one of: {', '.join(sorted(PART_TYPES))}")
    for name in part:
        if name.endswith("_url"):
            link = part[name]
            url = link.get("url") if isinstance(link, dict) else link
            if not isinstance(url, str) or not _may_fetch(url):
                raise wrong(where, f"{name[:100]} must be a data: URL, or one of a host that this deployment allows")


def _may_fetch(url: str) -> bool:
    if url[:5].lower() == "data:":
        return True
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    plain = "@" not in parts.netloc and "\\" not in url and not any(ord(letter) <= 32 for letter in url)
    return plain and parts.scheme == "https" and parts.hostname in _media_hosts


_media_hosts: frozenset[str] = frozenset()


def allow_media(hosts: Iterable[str]) -> None:
    """Set the hosts of which a request may name images, video and sound; called once, at the start."""
    global _media_hosts  # noqa: PLW0603
    _media_hosts = frozenset(host.lower() for host in hosts)


def _fits(parsed: Parsed, field: str) -> None:
    """Raises ApiError for a prompt beyond the context: counted tokens exactly, estimated ones with a margin."""
    context, text = parsed.model.context_tokens, parsed.text
    known = parsed.prompt_tokens or text.counted
    if known is None:
        estimated = MESSAGE_TOKENS * text.messages + text.chars / parsed.model.chars_per_token
        if estimated > TEXT_MARGIN * context:
            raise _too_long(field, f"about {estimated:.0f} tokens", context)
    elif known >= context:
        raise _too_long(field, f"{known} tokens", context)
    elif field == "prompt" and known + (parsed.max_tokens or 0) > context:
        raise _too_long(field, f"{known} tokens and max_tokens {parsed.max_tokens}", context)


def _too_long(field: str, what: str, context: int) -> ApiError:
    message = f"{field}: {what} exceed the model's context of {context} tokens."
    return ApiError("context_length_exceeded", message, param=field)
