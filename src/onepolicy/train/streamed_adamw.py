"""AdamW whose state rests elsewhere between updates: in host memory or in 8 bits (`optim.state`).

An update goes over buckets of parameters. It fetches a bucket's state to the parameters' device in
float32, runs the AdamW of train/optim.py on the bucket, and puts the state back. AdamW treats every
element alone, so the result is that of one update of all parameters, to the bit. On a GPU streams
of their own copy the next bucket's state in and the last one's out while a bucket is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from onepolicy.train.optim import MASTER, MasterAdamW

BUCKET_BYTES = 2**30  # of float32 state: two moments and a master for each parameter
STATE_BYTES = 12  # of a parameter in that
STEP = "step"  # key of the number of updates, a scalar, which stays on the device
State = dict[str, Tensor]


class StreamedAdamW(MasterAdamW):
    """MasterAdamW over buckets of parameters, whose state rests elsewhere between updates."""

    def __init__(self, parameters: Iterable[nn.Parameter], **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self._copies = CopyStreams(self.param_groups[0]["params"][0].device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        everything = group["params"]
        buckets = list(split_parameters([p for p in everything if p.grad is not None]))
        fetched = self._fetch_bucket(buckets[:1])
        try:
            for number, bucket in enumerate(buckets):
                self._copies.wait_for_fetched(fetched)
                resting = [self.state.pop(parameter, {}) for parameter in bucket]
                self.state.update(zip(bucket, fetched, strict=True))
                group["params"] = bucket
                super().step()
                self._put_back(bucket, resting)
                fetched = self._fetch_bucket(buckets[number + 1 : number + 2])
        finally:
            group["params"] = everything
        self._copies.finish()

    def _fetch_bucket(self, buckets: Sequence[Sequence[Tensor]]) -> list[State]:
        """Start to fetch the state of the bucket, if there is one."""
        if not buckets:
            return []
        with self._copies.fetching():
            return [self._fetched(p, self.state.get(p, {})) for p in buckets[0]]

    def _fetched(self, parameter: Tensor, resting: State) -> State:
        return {key: self.fetch(parameter, value) for key, value in resting.items()}

    def _put_back(self, bucket: Sequence[Tensor], resting: Sequence[State]) -> None:
        with self._copies.putting_back():
            for parameter, kept in zip(bucket, resting, strict=True):
                state = self.state[parameter]
                self._copies.keep_until_put_back(state)
                for key, value in state.items():
                    if key != STEP:
                        state[key] = self.put(parameter, key, value, kept.get(key))

    def fetch(self, parameter: Tensor, kept: Tensor) -> Tensor:
        """Return a state as float32 on the parameter's device."""
        raise NotImplementedError

    def put(self, parameter: Tensor, key: str, value: Tensor, kept: Tensor | None) -> Tensor:
        """Return a float32 state as it rests. kept: it before this update, to be filled anew."""
        raise NotImplementedError

    def empty_state(self, parameter: Tensor) -> Tensor:
        return torch.empty_like(parameter, dtype=torch.float32, device="cpu")

    def put_state(self, parameter: Tensor, key: str, value: Tensor) -> None:
        if key == MASTER and parameter.dtype == torch.float32:
            super().put_state(parameter, key, value)
            return
        value = value.to(parameter.device, torch.float32)
        if key != STEP:
            value = self.put(parameter, key, value, None)
        self.state[parameter][key] = value


class HostAdamW(StreamedAdamW):
    """MasterAdamW whose moments and masters rest in host memory: page-locked beside a GPU.

    Of a model on the CPU they are where they always are, and nothing is copied.
    """

    def fetch(self, parameter: Tensor, kept: Tensor) -> Tensor:
        return kept.to(parameter.device, non_blocking=True)

    def put(self, parameter: Tensor, key: str, value: Tensor, kept: Tensor | None) -> Tensor:
        if value.device.type == "cpu":
            return value
        if kept is None:
            pinned = value.device.type == "cuda"
            kept = torch.empty_like(value, device="cpu", pin_memory=pinned)
        local(kept).copy_(local(value), non_blocking=True)
        return kept


class CopyStreams:
    """Two streams of a CUDA device that copy state in and out. On another device, nothing.

    At most three buckets are on the device: one comes, one is computed, one goes.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._gone: list[torch.cuda.Event] = []  # of every bucket of this update

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Copy to the device in this context.

        First wait until the bucket before the last one has gone. Otherwise the host would run ahead
        and make room for all buckets at once.
        """
        if self._streams is None:
            yield
            return
        while len(self._gone) > 1:
            self._gone.pop(0).synchronize()
        with torch.cuda.stream(self._streams[0]):
            yield

    def wait_for_fetched(self, fetched: Sequence[State]) -> None:
        """Let the computation wait for the copies to the device."""
        if self._streams is None:
            return
        computing = torch.cuda.current_stream(self._streams[0].device)
        computing.wait_stream(self._streams[0])
        for state in fetched:
            for value in state.values():
                local(value).record_stream(computing)

    @contextmanager
    def putting_back(self) -> Iterator[None]:
        """Copy from the device in this context, after what is being computed."""
        if self._streams is None:
            yield
            return
        outward = self._streams[1]
        outward.wait_stream(torch.cuda.current_stream(outward.device))
        with torch.cuda.stream(outward):
            yield
        self._gone.append(outward.record_event())

    def keep_until_put_back(self, state: State) -> None:
        if self._streams is not None:
            for value in state.values():
                local(value).record_stream(self._streams[1])

    def finish(self) -> None:
        """Wait until all state has arrived."""
        if self._streams is not None:
            self._streams[1].synchronize()
            self._gone.clear()


def split_parameters(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters in their order, in buckets of up to BUCKET_BYTES of state.

    A larger one is a bucket of its own.
    """
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        state = local(parameter).numel() * STATE_BYTES
        if bucket and size + state > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += state
    if bucket:
        yield bucket


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor
