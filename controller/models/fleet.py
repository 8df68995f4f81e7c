"""Models that are served, the hosts and devices they can run on, and the instances that serve them."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from controller.core.addresses import shown_url
from controller.core.types import DEFAULT_MAX_NUM_SEQS, KEY_MADE
from controller.engine.placement import DEFAULT_CLUSTER
from controller.models.base import NAME, Versioned, above_zero, positive, zero_or_more
from controller.scale.provisioning import Abilities, abilities, source_of


class Role(models.TextChoices):
    """`core.types.Role` as a column, with labels."""

    COLLOCATED = "collocated", "Prefill and decode"
    PREFILL = "prefill", "Prefill"
    DECODE = "decode", "Decode"


class KvRole(models.TextChoices):
    """vLLM's `kv_role`: the sides of a KV transfer that a server was started for."""

    BOTH = "kv_both", "Both sides"
    PRODUCER = "kv_producer", "Gives KV"
    CONSUMER = "kv_consumer", "Takes KV"


class ServedModel(Versioned):
    """A model under its public name. Without a tokenizer, prompt tokens are estimated from characters."""

    name = models.CharField(max_length=120, unique=True, validators=[NAME])
    aliases = models.JSONField(default=list, blank=True)
    context_tokens = models.PositiveIntegerField(default=4096, validators=[above_zero])
    chars_per_token = models.FloatField(default=4.0, validators=[above_zero])
    tokenizer = models.CharField(max_length=500, blank=True, default="", db_default="")

    class Meta:
        db_table = "served_model"
        ordering = ["name"]
        constraints = [
            positive("context_tokens", name="served_model_context_positive"),
            positive("chars_per_token", name="served_model_chars_positive"),
        ]

    def __str__(self) -> str:
        return self.name


class LatencyProfile(models.Model):
    """Coefficients of HyperFlexis eq. 1-2 (core.types.LatencyCoefficients as a JSON object) with their fit."""

    model = models.ForeignKey(ServedModel, on_delete=models.CASCADE, related_name="latency_profiles")
    device_kind = models.CharField(max_length=64)
    tp = models.PositiveSmallIntegerField(default=1, validators=[above_zero])
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.COLLOCATED)
    coefficients = models.JSONField()
    fit_errors = models.JSONField(default=dict, blank=True)
    samples = models.PositiveIntegerField(default=0)
    source = models.CharField(max_length=64, blank=True)
    fitted_at = models.DateTimeField(auto_now_add=True)
    active = models.BooleanField(default=True)

    class Meta:
        db_table = "latency_profile"
        ordering = ["model_id", "device_kind", "tp", "role", "-fitted_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["model", "device_kind", "tp", "role"],
                condition=Q(active=True),
                name="latency_profile_one_active",
            ),
            positive("tp", name="latency_profile_tp_positive"),
        ]

    def __str__(self) -> str:
        return f"{self.model_id} on {self.device_kind} x{self.tp}"


class Host(Versioned):
    """A machine with devices."""

    name = models.CharField(max_length=120, unique=True, validators=[NAME])
    zone = models.CharField(max_length=64, blank=True)
    labels = models.JSONField(default=dict, blank=True)

    class Meta:
        db_table = "host"
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Device(Versioned):
    """An accelerator, or the processor where there is none."""

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="devices")
    index = models.PositiveSmallIntegerField()
    kind = models.CharField(max_length=64)
    memory_bytes = models.BigIntegerField(validators=[above_zero])

    class Meta:
        db_table = "device"
        ordering = ["host_id", "index"]
        constraints = [
            models.UniqueConstraint(fields=["host", "index"], name="device_unique"),
            positive("memory_bytes", name="device_memory_positive"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} #{self.index}"


class Link(Versioned):
    """One direction between two hosts (source and target may be the same for a link inside a host)."""

    class State(models.TextChoices):
        UP = "up", "Up"
        DOWN = "down", "Down"

    source = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="links_out")
    target = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="links_in")
    medium = models.CharField(max_length=32)
    bandwidth_bytes_s = models.FloatField(validators=[above_zero])
    latency_s = models.FloatField(default=0.0, validators=[zero_or_more])
    state = models.CharField(max_length=8, choices=State.choices, default=State.UP)

    class Meta:
        db_table = "link"
        ordering = ["source_id", "target_id", "medium"]
        constraints = [
            models.UniqueConstraint(fields=["source", "target", "medium"], name="link_unique"),
            positive("bandwidth_bytes_s", name="link_bandwidth_positive"),
            models.CheckConstraint(condition=Q(latency_s__gte=0), name="link_latency_not_negative"),
            models.CheckConstraint(condition=Q(state__in=["up", "down"]), name="link_state_known"),
        ]

    def __str__(self) -> str:
        return f"{self.source_id} to {self.target_id} over {self.medium}"


