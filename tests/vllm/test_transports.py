"""The adapters of `workers.flowd.transports` against what vLLM itself does with NCCL and Mooncake, by its source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import pytest

from benchmarks.servers.engines import VLLM_HOME, vllm_missing
from workers.flowd.transports import MooncakeEngine, NcclCommunicator

pytestmark = pytest.mark.vllm


def tree_of(path: str) -> ast.Module:
    if (missing := vllm_missing()) is not None:
        pytest.fail(missing, pytrace=False)
    [found] = VLLM_HOME.glob(f"lib/python3*/site-packages/vllm/distributed/{path}")
    return ast.parse(found.read_text())


def method(of: ast.Module, of_class: str, name: str) -> ast.FunctionDef:
    [found] = [each for each in ast.walk(of) if isinstance(each, ast.ClassDef) and each.name == of_class]
    return next(each for each in found.body if isinstance(each, ast.FunctionDef) and each.name == name)


def stored(within: ast.AST) -> set[str]:
    """Attributes that are set there."""
    return {
        each.attr for each in ast.walk(within) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    }


def calls(within: ast.AST, name: str) -> Iterator[ast.Call]:
    for each in ast.walk(within):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == name:
            yield each


def test_nccl_sends_as_the_adapter_calls_it() -> None:
    source = tree_of("device_communicators/pynccl.py")
    send = method(source, "PyNcclCommunicator", "send")
    assert [each.arg for each in send.args.args] == list(inspect.signature(NcclCommunicator.send).parameters)
    assert len(send.args.defaults) == 1, "the stream alone may be left out"
    assert ast.unparse(send.body[0]) == "if self.disabled:\n    return", "a disabled one reports nothing"
    assert "disabled" in stored(method(source, "PyNcclCommunicator", "__init__"))
    assert len(list(calls(send, "ncclSend"))) == 1


@pytest.mark.parametrize("name", ["batch_register_memory", "batch_transfer_sync_write"])
def test_mooncake_is_called_as_by_vllms_own_connector(name: str) -> None:
    source = tree_of("kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py")
    [made] = calls(source, name)
    assert ast.unparse(made.func) == f"self.engine.{name}"
    assert not made.keywords
    assert len(made.args) == len(inspect.signature(getattr(MooncakeEngine, name)).parameters) - 1
