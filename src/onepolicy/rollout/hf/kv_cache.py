"""The KV cache: keys, values and routes, one row per sequence, written in place at (row, position).

A row also has a state in every recurrent layer: the one after its last token.

It implements the public methods of a transformers `Cache`, so the model stays unmodified. Routes
are stored beside keys and values, so copying a cached prefix also copies its routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepolicy.models.decode_attention import KEY_BLOCK, KVCacheStep
from onepolicy.models.packed_attention import round_up
from onepolicy.models.recurrent.segments import Row, Segments, States
from onepolicy.types import id_dtype


class KVCache:
    """Cached keys, values and routes in rows of `max_len` positions.

    The position is the last dimension of keys, which decoding multiplies fastest.
    """

    is_compileable = False

    def __init__(
        self, num_rows: int, max_len: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.num_rows, self.max_len, self.device, self.dtype = num_rows, max_len, device, dtype
        self.keys: dict[int, Tensor] = {}  # layer -> [rows, G, D, max_len]
        self.values: dict[int, Tensor] = {}  # layer -> [rows, G, max_len, Dv]
        # [rows, max_len, L, K] uint8, or int16 with the bits of uint16
        self.routes: Tensor | None = None
        # [rows, max_len, L, K] in the router's dtype, allocated by the first write
        self.combine_weights: Tensor | None = None
        # (layer, name) -> [rows, ...]: state of a recurrent layer after the row's last token
        self.states: dict[tuple[int, str], Tensor] = {}
        self._feeding: _Feeding | None = None  # of the step, made by its first recurrent layer
        self._step: KVCacheStep | None = None
        self._places_of: KVCacheStep | None = None  # the step and shape of the places below
        self._places_shape: torch.Size | None = None
        self._key_places = self._value_places = torch.empty(0, device=device)

    def allocate_routes(self, layers: int, top_k: int, num_experts: int) -> None:
        dtype = torch.int16
        if id_dtype(num_experts) == torch.uint8:
            dtype = torch.uint8
        self.routes = torch.zeros(
            self.num_rows, self.max_len, layers, top_k, dtype=dtype, device=self.device
        )

    def set_step(self, step: KVCacheStep) -> None:
        """Set the rows and positions that the next forward writes and reads."""
        self._step, self._feeding = step, None

    def write_routes(
        self, layer_ids: list[Tensor], combine_weights: list[Tensor] | None = None
    ) -> None:
        """Store the expert ids of the last forward, and their combine weights if given.

        Both are lists of one [T, K] tensor per MoE layer.
        """
        assert self.routes is not None
        assert self._step is not None
        ids = torch.stack(layer_ids, 1).to(self.routes.dtype)
        flat = self._step.rows * self.max_len + self._step.positions
        self.routes.flatten(0, 1).index_copy_(0, flat, ids)
        if combine_weights is None:
            return
        if self.combine_weights is None:
            self.combine_weights = torch.zeros(
                self.routes.shape, dtype=combine_weights[0].dtype, device=self.device
            )
        self.combine_weights.flatten(0, 1).index_copy_(0, flat, torch.stack(combine_weights, 1))

    def read_routes(self, row: int, positions: slice, num_experts: int) -> Tensor:
        """Return expert ids [n, L, K] uint8 | uint16, copied to the CPU."""
        assert self.routes is not None
        return self.routes[row, positions].cpu().clone().view(id_dtype(num_experts))

    def read_combine_weights(self, row: int, positions: slice) -> Tensor | None:
        """Return combine weights [n, L, K], copied to the CPU, or None if they are not recorded."""
        if self.combine_weights is None:
            return None
        return self.combine_weights[row, positions].cpu().clone()

    def copy_rows(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of rows `source` to rows `target`.

        All rows are read before any row is written.
        """
        for keys in self.keys.values():
            keys[target, :, :, :length] = keys[source, :, :, :length]
        for values in self.values.values():
            values[target, :, :length] = values[source, :, :length]
        if self.routes is not None:
            self.routes[target, :length] = self.routes[source, :length]
        if self.combine_weights is not None:
            self.combine_weights[target, :length] = self.combine_weights[source, :length]
        for states in self.states.values():
            states[target] = states[source]

    def recurrent_row(self, layer: int) -> Row:
        """Return the step's tokens as a recurrent layer computes them."""
        assert self._step is not None
        if self._feeding is None:
            self._feeding = _Feeding.of(self._step)
        feeding = self._feeding
        states = States(self.states, layer, self.num_rows, feeding.rows, feeding.begins)
        return Row(feeding.segments, states)

    # The public interface of transformers' Cache

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store key [1, G, T, D] and value [1, G, T, Dv] of this step's tokens.

        Return the cached keys [V, G, S, D] and values [V, G, S, Dv] of the step's view.
        """
        step = self._step
        assert step is not None
        if layer_idx not in self.keys:
            self._allocate(layer_idx, key, value)
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[step.rows, :, :, step.positions] = key[0].transpose(0, 1).to(self.dtype)  # [T, G, D]
        values[step.rows, :, step.positions] = value[0].transpose(0, 1).to(self.dtype)
        if isinstance(step.view, slice):
            seen_keys = keys[step.view, :, :, : step.keys]
            seen_values = values[step.view, :, : step.keys]
        else:
            seen_keys = keys[:, :, :, : step.keys].index_select(0, step.view)
            seen_values = values[:, :, : step.keys].index_select(0, step.view)
        return seen_keys.transpose(2, 3), seen_values

    def write_tokens(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store key [T, G, D] and value [T, G, Dv] of a decode step's tokens, on a CPU.

        Their places are computed once per step, and for layers of the same shape once.
        """
        assert self._step is not None
        if layer not in self.keys:
            self._allocate(layer, key.transpose(0, 1)[None], value.transpose(0, 1)[None])
        keys, values = self.keys[layer], self.values[layer]
        key_places, value_places = self._places(keys, values)
        keys.view(-1).scatter_(0, key_places, key.reshape(-1).to(self.dtype))
        width = value.shape[-1]
        values.view(-1, width).index_copy_(0, value_places, value.reshape(-1, width).to(self.dtype))

    def read_tokens(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the cached keys [V, G, S, D] and values [V, G, S, Dv] of a decode step's view."""
        step = self._step
        assert step is not None
        assert isinstance(step.view, slice)
        keys = self.keys[layer][step.view, :, :, : step.keys]
        return keys.transpose(2, 3), self.values[layer][step.view, :, : step.keys]

    def _places(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of the step's keys and values in layers of this shape, flattened.

        keys: [T * G * D] int64, of elements. values: [T * G] int64, of rows.
        """
        step, shape = self._step, keys.shape
        assert step is not None
        if self._places_of is not step or self._places_shape != shape:
            _, groups, width, length = shape
            device, position = keys.device, step.positions[:, None]
            element = torch.arange(groups * width, device=device)
            head = torch.arange(groups, device=device)
            rows = step.rows[:, None]
            self._key_places = ((rows * len(element) + element) * length + position).view(-1)
            self._value_places = ((rows * groups + head) * values.shape[2] + position).view(-1)
            self._places_of, self._places_shape = step, shape
        return self._key_places, self._value_places

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False  # operators read and write the states of rows themselves

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return conv_states

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        pass

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # every forward is given its positions

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        assert self._step is not None
        return self._step.keys, 0

    def _allocate(self, layer: int, key: Tensor, value: Tensor) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(self.num_rows, *shape, device=self.device, dtype=self.dtype)

        length = round_up(self.max_len, KEY_BLOCK)
        self.keys[layer] = zeros(key.shape[1], key.shape[3], length)
        self.values[layer] = zeros(value.shape[1], length, value.shape[3])


@dataclass(frozen=True, slots=True)
class _Feeding:
    """The cache rows that a step feeds, as samples of its packed row."""

    segments: Segments
    rows: Tensor  # [S] int64
    begins: Tensor | None  # [S] bool, True where no token was fed before; None: nowhere

    @classmethod
    def of(cls, step: KVCacheStep) -> _Feeding:
        if step.bounds is None:
            segments = Segments((1,) * len(step.rows), step.rows.device, step.positions)
            return cls(segments, step.rows, None)
        first = step.bounds[:-1].long()
        fed = step.positions[first]
        lengths, earlier = tuple(step.bounds.diff().tolist()), fed if fed.any() else None
        segments = Segments(lengths, step.rows.device, earlier)
        return cls(segments, step.rows[first], fed == 0)