class Weights(models.TextChoices):
    """The state of an instance's weights. `absent`: a warm spare, whose process is up and waits for them.

    `leaving`: it falls asleep, and nothing new is sent there. `asleep`, `waking`: nothing is sent there at all.
    """

    PRESENT = "present", "Present"
    LOADING = "loading", "Loading"
    ABSENT = "absent", "Absent"
    LEAVING = "leaving", "Falling asleep"
    ASLEEP = "asleep", "Asleep"
    WAKING = "waking", "Waking up"


# The state of a ready process by its weights, as pages name it.
SHOWN = {
    Weights.ABSENT: "warm",
    Weights.LOADING: "loading",
    Weights.LEAVING: "falling asleep",
    Weights.ASLEEP: "asleep",
    Weights.WAKING: "waking",
}


class LaunchTemplate(Versioned):
    """How engines of some kind are started (`controller.engine.launch_template`): `command` is a list of arguments,
    `environment` holds text or `{"secret": NAME}` by variable, and both may have fields such as `${port}`.

    `roles`: that it can start. `spec`: facts about its engines, which instances get (`kv_role`). `key_variable`: in
    which the engine takes the key that it then asks for. `paused_at`, `paused_reason`: its starts failed, so nothing is
    started from it until a person has changed or resumed it.
    """

    name = models.CharField(max_length=120, unique=True, validators=[NAME])
    backend = models.CharField(max_length=32)
    roles = models.JSONField(default=list)
    command = models.JSONField(default=list)
    environment = models.JSONField(default=dict, blank=True)
    spec = models.JSONField(default=dict, blank=True)
    health_path = models.CharField(max_length=255, default="/health")
    key_variable = models.CharField(max_length=128, blank=True, default="")
    start_limit_s = models.FloatField("start limit", default=600.0, validators=[above_zero])
    paused_at = models.DateTimeField(null=True, blank=True)
    paused_reason = models.TextField(blank=True, default="")

    class Meta:
        db_table = "launch_template"
        ordering = ["name"]
        constraints = [positive("start_limit_s", name="launch_template_start_limit_positive")]

    def __str__(self) -> str:
        return self.name


class InstanceQuerySet(models.QuerySet["Instance"]):
    def live(self) -> InstanceQuerySet:
        """Instances that should run or still do. One that was stopped before it was seen may be starting, so it is
        included until it is known to be gone."""
        return self.exclude(desired_state=Instance.Desired.STOPPED, observed_state__in=Instance.GONE)

    def serving(self) -> InstanceQuerySet:
        """What a gateway may send to, or lets finish."""
        return self.filter(Instance.serves())

    def warm(self) -> InstanceQuerySet:
        """Warm spares: they should run, and have no weights until a scale-out takes them."""
        return self.filter(desired_state=Instance.Desired.RUNNING, weights=Weights.ABSENT).exclude(
            observed_state__in=Instance.GONE
        )


