"""A GPU for tests without one: tensors on it have shape, dtype and device but no values.

Host tensors are computed as usual. Reading a device value on the host, an output whose shape depends on device values,
and a copy to the device from memory that is not pinned are errors inside `GpuStandIn.watching`: on a GPU each makes the
host wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from vit_scale import gpu

CUDA, META = torch.device("cuda", 0), torch.device("meta")


class HostWaits(Exception):
    """Code that would make the host wait for the device."""


class GpuStandIn(TorchDispatchMode):
    """Inside the context, `device="cuda"` makes tensors of this stand-in."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: list[Tensor] = []
        self._watching = False

    def __enter__(self) -> GpuStandIn:
        self._fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fake.__exit__(*error)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Raise `HostWaits` for what makes the host wait."""
        self._watching = True
        try:
            yield
        finally:
            self._watching = False

    def pin(self, tensor: Tensor) -> Tensor:
        """Stand in for `gpu.pin`."""
        assert not isinstance(tensor, FakeTensor), "only host memory can be pinned"
        pinned = tensor.clone()
        self._pinned.append(pinned)
        return pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and (torch.is_grad_enabled() or _is_in_backward()):
            return META  # C++ asks: autograd would use a context of the GPU. Python code sees `device`.
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == META:
            kwargs["device"] = CUDA  # What C++ creates next to a tensor of the stand-in.
        leaves = tree_leaves((args, kwargs))
        on_device = [leaf for leaf in leaves if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda"]
        to_device = any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves)
        if not on_device and not to_device and not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if self._watching:
            self._check(func, leaves, on_device, to_device=to_device, kwargs=kwargs)
        return func(*args, **kwargs)

    def _check(self, func: Any, leaves: list[Any], on_device: list[Any], *, to_device: bool, kwargs: Any) -> None:
        name = func.overloadpacket.__name__
        host = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)]
        if name in ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount"):
            raise HostWaits(f"{name} reads the device")
        if name == "index" and any(getattr(leaf, "dtype", None) == torch.bool for leaf in leaves[1:]):
            raise HostWaits("a boolean index reads the device")
        leaves_device = kwargs.get("device")
        if name == "_to_copy" and on_device and leaves_device is not None and leaves_device.type == "cpu":
            raise HostWaits("a copy to the host")
        if name == "copy_" and on_device and not any(leaves[0] is tensor for tensor in on_device):
            raise HostWaits("a copy to the host")
        if name in ("_to_copy", "copy_") and (to_device or on_device):
            for tensor in host:
                if not any(tensor.untyped_storage()._cdata == p.untyped_storage()._cdata for p in self._pinned):
                    raise HostWaits(f"a copy of {tuple(tensor.shape)} {tensor.dtype} from memory that is not pinned")


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def gpu_stand_in(monkeypatch: pytest.MonkeyPatch) -> GpuStandIn:
    """Return a stand-in to be entered, which `vit_scale.gpu` pins memory with."""
    stand_in = GpuStandIn()
    monkeypatch.setattr(gpu, "pin", stand_in.pin)
    monkeypatch.setattr(gpu, "reset_peak_memory", lambda device: None)
    return stand_in


class LateCopies:
    """Downloads that happen as late as a GPU may do them: when the host waits for them.

    Tensors on the host stand in for those on a GPU. A copy that nobody waits for has NaN, or later values.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self._started: list[tuple[Tensor, Tensor]] = []
        monkeypatch.setattr(gpu, "host_buffer", lambda like: torch.full_like(like, float("nan")))
        monkeypatch.setattr(gpu, "start_download", self._start)
        monkeypatch.setattr(gpu, "wait_for_downloads", self._wait)

    def _start(self, tensor: Tensor, buffer: Tensor) -> None:
        self.log.append("copy")
        self._started.append((tensor, buffer))

    def _wait(self, device: torch.device) -> None:
        self.log.append("wait")
        for tensor, buffer in self._started:
            buffer.copy_(tensor)
        self._started.clear()
