import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.text.tokenizer import EOS, VOCAB_SIZE, Decoder, decode, encode, encode_chat, estimate, token_bytes


@settings(deadline=None)
@given(st.text())
def test_every_text_survives_the_round_trip(text):
    ids = encode(text)
    assert decode(ids) == text
    assert all(0 <= token < EOS for token in ids)
    assert estimate(text) <= len(ids)


def test_english_text_is_four_characters_a_token():
    assert len(encode("a" * 400)) == 100
    assert len(encode("a" * 401)) == 101


@settings(deadline=None)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20))
def test_any_ids_decode(ids):
    assert isinstance(decode(ids), str)


@pytest.mark.parametrize("token", [0, 255, 256, 65791, 65792, 16843007, 16843008, EOS - 1])
def test_ids_of_different_lengths_are_disjoint(token):
    data = token_bytes(token)
    assert encode("") == []
    assert 1 <= len(data) <= 4


def test_the_end_of_sequence_has_no_text():
    assert token_bytes(EOS) == b""


def test_a_negative_id_is_an_error():
    with pytest.raises(ValueError, match="-1"):
        token_bytes(-1)


def test_a_growing_conversation_keeps_its_tokens():
    first = encode_chat([("user", "hello there")])
    grown = encode_chat([("user", "hello there"), ("assistant", " the and"), ("user", "and?")])
    assert grown[: len(first)] == first
    assert grown[len(first) : len(first) + 2] == encode(" the and")


@settings(deadline=None)
@given(st.text(min_size=1))
def test_streamed_text_equals_the_whole(text):
    decoder, ids = Decoder(), encode(text)
    pieces = [decoder.feed(token, last=index == len(ids) - 1) for index, token in enumerate(ids)]
    assert "".join(pieces) == text
