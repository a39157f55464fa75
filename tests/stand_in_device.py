"""A stand-in for a GPU: a device in Python, and processes that talk through it alone.

Tensors of the device lie in the memory of the host without torch's knowledge. So what
mixes them with CPU tensors fails as on a GPU, and so do collectives of CPU tensors, as
with nccl. Parts of torch that this is made of are private, and missing in old versions.
"""

from __future__ import annotations

import contextlib
import os

import torch
from torch import Tensor, UntypedStorage, distributed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

NAME = "standin"
HOST = torch.device("cpu")
try:
    from torch._C._distributed_c10d import Backend

    # Else it cannot be subclassed.
    is_open = "rank" in (Backend.__init__.__doc__ or "")
    IS_AVAILABLE = is_open and hasattr(torch._C._acc, "create_empty_tensor")
except (ImportError, AttributeError):
    Backend, IS_AVAILABLE = object, False

# Operations that take tensors of both sides: copies, and indices of the CPU.
MIXED = ("copy_", "_copy_from", "_to_copy", "index", "index_put", "_index_put_impl_")
COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier"),
    *("allgather", "allgather_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter"),
)

# By address: memory of the host, and the storage of the device that lies there.
_memory: dict[int, tuple[UntypedStorage, StorageWeakRef]] = {}


def install() -> None:
    """Make the device and its backend known, and have mmengine take them for its own.

    Cannot be undone: for processes of their own. Each has one device, number 0.
    """
    import mmengine.device.utils
    import mmengine.dist.dist

    setup = backend_registration._setup_privateuseone_for_python_backend
    setup(NAME, backend_module=_Module())
    _register_operations()
    _register_storages()
    distributed.Backend.register_backend(NAME, Group, devices=[NAME])
    mmengine.device.utils.DEVICE = NAME
    mmengine.dist.dist.get_comm_device = lambda group=None: torch.device(NAME, 0)
    os.environ["LOCAL_RANK"] = "0"


class Group(Backend):
    """gloo, by way of the memory that tensors of the device lie in."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.inner = distributed.ProcessGroupGloo(store, rank, size, timeout)

    @property
    def options(self):
        return self.inner.options

    def getBackendName(self):
        return NAME


def _collective(name):
    def run(self, *args, **kwargs):
        args, kwargs = tree_map_only(Tensor, _on_host, (args, kwargs))
        return getattr(self.inner, name)(*args, **kwargs)

    return run


for _name in COLLECTIVES:
    setattr(Group, _name, _collective(_name))


class _Stream:
    """A stream or an event; nothing has to wait, as all work is done at once."""

    stream_id = device_index = device_type = 0

    def __getattr__(self, name):
        return lambda *args, **kwargs: self


class _Module(getattr(backend_registration, "_DummyBackendModule", object)):
    """``torch.standin``, as ``torch.cuda`` is for CUDA."""

    def __init__(self):
        self.Stream = self.Event = self.current_stream = lambda *a, **k: _Stream()
        self.stream = self.device = lambda *args: contextlib.nullcontext()
        self.set_device = self.synchronize = lambda *args: None
        self.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]


def _is_here(tensor):
    return tensor.device.type == NAME


def _base(storage):
    """The memory of a storage of the device."""
    known = _memory.get(storage.data_ptr())
    return UntypedStorage(0) if known is None else known[0]


def _storage(base):
    """The storage of the device in a memory of the host."""
    address = base.data_ptr()
    known = _memory.get(address)
    if known is not None and not known[1].expired():
        return UntypedStorage._new_with_weak_ptr(known[1].cdata)
    construct = torch._C._construct_storage_from_data_pointer
    storage = construct(address, torch.device(NAME, 0), base.nbytes())
    if address:
        _memory[address] = base, StorageWeakRef(storage)
    return storage


def _on_host(tensor):
    """The same numbers as a CPU tensor."""
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    base = _base(tensor.untyped_storage())
    return torch.empty(0, dtype=tensor.dtype).set_(base, *place)


def _point_to(tensor, source):
    """Have a tensor of the device show what one of the host does."""
    place = source.storage_offset(), source.size(), source.stride()
    return _set(tensor, _storage(source.untyped_storage()), *place)


def _set(*args):
    """``Tensor.set_`` by the CPU's kernel, which looks at no data."""
    op = torch.ops.aten.set_.source_Storage_storage_offset
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)


