"""From a kernel's name and shape to a running grid: compile (``ncclep_py.compiled``), load, prepare, enqueue.

Compiling needs no GPU; everything from `load` on works on the current CUDA device.
Compile and load for all ranks of a process before any of their kernels runs: loading a module waits for kernels that wait for each other.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ncclep_py.compiled import KERNELS, CompiledKernel, KernelSpec, compile_kernel, parameters_of
from ncclep_py.config import Layout
from ncclep_py.kernels.shape import KernelShape
from ncclep_py.memory_map import WORD, align
from ncclep_py.toolchain import check_loaded_nccl, nccl_header_version

__all__ = [
    "KERNELS",
    "CompiledKernel",
    "KernelSpec",
    "Launch",
    "LoadedKernel",
    "check_loaded_nccl",
    "compile_kernel",
    "load",
    "nccl_header_version",
    "occupancy",
    "parameters_of",
    "self_test",
    "shared_bytes",
]

MAX_SHARED_BYTES = 200 * 1024
"""Most dynamic shared memory of a block; sm_90 and sm_100 have 227 KiB, others less (`LoadedKernel.allow_shared` asks the device)."""

ROUTING_BYTES = 8
"""What a lane of a combine fetches of the routing: a row and a weight."""

FREE_SHARED_BYTES = 48 * 1024
"""What a kernel may use without asking."""


def shared_bytes(shape: KernelShape, max_tokens: int, grid: int, warps: int = 0, limit: int = MAX_SHARED_BYTES) -> int:
    """Dynamic shared memory of a block: three counters per expert, and a row number per (token, k) of the block; RANK_MAJOR: three counters per
    rank, and a row number, id and weight per (token, k). After these, room for the first row of each of its `warps` (or as much of it as fits below
    `limit`), which is fetched while the block waits for other ranks."""
    tokens_of_block = -(-max_tokens // grid)
    counters, words = (shape.num_ranks, 3) if shape.layout is Layout.RANK_MAJOR else (shape.num_experts, 1)
    needed = max(align(3 * 4 * counters + 4 * words * tokens_of_block * shape.num_topk, 16), ROUTING_BYTES * 32 * warps)
    if needed > MAX_SHARED_BYTES:
        raise ValueError(f"{shape.num_experts} experts and {tokens_of_block} tokens per block ({max_tokens} over {grid} blocks) with "
                         f"{shape.num_topk} experts each need {needed} bytes of shared memory, at most {MAX_SHARED_BYTES} are available: raise "
                         "max_num_sms, or lower max_dispatch_tokens_per_rank")
    # vectors of 16 bytes of a row that one warp moves
    piece = -(-shape.piece_bytes // 16 // max(1, warps // max(1, tokens_of_block))) * shape.piece_vectors
    return needed + max(0, min(piece, (limit - needed) // 16 // warps)) * 16 * warps if warps else needed


# ---- load and launch -----------------------------------------------------------------------------------------------------
def _checked(result: tuple) -> Any:
    """The value of a driver call, or a ``RuntimeError`` with the driver's words."""
    from cuda.bindings import driver

    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {driver.cuGetErrorString(result[0])[1].decode()}")
    return result[1] if len(result) == 2 else None


class LoadedKernel:
    """A kernel on one device; from `load`."""

    def __init__(self, compiled: CompiledKernel, device: int) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self.name, self.compiled, self.device = compiled.name, compiled, device
        self.code = ObjectCode.from_cubin(compiled.cubin, name=compiled.name)
        self.kernel = self.code.get_kernel(compiled.symbol)
        self.function = _checked(driver.cuKernelGetFunction(self.kernel.handle))
        _checked(driver.cuFuncLoad(self.function))   # now, not at the first launch
        self._allowed = FREE_SHARED_BYTES

    def allow_shared(self, num_bytes: int) -> None:
        """Let blocks have that much dynamic shared memory."""
        from cuda.bindings import driver
        from cuda.core import Device

        if num_bytes > self._allowed:
            most = Device(self.device).properties.max_shared_memory_per_block_optin
            if num_bytes > most:
                raise ValueError(f"{self.name} needs {num_bytes} bytes of shared memory per block, this GPU has {most}: raise max_num_sms, or "
                                 "lower max_dispatch_tokens_per_rank")
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuKernelSetAttribute(attribute, num_bytes, self.kernel.handle, self.device))
            self._allowed = num_bytes

    def set_words(self, name: str, values: Sequence[int]) -> None:
        """Set a variable of 64-bit words of the loaded code."""
        from cuda.bindings import driver

        words = np.array(values, np.uint64)
        error, address, size = driver.cuLibraryGetGlobal(self.code.handle, name.encode())
        _checked((error,))
        if size != words.nbytes:
            raise RuntimeError(f"{name} of {self.name} has {size} bytes, {words.nbytes} expected")
        _checked(driver.cuMemcpyHtoD(address, words.ctypes.data, words.nbytes))

    def prepare(self, grid: int, block: int, shared_bytes: int, values: Mapping[str, int] | Sequence[int]) -> Launch:
        """A launch with everything but the stream decided; its values can be changed."""
        self.allow_shared(shared_bytes)
        return Launch(self, grid, block, shared_bytes, values)