class Instance(Versioned):
    """An engine as the control plane manages it. `desired_state`: what should run; `observed_state`: what its
    provisioner last saw.

    Of the observed states, *pending* waits for what its `error` says, *unhealthy* runs and fails its health checks,
    *unreachable* is a registered server that does not answer, and *lost* means that its provisioner cannot say whether
    its engine still runs.

    `generation` rises with each change of the desired state; `observed_generation` follows once that was acted on.
    `spec`: what the provisioner needs to start it (profile, seed, max_model_len, kv_capacity_tokens and so on), or
    facts about a registered server (`kv_role`). `template`: what it is started from; null: a reference engine with the
    options of its spec. `start_steps`: when its engine reached each step of its start, in epoch seconds.
    `started_role`: the role that its engine was started in ("" if never). It stays when the role changes, and a process
    that is started again gets it again. `seqs_unsaid`: an endpoint was registered without a number of sequences, and
    `max_num_seqs` is a default in its place. `key_name`: of the key that a registered server asks for; gateways and
    workers have the key (`workers.http.engine_keys`).
    """

    class Desired(models.TextChoices):
        RUNNING = "running", "Running"
        DRAINING = "draining", "Draining"
        STOPPED = "stopped", "Stopped"

    class Observed(models.TextChoices):
        PENDING = "pending", "Pending"
        STARTING = "starting", "Starting"
        READY = "ready", "Ready"
        UNHEALTHY = "unhealthy", "Unhealthy"
        DRAINING = "draining", "Draining"
        UNREACHABLE = "unreachable", "Unreachable"
        LOST = "lost", "Lost"
        FAILED = "failed", "Failed"
        STOPPED = "stopped", "Stopped"

    GONE = (Observed.STOPPED, Observed.FAILED)
    SETTINGS_REFUSED = "given up: its settings are refused"  # how the error on its row begins

    id = models.CharField(primary_key=True, max_length=64, validators=[NAME])
    model = models.ForeignKey(ServedModel, on_delete=models.PROTECT, related_name="instances")
    host = models.ForeignKey(Host, null=True, blank=True, on_delete=models.SET_NULL, related_name="instances")
    backend = models.CharField(max_length=32)
    provisioner = models.CharField(max_length=32)
    url = models.CharField(max_length=255, blank=True)
    template = models.ForeignKey(
        LaunchTemplate, null=True, blank=True, on_delete=models.PROTECT, related_name="instances"
    )
    start_steps = models.JSONField(default=dict, blank=True, db_default={})
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.COLLOCATED)
    started_role = models.CharField(max_length=16, choices=Role.choices, blank=True, default="", db_default="")
    device_kind = models.CharField(max_length=64, blank=True)
    tp = models.PositiveSmallIntegerField(default=1, validators=[above_zero])
    max_num_seqs = models.PositiveIntegerField(default=DEFAULT_MAX_NUM_SEQS, validators=[above_zero])
    seqs_unsaid = models.BooleanField(default=False, db_default=False)
    unit_cost = models.FloatField("cost per second", default=1.0, validators=[zero_or_more])
    spec = models.JSONField(default=dict, blank=True)
    key_name = models.CharField("key name", max_length=64, blank=True, default="", db_default="")
    weights = models.CharField(max_length=16, choices=Weights.choices, default=Weights.PRESENT)
    sleep_level = models.PositiveSmallIntegerField(default=0, db_default=0)  # 1: copy in host memory, 2: none; 0: awake
    desired_state = models.CharField(max_length=16, choices=Desired.choices, default=Desired.RUNNING)
    observed_state = models.CharField(max_length=16, choices=Observed.choices, default=Observed.PENDING)
    generation = models.PositiveIntegerField(default=1)
    observed_generation = models.PositiveIntegerField(default=0)
    desired_at = models.DateTimeField(auto_now_add=True)
    observed_at = models.DateTimeField(null=True, blank=True)
    ready_at = models.DateTimeField(null=True, blank=True)
    stopped_at = models.DateTimeField(null=True, blank=True)
    error = models.TextField(blank=True)

    objects = InstanceQuerySet.as_manager()

    class Meta:
        db_table = "instance"
        ordering = ["id"]
        indexes = [
            models.Index(fields=["desired_state", "observed_state"], name="instance_states"),
            models.Index(fields=["model", "role"], name="instance_model_role"),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["url"],
                condition=~Q(url="") & ~Q(observed_state__in=["stopped", "failed"]),
                name="instance_url_unique_while_live",
            ),
            positive("tp", name="instance_tp_positive"),
            positive("max_num_seqs", name="instance_seqs_positive"),
            models.CheckConstraint(condition=Q(unit_cost__gte=0), name="instance_cost_not_negative"),
            models.CheckConstraint(
                condition=Q(desired_state__in=["running", "draining", "stopped"]), name="instance_desired_known"
            ),
            models.CheckConstraint(
                condition=Q(weights__in=["present", "loading", "absent", "leaving", "asleep", "waking"]),
                name="instance_weights_known",
            ),
            models.CheckConstraint(condition=Q(sleep_level__in=[0, 1, 2]), name="instance_sleep_level_known"),
            models.CheckConstraint(
                condition=Q(
                    observed_state__in=[
                        "pending", "starting", "ready", "unhealthy", "draining", "unreachable", "lost", "failed",
                        "stopped",
                    ]
                ),
                name="instance_observed_known",
            ),
        ]  # fmt: skip

    def __str__(self) -> str:
        return self.id

    @classmethod
    def serves(cls) -> models.Q:
        """What a gateway may send to, or lets finish.

        An instance that loads weights is among them: the gateway sees it asleep, and sends requests as soon as it is
        awake. An instance that wakes up is not, since a vLLM may be awake before its weights are whole.
        """
        return models.Q(
            ~models.Q(url=""),
            desired_state__in=[cls.Desired.RUNNING, cls.Desired.DRAINING],
            observed_state__in=[cls.Observed.READY, cls.Observed.DRAINING],
            weights__in=[Weights.PRESENT, Weights.LOADING, Weights.LEAVING],
        )

    @property
    def abilities(self) -> Abilities:
        """What its provisioner can do."""
        return abilities(self.provisioner)

    @property
    def source(self) -> str:
        """What is looked at for it: its provisioner, or the cluster of that which it runs on."""
        return source_of(self.provisioner, str(self.spec.get("cluster") or DEFAULT_CLUSTER))

    @property
    def shown_url(self) -> str:
        """Its URL without a user and password, which rows of older versions may have."""
        return shown_url(self.url)

    @property
    def ranks(self) -> int:
        """Tensor-parallel processes of a reference engine, each with a part of a real model. An emulated engine has
        one, whatever `tp` its latencies are for. The ranks of other engines do not matter here."""
        return self.tp if self.backend == "reference" and self.spec.get("executor") == "torch" else 1

    @property
    def key(self) -> str:
        """The key that its engine asks for, as `InstanceSpec.key` names it."""
        own = self.abilities.starts and self.backend == "reference" and self.template_id is None
        return KEY_MADE if own else self.key_name

    @property
    def settings_refused(self) -> bool:
        """Whether its engine refused its settings, so that another one like it would fail as well."""
        return self.error.startswith(self.SETTINGS_REFUSED)

    @property
    def configured_seqs(self) -> int | None:
        """Concurrent sequences as configured; None: the number that the engine reports applies. A process of a version
        without `seqs_unsaid` may have stored another number."""
        return None if self.seqs_unsaid and self.max_num_seqs == DEFAULT_MAX_NUM_SEQS else self.max_num_seqs

    @property
    def role_at_start(self) -> str:
        """The role that chose the engine's scheduler, if its start left that to the role."""
        return self.started_role or self.role

    @property
    def kv_role(self) -> str:
        """The `kv_role` that a vLLM server was started with, according to its registration; "": unknown."""
        return str(self.spec.get("kv_role", "")) if self.backend == "vllm" else ""

    @property
    def shown_state(self) -> str:
        """The state as pages name it: a ready process without weights is warm, asleep, loading or waking up."""
        if self.observed_state != self.Observed.READY:
            return self.observed_state
        return SHOWN.get(Weights(self.weights), self.observed_state)


