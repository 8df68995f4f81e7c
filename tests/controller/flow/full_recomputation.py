"""Gate and scheduler that look at every flow in each call, as if everything had changed."""

from __future__ import annotations

import itertools

from controller.flow.gate import Gate, Rank
from controller.flow.scheduler import FlowHeld, FlowScheduler, PortSeen


class FullScheduler(FlowScheduler):
    def handle(self, events, now):
        self._stale = dict.fromkeys(self._flows, False)
        freed = {event.flow_id for event in events if isinstance(event, FlowHeld) and not event.held}
        held = [flow_id for flow_id, state in self._flows.items() if state.held and flow_id not in freed]
        return super().handle([*(FlowHeld(flow_id, True, now) for flow_id in held), *events], now)


class FullGate(Gate):
    def _measure(self, now):
        self._measured = {sender.number: sender for sender in self._senders.values()}
        super()._measure(now)

    def _last_going(self, port) -> Rank:
        return max((s.turn.rank for s in self._senders.values() if s.go and port in s.ports), default=())

    def _ports_seen(self):
        rates = {port: {} for port in self._seen}
        for sender in self._senders.values():
            for port in sender.ports if sender.rate else ():
                band = sender.turn.rank[0]
                rates[port][band] = rates[port].get(band, 0.0) + sender.rate
        return [PortSeen(port, self.bandwidth, of) for port, of in rates.items()]

    def _let_in(self, now):
        room, least = dict.fromkeys(self._seen, self.bandwidth), self.config.spare * self.bandwidth
        ordered = sorted(self._senders.values(), key=lambda each: (each.turn.rank, each.number))
        for _, group in itertools.groupby(ordered, key=lambda each: each.turn.rank):
            taken = {}
            for sender in sorted(group, key=lambda each: each.since):
                go = all(room[port] >= least for port in sender.ports)
                go = go or (sender.turn.floor > 0 and self._has_slice(sender, now))
                if go != sender.go:
                    sender.go, sender.since = go, now
                if go and not sender.waiting:
                    for port in sender.ports:
                        taken[port] = taken.get(port, 0.0) + min(sender.demand, self.bandwidth)
            for port, rate in taken.items():
                room[port] -= rate
        self._changed = {sender.number: sender for sender in self._senders.values()}
