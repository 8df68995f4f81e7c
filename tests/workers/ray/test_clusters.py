"""RAY_ADDRESS and the tokens beside it."""

import pytest

from controller.core.errors import ConfigError
from workers.ray.clusters import clusters


def test_one_address_is_the_default_cluster(tmp_path):
    found = clusters("http://10.0.0.1:8265/", tmp_path)
    assert {name: each.url for name, each in found.items()} == {"default": "http://10.0.0.1:8265"}
    assert clusters("", tmp_path) == {}


def test_several_have_names_and_tokens_of_their_own(tmp_path):
    (tmp_path / "west").write_text("west-token\n")
    found = clusters("east=http://10.0.0.1:8265, west=https://ray.example", tmp_path)
    assert (found["east"].headers(), found["west"].headers()) == ({}, {"Authorization": "Bearer west-token"})
    assert "west-token" not in repr(found)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("10.0.0.1:8265", "is no URL of a dashboard"),
        ("ray://10.0.0.1:10001", "is no URL of a dashboard"),
        ("http://me:secret@host:8265", "'host:8265' is no URL"),
        ("http://host:port", "is no URL"),
        ("a=http://x:1,a=http://y:1", "names the cluster a twice"),
    ],
)
def test_an_address_that_is_none_is_refused(tmp_path, text, told):
    with pytest.raises(ConfigError, match=told) as refused:
        clusters(text, tmp_path)
    assert "secret" not in str(refused.value)


def test_a_token_that_cannot_be_one_is_refused_without_its_value(tmp_path):
    (tmp_path / "default").write_text("two words")
    with pytest.raises(ConfigError, match="must be one word") as refused:
        clusters("http://h:1", tmp_path)
    assert "two words" not in str(refused.value)