class InstanceDevice(models.Model):
    """A device that an instance holds. `released_at` null: it still does, and no other instance holds the device."""

    instance = models.ForeignKey(Instance, on_delete=models.CASCADE, related_name="holdings")
    device = models.ForeignKey(Device, on_delete=models.PROTECT, related_name="holdings")
    held_from = models.DateTimeField(auto_now_add=True)
    released_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        db_table = "instance_device"
        constraints = [
            models.UniqueConstraint(
                fields=["device"], condition=Q(released_at__isnull=True), name="instance_device_one_live"
            )
        ]

    def __str__(self) -> str:
        return f"{self.instance_id} on {self.device_id}"


class InstanceInterval(models.Model):
    """Provisioned time in one role. Its length times the unit cost is the cost of HyperFlexis eq. 3."""

    instance = models.ForeignKey(Instance, on_delete=models.CASCADE, related_name="intervals")
    role = models.CharField(max_length=16, choices=Role.choices)
    unit_cost = models.FloatField(validators=[zero_or_more])
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        db_table = "instance_interval"
        ordering = ["instance_id", "started_at"]
        indexes = [models.Index(fields=["instance", "started_at"], name="instance_interval_from")]
        constraints = [
            models.UniqueConstraint(
                fields=["instance"], condition=Q(ended_at__isnull=True), name="instance_interval_one_open"
            ),
            models.CheckConstraint(
                condition=Q(ended_at__isnull=True) | Q(ended_at__gte=models.F("started_at")),
                name="instance_interval_in_order",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.instance_id} from {self.started_at}"


class ProvisionerLook(models.Model):
    """The last look at a provisioner. While looks fail its instances keep the state in which they were last seen.

    `seen_at`: of the last look that succeeded (null: none has yet); `failing_since` and `error`: of those that fail
    now; `instances`: how many it had when it was last seen. `hosts`: nodes of its cluster then, each with `name`,
    `state`, `resources` ({name: [free, total]}, memory in bytes) and `labels`.
    """

    name = models.CharField(primary_key=True, max_length=120)
    seen_at = models.DateTimeField(null=True, blank=True)
    failing_since = models.DateTimeField(null=True, blank=True)
    error = models.TextField(blank=True, default="")
    instances = models.PositiveIntegerField(default=0)
    hosts = models.JSONField(default=list, blank=True, db_default=[])

    class Meta:
        db_table = "provisioner_look"
        verbose_name = "check of a provisioner"
        verbose_name_plural = "checks of provisioners"
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name
