"""What a model remembers of one sequence: one state per layer, copied, saved and restored whole.

Sparse layers can be cut back to any length; a KDA state is a running value and cannot, so a
sequence goes back only to a copy that was taken there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from glmflash.config import TextConfig
from glmflash.state.layers import KdaState, MtpState, SparseState

LayerState = KdaState | SparseState


@dataclass
class SequenceState:
    """The states of all layers after `length` tokens; `mtp` where drafts are wanted."""

    layers: list[LayerState]
    mtp: MtpState | None
    length: int = 0

    @staticmethod
    def empty(config: TextConfig, dtype: torch.dtype, mtp: bool = False) -> SequenceState:
        """The state before the first token."""

        def layer(kind: str, indexer: str) -> LayerState:
            if kind == "linear_attention":
                return KdaState.empty(config, dtype)
            return SparseState.empty(config, dtype, indexed=indexer == "full")

        kinds = zip(config.layer_types, config.indexer_types, strict=True)
        return SequenceState(
            [layer(*kind) for kind in kinds], MtpState.empty(config, dtype) if mtp else None
        )

    def fork(self) -> SequenceState:
        """An independent copy."""
        layers = [state.copy() for state in self.layers]
        return replace(self, layers=layers, mtp=self.mtp and self.mtp.copy())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name: what is saved, hashed and compared."""
        out: dict[str, torch.Tensor] = {}
        for i, state in enumerate(self.layers):
            if isinstance(state, KdaState):
                out[f"layers.{i}.conv"] = state.conv
                out[f"layers.{i}.recurrent"] = state.recurrent
            else:
                out |= _sparse_tensors(f"layers.{i}", state)
        if self.mtp:
            out |= _sparse_tensors("mtp", self.mtp.sparse)
            out["mtp.waiting"] = self.mtp.waiting
        return out

    def load(self, tensors: dict[str, torch.Tensor], length: int) -> None:
        """Fill an empty state from `tensors()` of an equal model. Raises KeyError if one lacks."""
        for i, state in enumerate(self.layers):
            if isinstance(state, KdaState):
                self.layers[i] = KdaState(
                    tensors[f"layers.{i}.conv"], tensors[f"layers.{i}.recurrent"]
                )
            else:
                _load_sparse(f"layers.{i}", state, tensors)
        if self.mtp:
            _load_sparse("mtp", self.mtp.sparse, tensors)
            self.mtp.waiting = tensors["mtp.waiting"]
        self.length = length


def _sparse_tensors(name: str, state: SparseState) -> dict[str, torch.Tensor]:
    out = {f"{name}.latents": state.latents.view}
    if state.index:
        out[f"{name}.pools"] = state.index.pools.view
        out[f"{name}.open"] = state.index.members[: state.index.waiting]
    return out


def _load_sparse(name: str, state: SparseState, tensors: dict[str, torch.Tensor]) -> None:
    state.latents.append(tensors[f"{name}.latents"])
    if state.index:
        state.index.pools.append(tensors[f"{name}.pools"])
        waiting = tensors[f"{name}.open"]
        state.index.waiting = len(waiting)
        state.index.members[: len(waiting)] = waiting
