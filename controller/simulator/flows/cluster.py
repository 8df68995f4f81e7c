"""Shapes of models and of the cluster that serves their prefills (MFS sec. 6.1): what is computed and what moves.

A *rank* is the GPUs that hold a request together (TP, and SP for long prompts). Its port is all of their NICs, over
which its bytes are spread evenly. The ranks of an instance share the experts (EP) and exchange activations in every
layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.errors import ConfigError

BYTES_OF_VALUE = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`active_parameters`: that one token passes. `experts_per_token`: 0 for a dense model. `kv_heads` x `head_dim`: of
    the keys, and again of the values, in each layer.
    """

    name: str
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    active_parameters: float
    experts_per_token: int

    @property
    def kv_layer_bytes(self) -> int:
        """Bytes of KV of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * BYTES_OF_VALUE


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """How one model is served, and the devices under it.

    - `tensor_parallel` x `sequence_parallel`: GPUs of a rank. Parts of a sequence gather each other's KV in each layer.
    - `ranks`: of an instance (EP). `gpus_per_server`: one NIC each.
    - `flops`: peak of a GPU, of which `efficiency` is reached. `nic_bytes_per_s`: of one NIC.
    - `groups`: consecutive layers that are simulated as one, with all of their bytes.
    - `batch_tokens`: most new tokens of a rank in one batch.
    """

    model: ModelShape
    tensor_parallel: int
    ranks: int
    sequence_parallel: int = 1
    gpus_per_server: int = 8
    flops: float = 312e12
    efficiency: float = 0.45
    nic_bytes_per_s: float = 25e9
    groups: int = 8
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        for field in ("tensor_parallel", "sequence_parallel", "ranks", "gpus_per_server", "groups", "batch_tokens"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} must be at least 1", field=field)
        if self.groups > self.model.layers:
            raise ConfigError("groups must not be more than the model's layers", field="groups")

    @property
    def port_bytes_per_s(self) -> float:
        return self.rank_gpus * self.nic_bytes_per_s

    @property
    def rank_gpus(self) -> int:
        return self.tensor_parallel * self.sequence_parallel

    @property
    def gpus(self) -> int:
        """GPUs of an instance."""
        return self.rank_gpus * self.ranks

    @property
    def group_layers(self) -> float:
        return self.model.layers / self.groups

    @property
    def remote_share(self) -> float:
        """Share of the exchanged activations that leaves the server; the rest goes over NVSwitch and is not counted."""
        here = max(1, min(self.ranks, self.gpus_per_server // self.rank_gpus))
        return (self.ranks - here) / self.ranks

    def compute_s(self, new_tokens: float, context_tokens: float) -> float:
        """Computing of one group of layers for a rank's `new_tokens`, each of which attends `context_tokens`."""
        model = self.model
        linear = 2.0 * model.active_parameters * new_tokens
        attention = 4.0 * model.layers * model.hidden * new_tokens * context_tokens / 2.0
        return (linear + attention) / self.groups / (self.rank_gpus * self.flops * self.efficiency)

    def collective_bytes(self, own_tokens: float, mean_tokens: float) -> float:
        """What a rank's port sends, and receives, in the exchanges of one group of layers.

        Experts: each token goes to the ranks of its experts and comes back (dispatch and combine), so a rank sends its
        own tokens and answers an even share of all. Sequence: each part sends its KV to all others.
        """
        gathered = self.model.kv_layer_bytes * own_tokens * (self.sequence_parallel - 1)
        each = self.model.hidden * BYTES_OF_VALUE * self.model.experts_per_token
        return self.group_layers * (gathered + each * (own_tokens + mean_tokens) * self.remote_share)

    def kv_bytes(self, tokens: float) -> float:
        """KV of these tokens in one group of layers."""
        return self.group_layers * self.model.kv_layer_bytes * tokens
