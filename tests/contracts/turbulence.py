"""A driver of a dispatcher that keeps books: engines of fixed speed, clients that hang up, engines that fail.

Whatever a dispatcher answers is checked against what it was told: it may send only what has come, has not ended and is
nowhere else, and only to an instance that is there.
"""

import heapq
from itertools import count

from controller.core import events as ev
from controller.dispatch import build_dispatcher
from tests.controller.dispatch.fleet import SPEED, request, up


class Turbulence:
    """`ended`: by id, how; `running`: id to (instance, number of the sending), what engines have now."""

    def __init__(self, policy, overrides=None, instances=2, slots=4):
        self.dispatcher = build_dispatcher(policy, overrides)
        self.now, self.heap, self.serial = 0.0, [], count()
        self.asked, self.running, self.decoding, self.ended = {}, {}, set(), {}
        self.busy, self.down, self.slots = {}, set(), slots
        self.sendings = count(1)
        for i in range(instances):
            self.at(0.0, up, f"i{i}", slots)

    def at(self, when, what, *more):
        heapq.heappush(self.heap, (when, next(self.serial), what, more))

    def arrives(self, name, at, **wanted):
        self.at(at, self._arrived, request(name, at, **wanted))

    def hangs_up(self, name, at):
        self.at(at, self._cancelled, name)

    def breaks(self, instance, at, for_s):
        self.at(at, self._broken, instance)
        self.at(at + for_s, self._back, instance)

    def run(self):
        while self.heap:
            self.now, _, what, more = heapq.heappop(self.heap)
            events = what(*more)
            events = [events] if isinstance(events, tuple) else list(events or ())
            if events:
                self._tell(events)
        return self

    # ---- what happens ----------------------------------------------------------------------------------------------

    def _arrived(self, asked):
        self.asked[asked.id] = asked
        return ev.Arrived(asked)

    def _cancelled(self, name):
        if name not in self.asked or name in self.ended:
            return ()
        self._end(name, "cancelled")
        return ev.Cancelled(name)

    def _first(self, name, sending):
        if self.running.get(name, ("", 0))[1] != sending:
            return ()
        self.decoding.add(name)
        return ev.FirstToken(name)

    def _finished(self, name, sending):
        if self.running.get(name, ("", 0))[1] != sending:
            return ()
        self._end(name, "finished")
        return ev.Finished(name, self.asked[name].output_tokens)

    def _broken(self, instance):
        if instance in self.down:
            return []
        self.down.add(instance)
        lost = [name for name, (where, _) in self.running.items() if where == instance]
        early = {name for name in lost if name not in self.decoding}
        for name in lost:
            del self.running[name]
            if name not in early:
                self._end(name, "cut")
        return [ev.InstanceDown(instance), *(ev.Failed(name, name in early, "gone") for name in lost)]

    def _back(self, instance):
        self.down.discard(instance)
        self.busy[instance] = self.now
        return up(instance, self.slots)

    # ---- what the dispatcher answers -------------------------------------------------------------------------------

    def _tell(self, events):
        reply = self.dispatcher.handle(events, self.now)
        for action in reply.actions:
            self._take(action)
        if reply.wake_at is not None:
            assert reply.wake_at > self.now or not reply.actions, "asks to be asked again at once"
            self.at(max(reply.wake_at, self.now + 1e-6), ev.Woke)

    def _take(self, action):
        if isinstance(action, ev.Abort):
            assert self.ended[action.request_id] == "cancelled"
            return
        name = action.request.id
        assert action.request is self.asked[name], "invented"
        assert name not in self.ended, f"ended already: {self.ended.get(name)}"
        assert name not in self.running, "at an engine already"
        if isinstance(action, ev.Send):
            assert action.instance_id not in self.down
            sending = next(self.sendings)
            self.running[name] = action.instance_id, sending
            start = max(self.now, self.busy.get(action.instance_id, 0.0))
            first = start + SPEED.prefill_a + SPEED.prefill_b * action.request.prompt_tokens
            self.busy[action.instance_id] = first
            self.at(first, self._first, name, sending)
            self.at(first + 0.025 * action.request.output_tokens, self._finished, name, sending)
        else:
            assert isinstance(action, ev.Refuse | ev.Drop), action
            self._end(name, type(action).__name__.lower())

    def _end(self, name, how):
        assert name not in self.ended
        self.running.pop(name, None)
        self.ended[name] = how
