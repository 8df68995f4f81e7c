import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.steps import FinishReason, Seq
from workers.engine.text.streams import StopFilter, Stream
from workers.engine.text.tokenizer import encode


def make_stream(*stops: str, wake_each: bool = True) -> Stream:
    return Stream(Seq("s", 0.0, 1, 10), stops, wake_each)


def test_each_token_is_a_piece():
    stream = make_stream()
    for token in encode(" the and"):
        assert not stream.push(token, None)
    assert stream.take() == [" the", " and"]
    assert stream.take() == []


def test_a_stop_string_across_tokens_is_cut_and_named():
    stream = make_stream("e an")
    assert not stream.push(encode(" the")[0], None)
    assert stream.push(encode(" and")[0], None)
    assert "".join(stream.take()) == " th"
    assert (stream.finish, stream.stop_reason) == (FinishReason.STOP, "e an")


@pytest.mark.parametrize(("keep", "said"), [(False, [" the", ""]), (True, [" the", " and"])])
def test_a_token_that_ends_a_sequence_is_an_event_without_text(keep: bool, said: list[str]):
    stream = Stream(Seq("s", 0.0, 1, 10), (), True, keep)
    stream.push(encode(" the")[0], None)
    stream.seq.stopped_by = encode(" and")[0]
    assert not stream.push(encode(" and")[0], FinishReason.STOP)
    assert stream.take() == said
    assert (stream.finish, stream.stop_reason) == (FinishReason.STOP, encode(" and")[0])


def test_text_held_back_comes_out_when_an_end_token_follows():
    stream = make_stream("e xyz")
    stream.push(encode(" the")[0], None)
    stream.push(encode(" and")[0], FinishReason.STOP)
    assert ("".join(stream.take()), stream.stop_reason) == (" the", None)


def test_held_back_text_comes_out_when_no_stop_follows():
    stream = make_stream("e xyz")
    stream.push(encode(" the")[0], None)
    stream.push(encode(" and")[0], FinishReason.LENGTH)
    assert "".join(stream.take()) == " the and"
    assert (stream.finish, stream.stop_reason) == (FinishReason.LENGTH, None)


@settings(deadline=None)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3))
def test_streamed_stops_cut_where_the_whole_text_would_be_cut_first(text, stops):
    """No stop string ever gets out, and nothing but text before one is lost."""
    found, out = StopFilter(stops), ""
    for index, letter in enumerate(text):
        out += found.feed(letter, index == len(text) - 1)
        if found.found:
            break
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        assert found.found is not None
        assert text.startswith(out + found.found)
        assert len(out) + len(found.found) == min(ends)
    else:
        assert (out, found.found) == (text, None)


async def test_a_reader_wakes_with_the_first_token():
    stream = make_stream()
    reader = asyncio.create_task(stream.ready())
    await asyncio.sleep(0)
    assert not reader.done()
    stream.push(encode(" the")[0], None)
    await asyncio.wait_for(reader, 1)


async def test_an_unstreamed_reader_wakes_at_the_end_only():
    stream = make_stream(wake_each=False)
    reader = asyncio.create_task(stream.ready())
    await asyncio.sleep(0)
    stream.push(encode(" the")[0], None)
    await asyncio.sleep(0)
    assert not reader.done()
    stream.end(FinishReason.ABORT)
    await asyncio.wait_for(reader, 1)


@pytest.mark.parametrize("late", [FinishReason.ABORT, FinishReason.LENGTH])
def test_the_first_end_counts(late):
    stream = make_stream()
    stream.end(FinishReason.STOP)
    stream.end(late)
    assert stream.finish is FinishReason.STOP
