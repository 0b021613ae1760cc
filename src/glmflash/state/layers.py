"""What each kind of layer remembers of a sequence, and how far back it can go.

Latents can be cut back to any token, pooled keys too while the open pool of that moment is kept;
a KDA state is a running value and only goes back to a copy. Layers change their state in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glmflash.config import TextConfig
from glmflash.state.rows import Rows


@dataclass
class KdaState:
    """conv: the last taps-1 projected columns `[taps-1, 3*H*d]` before the convolution;
    recurrent: `[H, d (key), d (value)]` fp32."""

    conv: Tensor
    recurrent: Tensor

    @staticmethod
    def empty(config: TextConfig, dtype: torch.dtype) -> KdaState:
        """The state before the first token: zeros."""
        heads, dim = config.linear_num_heads, config.linear_head_dim
        return KdaState(
            torch.zeros(config.linear_conv_kernel_dim - 1, 3 * heads * dim, dtype=dtype),
            torch.zeros(heads, dim, dim),
        )

    def copy(self) -> KdaState:
        """An independent state with the same content."""
        return KdaState(self.conv.clone(), self.recurrent.clone())


@dataclass
class PoolState:
    """Finished pool keys `[n // kpool, d]` and the members of the open pool.

    members `[kpool, 2, d]`: key (after its norm) and gate score of each token; the first
    `waiting` are in use.
    """

    pools: Rows
    members: Tensor
    waiting: int = 0

    @staticmethod
    def empty(config: TextConfig, dtype: torch.dtype) -> PoolState:
        """The state before the first token: no pool, none open."""
        dim = config.index_head_dim
        return PoolState(Rows(dim, dtype), torch.zeros(config.index_kpool, 2, dim, dtype=dtype))

    def open_pool(self) -> tuple[Tensor, int]:
        """A copy of the open pool, to go back to with `reopen`."""
        return self.members.clone(), self.waiting

    def reopen(self, pools: int, open_pool: tuple[Tensor, int]) -> None:
        """Go back to `pools` finished pools and the open pool of that moment."""
        self.pools.truncate(pools)
        self.members, self.waiting = open_pool

    def copy(self) -> PoolState:
        """An independent state with the same content."""
        return PoolState(self.pools.copy(), self.members.clone(), self.waiting)


@dataclass
class SparseState:
    """Latents `[n, kv_lora_rank]` after kv_a_layernorm; the indexer's state, None if shared."""

    latents: Rows
    index: PoolState | None

    @staticmethod
    def empty(config: TextConfig, dtype: torch.dtype, indexed: bool = True) -> SparseState:
        """The state before the first token."""
        index = PoolState.empty(config, dtype) if indexed else None
        return SparseState(Rows(config.kv_lora_rank, dtype), index)

    def copy(self) -> SparseState:
        """An independent state with the same content."""
        return SparseState(self.latents.copy(), self.index and self.index.copy())


@dataclass
class MtpState:
    """The MTP layer's own caches, and the trunk hidden `[1, D]` that still waits for its token."""

    sparse: SparseState
    waiting: Tensor

    @staticmethod
    def empty(config: TextConfig, dtype: torch.dtype) -> MtpState:
        """The state before the first token: nothing waits."""
        return MtpState(
            SparseState.empty(config, dtype), torch.empty(0, config.hidden_size, dtype=dtype)
        )

    def copy(self) -> MtpState:
        """An independent state with the same content."""
        return MtpState(self.sparse.copy(), self.waiting)
