"""What dispatcher tests share: a fleet, requests, and a driver that plays engines of fixed speed."""

import heapq

from controller.core import events as ev
from controller.core.types import InstanceSpec, LatencyCoefficients, Request, Targets
from controller.dispatch import build_dispatcher

SPEED = LatencyCoefficients(0.01, 1e-4, 0.0, 0.02, 0.0, 0.001)  # H3, H7


def up(name="w", slots=32, **more):
    return ev.InstanceUp(InstanceSpec(name, "m", latency=SPEED, max_num_seqs=slots, **more))


def request(name, arrival=0.0, ttft=0.7, tpot=0.5, prompt=100, output=10, wait=60.0, **more):
    return Request(name, arrival, Targets(ttft, tpot, more.pop("deadline", None), wait), prompt, output, "m", **more)


def sends(reply):
    return [(a.request.id, a.instance_id) for a in reply.actions if isinstance(a, ev.Send)]


def kinds(reply, kind):
    return [a.request.id for a in reply.actions if isinstance(a, kind)]


class Play:
    """Drives a dispatcher in virtual time: engines prefill one at a time at SPEED and decode at a fixed pace."""

    def __init__(self, policy, instances=2, overrides=None, slots=32):
        self.dispatcher = build_dispatcher(policy, overrides)
        self.heap = []
        self.serial = self.woken_by = 0
        self.now = 0.0
        self.busy = {}
        self.log = []  # (time, kind, request id, instance)
        self.ended = {}
        for i in range(instances):
            self.at(0.0, up(f"i{i}", slots))

    def at(self, when, event):
        self.serial += 1
        heapq.heappush(self.heap, (when, self.serial, event))

    def run(self, until=1e9):
        while self.heap and self.heap[0][0] <= until:
            self.now, serial, event = heapq.heappop(self.heap)
            if isinstance(event, ev.FirstToken | ev.Finished) and event.request_id in self.ended:
                continue
            if isinstance(event, ev.Woke) and serial != self.woken_by:
                continue  # as for a driver, only the wake-up of the last reply counts
            reply = self.dispatcher.handle([event], self.now)
            if isinstance(event, ev.FirstToken):
                self.log.append((self.now, "first", event.request_id, ""))
            if isinstance(event, ev.Finished):
                self.ended[event.request_id] = "finished"
            for action in reply.actions:
                self._act(action)
            self.woken_by = 0
            if reply.wake_at is not None and reply.wake_at > self.now:
                self.at(reply.wake_at, ev.Woke())
                self.woken_by = self.serial
        return self

    def _act(self, action):
        request = action.request if not isinstance(action, ev.Abort) else None
        if isinstance(action, ev.Send):
            self.log.append((self.now, "send", request.id, action.instance_id))
            start = max(self.now, self.busy.get(action.instance_id, 0.0))
            first = start + SPEED.prefill_a + SPEED.prefill_b * request.prompt_tokens
            self.busy[action.instance_id] = first
            self.at(first, ev.FirstToken(request.id))
            self.at(first + 0.025 * request.output_tokens, ev.Finished(request.id, request.output_tokens))
        elif isinstance(action, ev.Refuse | ev.Drop):
            assert request.id not in self.ended
            self.ended[request.id] = type(action).__name__.lower()
            self.log.append((self.now, self.ended[request.id], request.id, ""))

    def times(self, kind):
        return {name: at for at, what, name, _ in self.log if what == kind}