class Launch:
    """A grid and its arguments, made once and enqueued often; from `LoadedKernel.prepare`.

    The driver is called with a table of pointers to the arguments that never moves; ``cuda.core.launch`` makes one of Python objects every time,
    which costs several times the launch itself.
    """

    __slots__ = ("_function", "_launch", "_pack", "_parameters", "_pointers", "_sizes", "_streams", "_table", "_values", "_words")

    def __init__(self, loaded: LoadedKernel, grid: int, block: int, shared_bytes: int, values: Mapping[str, int] | Sequence[int]) -> None:
        from cuda.bindings import driver

        self._parameters = parameters_of(loaded.name)
        count = len(self._parameters)   # all of 64 bits
        words = np.zeros(count, np.int64)
        self._words = words.data
        self._pack = struct.Struct(f"{count}q").pack_into
        self._pointers = words.ctypes.data + WORD * np.arange(count, dtype=np.uint64)
        self._function, self._launch, self._table = loaded.function, driver.cuLaunchKernel, self._pointers.ctypes.data
        self._sizes = (grid, 1, 1, block, 1, 1, shared_bytes)
        self._streams: dict[int, Any] = {}
        self._values: Sequence[int] = ()
        self.assign(values)

    def set(self, name: str, value: int) -> None:
        """Change one value."""
        values = list(self._values)
        values[self._parameters.index(name)] = value
        self._values = values

    def assign(self, values: Mapping[str, int] | Sequence[int]) -> None:
        """Change all values."""
        if not isinstance(values, (tuple, list)) and isinstance(values, Mapping):   # the first is ten times as fast
            unknown = sorted(values.keys() ^ set(self._parameters))
            if unknown:
                raise ValueError(f"values must name exactly the kernel's parameters; missing or unknown: {', '.join(unknown)}")
            values = [values[name] for name in self._parameters]
        if len(values) != len(self._parameters):
            raise ValueError(f"the kernel takes {len(self._parameters)} values, got {len(values)}")
        self._values = values

    def enqueue(self, stream_handle: int) -> None:
        """Put the grid on a stream, given as CUDA's handle (0 for the default stream)."""
        stream = self._streams.get(stream_handle)
        if stream is None:
            stream = self._streams[stream_handle] = _stream(stream_handle)
        try:
            self._pack(self._words, 0, *self._values)   # the driver copies them during the call
        except struct.error:
            self._pack(self._words, 0, *(signed(value) for value in self._values))
        error = self._launch(self._function, *self._sizes, stream, self._table, 0)
        if error[0]:
            _checked(error)


def signed(value: int) -> int:
    """The int64 of the same 64 bits; ``ValueError`` for an integer that has more."""
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"a kernel's value must fit into 64 bits, got {value}")
    return value - (1 << 64) if value >> 63 == 1 else value


def _stream(handle: int) -> Any:
    """The driver's name of a stream somebody else owns."""
    from cuda.bindings import driver

    return driver.CUstream(handle)


_LOADED: dict[tuple[int, int, str], LoadedKernel] = {}


def load(compiled: CompiledKernel) -> LoadedKernel:
    """The kernel on the current device, ready to run without any further loading; one per process, device and kernel."""
    from cuda.core import Device

    device = Device()
    device.set_current()
    place = (device.device_id, int(device.context.handle), compiled.info["key"])
    if place not in _LOADED:
        _LOADED[place] = LoadedKernel(compiled, device.device_id)
    return _LOADED[place]


def occupancy(loaded: LoadedKernel, block: int, shared_bytes: int) -> int:
    """Blocks of the kernel that run at once on one multiprocessor."""
    loaded.allow_shared(shared_bytes)
    return int(loaded.kernel.occupancy.max_active_blocks_per_multiprocessor(block, shared_bytes))


# ---- doctor --------------------------------------------------------------------------------------------------------------
def self_test() -> dict[str, Any]:
    """Compile a kernel and, where there is a GPU, run two ranks on it: ``compiled``, ``seconds``, ``ran_on_gpu`` (None: no GPU), ``message``."""
    from ncclep_py.config import GroupConfig

    started = time.perf_counter()
    outcome: dict[str, Any] = {"compiled": False, "seconds": 0.0, "ran_on_gpu": None, "message": ""}
    try:
        shape = KernelShape.build(GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=16, hidden=256, num_topk=2), 2, 2, 8)
        compiled = compile_kernel(KernelSpec("ll_dispatch", shape), _present_arch() or "sm_90")
        outcome["compiled"], outcome["message"] = True, f"{compiled.name} for {compiled.info['arch']}: {compiled.info['registers']} registers"
        if _present_arch():
            outcome["ran_on_gpu"] = False
            _run_two_ranks()
            outcome["ran_on_gpu"] = True
    except Exception as e:   # a doctor reports whatever is wrong
        outcome["message"] = f"{type(e).__name__}: {e}"
    outcome["seconds"] = round(time.perf_counter() - started, 2)
    return outcome


def _present_arch() -> str | None:
    """Architecture of torch's current device, None without one."""
    import torch

    return "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def _run_two_ranks() -> None:
    """One dispatch and combine between two ranks on this machine's GPUs, checked."""
    import torch

    from ncclep_py import Group, GroupConfig, Layout, LocalWorld

    def program(comm: Any) -> bool:
        config = GroupConfig(num_experts=8, max_dispatch_tokens_per_rank=16, hidden=256, num_topk=2, timeout_ns=10**10)
        with Group.create(comm, config) as group:
            tokens = torch.full((4, 256), float(comm.rank + 1), dtype=torch.bfloat16, device=comm.device)
            topk_idx = torch.tensor([[t, 7 - t] for t in range(4)], device=comm.device)
            with group.create_handle(Layout.EXPERT_MAJOR, topk_idx) as handle:
                received = handle.dispatch(tokens)
                combined = handle.combine(received.tokens, topk_weights=torch.full((4, 2), 0.5, device=comm.device))
                group.check()
                return bool(torch.equal(combined, tokens))

    with LocalWorld(2, backend="nccl") as world:
        if not all(world.run(program)):
            raise RuntimeError("two ranks on the GPU ran, but combine did not give the tokens back")
