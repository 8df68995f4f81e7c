"""The gateway records what it predicted the length of an answer from, and believes a trained forest."""

from __future__ import annotations

import asyncio

from api.openai.state.length_refinements import LengthRefinements
from controller.core import events as ev
from controller.predict.answer_lengths import FEATURES, LengthsInForce
from tests.api.openai.gateways import TestBed, completion
from tests.controller.predict.test_answer_lengths import forest
from workers.backends.fake import Script


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
            assert bed.gateway.answer_lengths.hits["demo"].answers == 1

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