def _on_device(tensor):
    empty = torch._C._acc.create_empty_tensor((0,), tensor.dtype)
    return _point_to(empty, tensor)


def _run(op, *args, **kwargs):
    """Any operation of the device: that of the CPU on the same memory."""
    if len(_memory) > _run.limit:
        for address in [a for a, (_, weak) in _memory.items() if weak.expired()]:
            del _memory[address]
        _run.limit = 2 * len(_memory) + 1000
    name = op._schema.name.removeprefix("aten::")
    if op is torch.ops.aten.set_.source_Storage_storage_offset:
        return _set(*args)
    _check_devices(op, name, args, kwargs)
    args = _without_numbers(op, args)
    twins = {}

    def on_host(value):
        if isinstance(value, Tensor) and _is_here(value):
            return twins.setdefault(id(value), (value, _on_host(value)))[1]
        is_place = isinstance(value, torch.device) and value.type == NAME
        return HOST if is_place else value

    wanted = kwargs.get("device") or (args[0].device if name == "_to_copy" else None)
    stays = wanted.type == NAME if wanted else True
    host_args, host_kwargs = tree_map(on_host, (args, kwargs))
    if name == "_copy_from":  # what copy_ comes down to
        host_args[1].copy_(host_args[0])
        return args[1]
    found = op(*host_args, **host_kwargs)
    for value, twin in twins.values():  # changed in place, as by resize_ or t_
        _point_to(value, twin)
    back = {id(twin): value for value, twin in twins.values()}

    def on_device(value):
        if not stays or not isinstance(value, Tensor):
            return value
        return back[id(value)] if id(value) in back else _on_device(value)

    return tree_map(on_device, found)


_run.limit = 1000


def _without_numbers(op, args):
    """Arguments with tensors again where torch had passed their number on."""
    kinds = {t.dtype for t in args if isinstance(t, Tensor) and t.is_floating_point()}
    dtype = kinds.pop() if len(kinds) == 1 else None
    return tuple(
        torch.tensor(value, dtype=dtype if isinstance(value, float) else None)
        if isinstance(value, int | float) and str(place.type) == "Tensor"
        else value
        for value, place in zip(args, op._schema.arguments, strict=False)
    )


def _check_devices(op, name, args, kwargs):
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    kinds = {t.device.type for t in tensors if t.dim() > 0}
    if len(kinds) > 1 and (
        name not in MIXED or ("index" in name and not _is_here(args[0]))
    ):
        raise RuntimeError(f"{op}: expected one device, got {sorted(kinds)}")


def _register_operations():
    every, aten = (torch.library.Library(n, "IMPL") for n in ("_", "aten"))
    every.fallback(_run, "PrivateUse1")
    ops = torch.ops.aten

    def forward(*args):
        return _run(ops.convolution.default, *args)

    def backward(grad, images, weight, *args):
        sizes = [weight.shape[0]]
        return _run(
            ops.convolution_backward.default, grad, images, weight, sizes, *args
        )

    # Of other devices than the CPU torch has these two defined by their makers.
    aten.impl("convolution_overrideable", forward, "PrivateUse1")
    aten.impl("convolution_backward_overrideable", backward, "PrivateUse1")
    _run.libraries = every, aten  # else they would be forgotten


def _register_storages():
    """What torch does with storages past its operations: copies, files, FSDP."""

    def replace(name, ours):
        theirs = getattr(UntypedStorage, name)
        setattr(
            UntypedStorage,
            name,
            lambda self, *args: (ours if _is_here(self) else theirs)(self, *args),
        )

    replace("clone", lambda self: _storage(_base(self).clone()))
    replace("cpu", lambda self: _base(self).clone())
    replace("resize_", lambda self, size: self)  # FSDP frees memory by this
    torch.serialization.register_package(
        0,
        lambda storage: f"{NAME}:0" if _is_here(storage) else None,
        lambda storage, place: _storage(storage) if place.startswith(NAME) else None,
    )
