"""The gateway records what it predicted the length of an answer from, and believes a trained forest."""

from __future__ import annotations

import asyncio

from api.openai.state.length_refinements import LengthRefinements
from controller.core import events as ev
from controller.predict.answer_lengths import FEATURES, TARGET, LengthsInForce
from tests.api.openai.gateways import TestBed, completion
from tests.controller.predict.test_answer_lengths import forest
from workers.backends.fake import Script


async def hung_up_after(bed: TestBed, tokens: int) -> None:
    """A stream of which the client waits for so many tokens."""
    bed.every(Script(tokens=300, hang_after=tokens))
    client = bed.send(completion(prompt=[1] * 200, max_tokens=300, stream=True))
    while client.answer.body.count(b"data: ") < tokens:
        await asyncio.sleep(0.005)
    await client.hang_up()


async def asked(bed: TestBed, **changes):
    answer = await bed.ask(completion(**changes))
    assert answer.status == 200, answer.body
    return bed.sink.records[-1]


def test_a_record_says_what_its_length_was_predicted_from():
    async def run():
        async with TestBed() as bed:
            first = await asked(bed, max_tokens=9, metadata={"workflow_id": "run"})
            told = dict(zip(FEATURES, first.length_features, strict=True))
            assert (told["prompt_tokens"], told["max_tokens"], told["workflow_calls"]) == (3, 9, 0)
            assert (first.length_bounds, first.length_version) == ([], None)
            second = await asked(bed, max_tokens=9, metadata={"workflow_id": "run"})
            told = dict(zip(FEATURES, second.length_features, strict=True))
            assert (told["workflow_calls"], told["workflow_answer"]) == (1, first.output_tokens)

    asyncio.run(run())


def test_with_a_forest_in_force_the_record_has_its_bounds_and_version():
    async def run():
        async with TestBed() as bed:
            bed.gateway.answer_lengths.take({"demo": LengthsInForce(7, forest())})
            record = await asked(bed, prompt=[1] * 200, max_tokens=300)
            low, high = record.length_bounds
            assert 1 <= low < high <= 300
            assert record.length_version == 7
            assert bed.gateway.answer_lengths.hits("demo").answers == 1

    asyncio.run(run())


def test_the_bound_of_a_running_answer_is_predicted_again_every_50_tokens():
    async def run():
        async with TestBed() as bed:
            gateway = bed.gateway
            gateway.answer_lengths.take({"demo": LengthsInForce(7, forest())})
            bed.every(Script(tokens=130, token_delay_s=0.005))
            told = []
            tell = gateway.runtime.tell
            gateway.runtime.tell = lambda event: told.append(event) or tell(event)
            refinements = LengthRefinements(gateway.answer_lengths, gateway.runtime)
            client = bed.send(completion(prompt=[1] * 200, max_tokens=300, stream=True))
            while not client.task.done():
                await refinements.refine()
                await asyncio.sleep(0.01)
            assert (await client.done()).status == 200
            refinements.close()
            bounded = [event for event in told if isinstance(event, ev.AnswerBounded)]
            assert len(bounded) == 2
            assert 50 < bounded[0].most_tokens < bounded[1].most_tokens <= 300
            (record,) = bed.sink.records
            assert bounded[0].request_id == record.id
            produced, least, most = record.refined_bounds
            assert 100 <= produced <= least <= most == bounded[1].most_tokens
            assert record.length_bounds[1] != most, "what was predicted at its arrival stays"

    asyncio.run(run())


def test_without_a_forest_nothing_is_predicted_again():
    async def run():
        async with TestBed() as bed:
            bed.every(Script(tokens=60))
            answer = await bed.ask(completion(max_tokens=300, stream=True))
            assert answer.status == 200
            assert bed.gateway.runtime.to_refine == []
            assert bed.sink.records[-1].refined_bounds is None

    asyncio.run(run())


def test_bounds_of_a_running_answer_move_the_level_of_so_many_tokens_out():
    """Its forest knows prompts whose answers have 10 to 30 tokens, and these have 130."""

    async def run():
        async with TestBed() as bed:
            gateway = bed.gateway
            lengths = gateway.answer_lengths
            lengths.take({"demo": LengthsInForce(7, forest())})
            bed.every(Script(tokens=130, token_delay_s=0.005))
            refinements = LengthRefinements(lengths, gateway.runtime)
            client = bed.send(completion(prompt=[1] * 200, max_tokens=300, stream=True))
            while not client.task.done():
                await refinements.refine()
                await asyncio.sleep(0.01)
            refinements.close()
            assert (await client.done()).status == 200
            assert [lengths.hits("demo", out).answers for out in (0, 50, 100, 200, 400)] == [1, 1, 1, 0, 0]
            for out in (0, 50, 100):
                missed = lengths.hits("demo", out).covered == 0
                assert (lengths.level("demo", out) > TARGET) == missed
            assert lengths.hits("demo").covered == 0
            assert lengths.level("demo", 200) == lengths.level("demo", 400) == TARGET

    asyncio.run(run())


def test_an_answer_that_was_cut_beyond_its_bound_counts_as_not_covered():
    async def run():
        async with TestBed() as bed:
            lengths = bed.gateway.answer_lengths
            lengths.take({"demo": LengthsInForce(7, forest())})
            await hung_up_after(bed, 2)
            below = bed.sink.records[-1]
            assert (below.outcome, below.output_tokens <= below.length_bounds[1]) == ("cancelled", True)
            assert lengths.hits("demo").answers == 0, "what was cut within its bound says nothing of it"
            await hung_up_after(bed, 60)
            beyond = bed.sink.records[-1]
            assert (beyond.outcome, beyond.output_tokens > beyond.length_bounds[1]) == ("cancelled", True)
            assert lengths.hits("demo") == (1, 0)
            assert lengths.level("demo") > TARGET
            bed.every(Script(tokens=5))
            after = await asked(bed)
            assert dict(zip(FEATURES, after.length_features, strict=True))["kind_mean"] == 0, "only whole ones count"

    asyncio.run(run())
