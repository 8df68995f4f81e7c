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
    """- `query_heads`, `kv_heads`, `head_dim`: of the attention in each layer.
    - `dense_parameters`: attention and dense layers, which a token passes on the rank that holds its request.
    - `expert_parameters`: of the experts that one token passes, on whichever ranks hold them. `experts_per_token`: 0
      for a dense model. Embeddings are looked up and not counted.
    """

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dense_parameters: float
    expert_parameters: float
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
    - `kv_share`: share of the KV's bytes that reuse and transfers move. Near 0 it shows what any order of flows could
      win at most, since only collectives are left on the links.
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
    kv_share: float = 1.0

    def __post_init__(self) -> None:
        for field in ("tensor_parallel", "sequence_parallel", "ranks", "gpus_per_server", "groups", "batch_tokens"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} must be at least 1", field=field)
        if not self.kv_share > 0:
            raise ConfigError("kv_share must be positive", field="kv_share")
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
    def remote_ranks(self) -> int:
        """Ranks of the instance in other servers than a given one."""
        return self.ranks - max(1, min(self.ranks, self.gpus_per_server // self.rank_gpus))

    @property
    def remote_share(self) -> float:
        """Share of the exchanged activations that leaves the server; the rest goes over NVSwitch and is not counted."""
        return self.remote_ranks / self.ranks

    @property
    def collective_flows(self) -> int:
        """Single flows that an exchange has on each of a rank's NICs, in each direction: one with every remote rank,
        if there are experts, and with every other part of the sequence."""
        return self.sequence_parallel - 1 + (self.remote_ranks if self.model.experts_per_token else 0)

    def dense_s(self, new_tokens: float, context_tokens: float) -> float:
        """Attention and dense layers of one group, for the last `new_tokens` of a prompt of `context_tokens` on their
        rank. Each new token attends to those before it.
        """
        model = self.model
        linear = 2.0 * model.dense_parameters * new_tokens
        attended = new_tokens * (context_tokens - new_tokens / 2.0)
        return self._seconds(linear + 4.0 * model.layers * model.query_heads * model.head_dim * attended)

    def experts_s(self, tokens: float) -> float:
        """The experts of one group of layers, for `tokens` of all ranks together.

        Tokens are exchanged before, so the experts of all ranks compute them, here evenly: a batch on one rank alone
        does not wait for that rank's experts alone.
        """
        return self._seconds(2.0 * self.model.expert_parameters * tokens / self.ranks)

    def _seconds(self, operations: float) -> float:
        """Of a rank, for one group of layers out of the operations of all layers."""
        return operations / self.groups / (self.rank_gpus * self.flops * self.efficiency)

    def collective_bytes(self, own_tokens: float, mean_tokens: float) -> float:
        """What a rank's port sends, and receives, in the exchanges of one group of layers.

        Experts: each token goes to the ranks of its experts and comes back (dispatch and combine), so a rank sends its
        own tokens and answers an even share of all. Sequence: each part sends its KV to all others.
        """
        gathered = self.model.kv_layer_bytes * own_tokens * (self.sequence_parallel - 1)
        each = self.model.hidden * BYTES_OF_VALUE * self.model.experts_per_token
        return self.group_layers * (gathered + each * (own_tokens + mean_tokens) * self.remote_share)

    @property
    def token_bytes(self) -> float:
        """Of a token on its way to all of its experts in one group of layers."""
        return self.group_layers * self.model.hidden * BYTES_OF_VALUE * self.model.experts_per_token

    def gathered_bytes(self, own_tokens: float) -> float:
        """The part of `collective_bytes` that goes between parts of a sequence."""
        return self.group_layers * self.model.kv_layer_bytes * own_tokens * (self.sequence_parallel - 1)

    def kv_bytes(self, tokens: float) -> float:
        """Bytes that move for the KV of these tokens in one group of layers."""
        return self.group_layers * self.model.kv_layer_bytes * tokens * self.kv_share
