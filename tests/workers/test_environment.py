"""A variable of the environment, or the file that stands for it."""

import pytest

from controller.core.errors import ConfigError
from workers.environment import read_variable


def test_a_value_is_read_from_the_variable_or_from_its_file(tmp_path):
    (tmp_path / "token").write_text("  from the file\n")
    file = {"TOKEN_FILE": str(tmp_path / "token")}
    assert read_variable({}, "TOKEN") == read_variable({"TOKEN": "", "TOKEN_FILE": ""}, "TOKEN") == ""
    assert read_variable({"TOKEN": "said"}, "TOKEN") == "said"
    assert read_variable(file, "TOKEN") == read_variable({**file, "TOKEN": "said"}, "TOKEN") == "from the file"


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_file_that_holds_nothing_is_refused_by_name(tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^TOKEN_FILE=") as refused:
        read_variable({"TOKEN": "said", "TOKEN_FILE": str(path)}, "TOKEN")
    assert refused.value.field == "TOKEN_FILE"
