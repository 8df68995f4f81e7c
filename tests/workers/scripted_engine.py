"""An engine that does what a test says, and the order to load weights there."""

from controller.services.actors import SYSTEM
from controller.services.fleet.actions import weights_load_order
from workers.actions.weights_client import EngineWeights


class Engine:
    """Its weights; `orders` is what it was told and took."""

    def __init__(self):
        self.said = EngineWeights("absent")
        self.orders = []
        self.fails = {}  # method: exceptions to raise, `after` an order was taken

    def look(self):
        self._fail("look")
        return self.said

    def order_load(self, order, sources):
        self._fail("order")
        self.orders.append((order, [each.get("url") or each["kind"] for each in sources]))
        self.said = EngineWeights("loading", order, 100)
        self._fail("after")

    def _fail(self, when):
        if self.fails.get(when):
            raise self.fails[when].pop(0)

    def ends(self, *attempts):
        """(kind, url, error) of each."""
        tried = [{"kind": k, "url": u, "seconds": 0.5, "bytes": 0 if e else 100, "error": e} for k, u, e in attempts]
        here = bool(tried) and not tried[-1]["error"]
        self.said = EngineWeights("present" if here else "absent", self.said.order, 100, attempts=tried)


def order(warm, actor=SYSTEM, **options):
    return weights_load_order(actor=actor, instance_id=warm.pk, **options)
