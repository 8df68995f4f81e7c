"""The instances that a scheduler knows, by id, kept up to date by events. Dispatcher and migrator have one each."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from controller.core import events as ev
from controller.core.types import Role
from controller.dispatch.learned import relearn
from controller.dispatch.shadow_state import ShadowInstance

InstanceEvent = ev.InstanceDraining | ev.SharesChanged | ev.FirstByteDelay | ev.Telemetry
INSTANCE_EVENTS = (ev.InstanceDraining, ev.SharesChanged, ev.FirstByteDelay, ev.Telemetry)


def longest_context(instances: Iterable[ShadowInstance]) -> int:
    """In tokens, of instances that prefill; 0 without any. Sleeping ones count, since requests wait for them; draining
    ones do not."""
    able = (each for each in instances if each.state != "draining" and each.spec.role is not Role.DECODE)
    return max((each.spec.max_model_len for each in able), default=0)


class Roster:
    """Instances by id. An event about an instance that is gone changes nothing."""

    def __init__(self) -> None:
        self.instances: dict[str, ShadowInstance] = {}
        self._by_model: dict[str, dict[str, ShadowInstance]] = {}

    def of_model(self, model: str) -> Collection[ShadowInstance]:
        """The instances of one model; fleets may serve many."""
        return self._by_model.get(model, {}).values()

    def handle(self, event: ev.Event) -> None:
        if isinstance(event, ev.InstanceUp):
            self.up(event)
        elif isinstance(event, ev.InstanceDown):
            self.down(event.instance_id)
        elif isinstance(event, INSTANCE_EVENTS):
            instance = self.instances.get(event.instance_id)
            if instance is not None:
                _change(instance, event)

    def up(self, event: ev.InstanceUp) -> ShadowInstance:
        """A new instance, or new settings of a known one; what is known of its requests and latency stays."""
        spec = event.spec
        known = self.instances.get(spec.id)
        if known is not None and known.spec.model == spec.model:
            if spec.latency is not None and spec.latency != known.spec.latency:
                known.set_profile(spec.latency)
            known.spec = spec
            known.state = "up"
            known.changes += 1
            return known
        if known is not None:
            self.down(spec.id)
        self.instances[spec.id] = instance = ShadowInstance(spec)
        if event.learned:
            relearn(instance, event.learned)
        self._by_model.setdefault(spec.model, {})[spec.id] = instance
        return instance

    def down(self, instance_id: str) -> ShadowInstance | None:
        instance = self.instances.pop(instance_id, None)
        if instance is not None:
            instance.state = "down"
            self._by_model[instance.spec.model].pop(instance_id, None)
        return instance


def _change(instance: ShadowInstance, event: InstanceEvent) -> None:
    if isinstance(event, ev.InstanceDraining):
        instance.state = "draining"
        instance.changes += 1
    elif isinstance(event, ev.SharesChanged):
        instance.share = min(1.0, max(0.0, event.share))
    elif isinstance(event, ev.FirstByteDelay):
        instance.first_byte = (event.fixed_s, event.s_a_token)
        instance.changes += 1
    else:
        instance.observe_load(event.load)
