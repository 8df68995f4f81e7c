"""Alg. 1 of MFS as it reads: each step looks at every request and every port."""

from __future__ import annotations

from controller.flow.batches import BatchOrder, Pruned, effective_deadline


def order_slowly(batches, bandwidth, budget, now, within_batch=False, in_vain=True):
    """What `order_batches` finds. No load is negative but one of an exempt request."""
    deadlines = {batch.id: effective_deadline([each.deadline for each in batch.requests]) for batch in batches}
    ranked = sorted(batches, key=lambda batch: (deadlines[batch.id].red, batch.id))
    pruned, finish_s = [], {}
    for place, batch in enumerate(ranked):
        until = ranked[: place + 1]
        computed = now + sum(each.compute_s for each in until if each.unit == batch.unit)
        so_far = [(each.id, request) for each in until for request in each.requests]
        may_go = [pair for pair in so_far if not pair[1].exempt and (pair[0] == batch.id or not within_batch)]
        due = deadlines[batch.id].loose

        def finish(gone, so_far=so_far, computed=computed):
            seconds = {"": 0.0}
            for _, request in so_far:
                for port, load in request.load.items() if request.id not in gone else ():
                    seconds[port] = seconds.get(port, 0.0) + load / bandwidth[port]
            port = max(seconds, key=seconds.get)
            return port, computed + seconds[port]

        before = [each.request for each in pruned]
        taken = []
        while (late := finish({*before, *(each.request for each in taken)}))[1] > due:
            gone = {*before, *(each.request for each in taken)}
            left = [pair for pair in may_go if pair[1].id not in gone and pair[1].load.get(late[0], 0) > 0]
            if len(gone) >= budget or not left:
                break
            owner, request = max(left, key=lambda pair: pair[1].load[late[0]] / max(pair[1].value, 1e-6))
            taken.append(Pruned(request.id, owner, late[0], batch.id, late[1], due))
        own = sum(each.batch == batch.id for each in taken)
        saved = own < len(batch.requests) and finish({*before, *(each.request for each in taken)})[1] <= due
        pruned += taken if in_vain or saved else []
        finish_s[batch.id] = finish({each.request for each in pruned})[1]
    return BatchOrder(tuple(batch.id for batch in ranked), tuple(pruned), finish_s)
