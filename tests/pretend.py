"""A device that is not there: numbers lie in ordinary memory, and their tensors say that they do not.

Code for GPUs that mixes tensors of two devices, or reads one without fetching it, fails on a card and nowhere else.
Under `there()`, tensors of the device `THERE` hold real numbers, and what a GPU would refuse is refused: an operation
on tensors of both devices, but for what copies, for indices and for single numbers. So results can be compared to the
bit with those of a CPU. The device is called `meta`, because that one exists in every build of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from attar.execution.cuda_graphs import Recorded

THERE = torch.device("meta")
waits: list[str] = []
"""What has happened that a host waits for a GPU at: whoever asks clears it first."""
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
LOOKS = {aten._local_scalar_dense.default, aten.nonzero.default}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default, aten.index_put.default}


class Far(Tensor):
    """A tensor of the device, with its numbers in `near`."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        made: Far = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype,
            device=THERE, requires_grad=False,
        )  # fmt: skip
        made.near = near
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves, shape = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    far = any(isinstance(tensor, Far) for tensor in tensors)
    if far and func not in COPIES and func not in INDEXED:
        mixed = [tensor for tensor in tensors if not isinstance(tensor, Far) and tensor.ndim]
        if mixed:
            raise RuntimeError(f"{func}: tensors of both devices, here {[tuple(each.shape) for each in mixed]}")
    wanted = kwargs.get("device")
    if wanted is not None:
        far = torch.device(wanted) == THERE
    elif func is aten.copy_.default:
        far = isinstance(args[0], Far)
    if func in LOOKS and any(isinstance(tensor, Far) for tensor in tensors):
        waits.append(str(func))
    elif (
        func in COPIES and any(isinstance(tensor, Far) for tensor in tensors) != far and not kwargs.get("non_blocking")
    ):
        waits.append(f"{func} to {'there' if far else 'here'}")
    elif func in INDEXED and far and any(not isinstance(each, Far) or each.dtype == torch.bool for each in tensors[1:]):
        waits.append(f"{func} by indices of the host, or where something holds")
    own = {id(leaf.near): leaf for leaf in leaves if isinstance(leaf, Far)}
    near = [
        leaf.near if isinstance(leaf, Far) else torch.device("cpu") if isinstance(leaf, torch.device) else leaf
        for leaf in leaves
    ]
    near_args, near_kwargs = tree_unflatten(near, shape)
    if wanted is not None and func is aten._to_copy.default and isinstance(args[0], Far) != far:
        found = near_args[0].to(dtype=near_kwargs.get("dtype"), copy=True)
    else:
        found = func(*near_args, **near_kwargs)
    if not far:
        return found
    return tree_map_only(Tensor, lambda tensor: own[id(tensor)] if id(tensor) in own else Far(tensor), found)


class _Builds(TorchFunctionMode):
    """So that tensors built of Python's numbers on the device keep them, and give them back."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu") == THERE:
            waits.append("numbers of Python")
            return Far(func(*args, **{**kwargs, "device": "cpu"}))
        if func is Tensor.tolist and isinstance(args[0], Far):
            waits.append("tolist")
            return args[0].near.tolist()
        return func(*args, **kwargs)


class Late(TorchDispatchMode):
    """A CPU that, within, is as late as a GPU: what nobody waits for, copies and replays, is done in its order when
    somebody does. It is the recorder of such graphs too, `results` what their replays gave, and the mark (of
    `execution/cuda_graphs.py`) by which a host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Tensor] = []
        self._told: list[Callable[[], object]] = []
        self._marked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.copy_.default and (args[2:] or (kwargs or {}).get("non_blocking")):
            self._told.append(lambda: func(*args[:2]))
            return args[0]
        return func(*args, **(kwargs or {}))

    def __call__(self, call: Callable[[], Tensor]) -> Recorded:
        self.catch_up()
        return Recorded(lambda: self._told.append(lambda: self.results.append(call().clone())), call())

    def set(self) -> None:
        self._marked = len(self._told)

    def wait(self) -> None:
        """For no more than what comes before the mark."""
        done, self._told, self._marked = self._told[: self._marked], self._told[self._marked :], 0
        for each in done:
            each()

    def catch_up(self) -> None:
        self.set()
        self.wait()


class _Makes(TorchDispatchMode):
    """So that tensors made on the device are of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def _enter(mode: Any) -> None:
    mode.instead = torch.no_grad()
    mode.instead.__enter__()


def _exit(mode: Any, *error: Any) -> None:
    mode.instead.__exit__(*error)


@contextmanager
def there() -> Iterator[torch.device]:
    """Within, the device exists. What asks for inference mode gets no gradients instead: torch knows no views of
    tensors like these there."""
    mode = torch.inference_mode
    before = mode.__enter__, mode.__exit__
    mode.__enter__, mode.__exit__ = _enter, _exit  # type: ignore[method-assign, assignment]
    try:
        with _Makes(), _Builds():
            yield THERE
    finally:
        mode.__enter__, mode.__exit__ = before  # type: ignore[method-assign]
