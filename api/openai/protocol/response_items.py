"""Input items and tools of /v1/responses as messages and tools of a chat completion. Errors name the item and field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from api.openai.protocol.schemas import flag, wrong

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXT_PARTS = ("input_text", "output_text", "text")
CHOICES = ("auto", "none", "required")

Message = dict[str, Any]


def chat_messages(given: Any) -> list[Message]:
    """Messages from `input`: text, or items. Consecutive function calls become one message."""
    if isinstance(given, str):
        if not given:
            raise wrong("input", "must not be empty")
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", "must be a string or a list with at least one item")
    messages: list[Message] = []
    for index, item in enumerate(given):
        message = _item(item, f"input[{index}]")
        if "tool_calls" in message and messages and "tool_calls" in messages[-1]:
            messages[-1]["tool_calls"] += message["tool_calls"]
        else:
            messages.append(message)
    return messages


def chat_tools(body: Mapping[str, Any]) -> Message:
    """The chat's fields about functions; empty without tools."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    flag(body, "parallel_tool_calls")
    if tools is not None and not isinstance(tools, list):
        raise wrong("tools", "must be a list")
    if not tools:
        if choice not in (None, "auto", "none"):
            raise wrong("tool_choice", "needs tools")
        return {}
    told: Message = {"tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]}
    if choice is not None:
        told["tool_choice"] = _choice(choice)
    if body.get("parallel_tool_calls") is not None:
        told["parallel_tool_calls"] = body["parallel_tool_calls"]
    return told


def _tool(tool: Any, where: str) -> Message:
    if not isinstance(tool, dict):
        raise wrong(where, "must be an object")
    if tool.get("type") != "function":
        raise wrong(f"{where}.type", "only functions are supported")
    _string(tool, "name", where)
    if tool.get("parameters") is not None and not isinstance(tool["parameters"], dict):
        raise wrong(f"{where}.parameters", "must be an object")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _choice(choice: Any) -> str | Message:
    if isinstance(choice, str) and choice in CHOICES:
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": _string(choice, "name", "tool_choice")}}
    raise wrong("tool_choice", f"must be one of {', '.join(CHOICES)}, or name a function")


def _item(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise wrong(where, "must be an object")
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in ITEMS:
        raise wrong(f"{where}.type", f"must be one of {', '.join(ITEMS)}")
    return ITEMS[kind](item, where)


def _message(item: Message, where: str) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    return {"role": ROLES[role], "content": _content(item.get("content"), f"{where}.content")}


def _call(item: Message, where: str) -> Message:
    function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
    call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _output(item: Message, where: str) -> Message:
    content = _content(item.get("output"), f"{where}.output")
    return {"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": content}


def _string(item: Mapping[str, Any], field: str, where: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise wrong(f"{where}.{field}", "must be a string")
    return value


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise wrong(where, "must be a string or a list of parts")
    texts = [_text(part, f"{where}[{index}]") for index, part in enumerate(content)]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _text(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise wrong(where, "must be an object")
    if part.get("type") not in TEXT_PARTS:
        raise wrong(f"{where}.type", "only text is supported")
    return _string(part, "text", where)


def shown_item(item: Message) -> Message:
    """An input item as it is shown when its response is read: with its kind, its status and its text in parts."""
    shown: Message = {"type": "message", "status": "completed", **item}
    content = shown.get("content")
    if isinstance(content, str):
        kind = "output_text" if shown.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": content}]
    return shown


ITEMS: dict[str, Callable[[Message, str], Message]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
}
