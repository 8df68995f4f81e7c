"""What tests of decode stages share: decode instances, prefills that ended, a migrator and what it told."""

from controller.core import events as ev
from controller.core.types import InstanceSpec, LatencyCoefficients, Role
from controller.dispatch import build_migrator
from tests.controller.dispatch.fleet import request

STEP = LatencyCoefficients(0.01, 1e-4, 0.0, 0.02, 0.0, 0.001)  # a decode step of n sequences: 20 + n ms


def up(name="d", role=Role.DECODE, slots=32, **more):
    return ev.InstanceUp(InstanceSpec(name, "m", latency=STEP, max_num_seqs=slots, role=role, **more))


def done(name, now=0.0, source="p", ttft=60.0, **more):
    """Its TTFT is far away, unless the test says otherwise."""
    asked = request(name, arrival=now, ttft=ttft, **more)
    return ev.PrefillDone(asked, source, asked.prompt_tokens)


def sent(name="a", prefill_s=0.5, source="p", **more):
    return ev.PrefillSent(request(name, **more), source, prefill_s=prefill_s)


def migrator(policy="hyperflexis", decoders=1, slots=32, **overrides):
    made = build_migrator(policy, overrides)
    made.handle([up(f"d{i}", slots=slots) for i in range(decoders)], 0.0)
    return made


def places(reply):
    return [(a.request.id, a.target) for a in reply.actions if isinstance(a, ev.Place)]


def of(reply, kind):
    return [action for action in reply.actions if isinstance(action, kind)]


def commit(made, name, target="d0", now=0.0):
    made.handle([ev.TransferStarted(name, target)], now)
    return made.handle([ev.TransferDone(name, target)], now)
