"""`ElasticBuffer`: a receive buffer for the worst case that takes GPU memory for the usual one: one address range whose head is GPU memory and whose
tail is host memory, which the GPU reads and writes over its bus.

Where it serves, and what it costs. Peers write received rows directly into the group's symmetric window, which is GPU memory of the budget's size;
an elastic buffer is no window, so dispatch copies the received rows into it (``DispatchOutputs.tokens``) and combine copies them back
(``CombineInputs.tokens``): each time ``received rows x row bytes`` read and as many written, those beyond `ElasticBuffer.head_rows` over the bus. The
same holds for exact-size outputs after a query. Only kernels may touch the tail: ``memcpy`` and ``memset`` of the driver fail on it, so that
``tensor.cpu()``, ``tensor.copy_`` of all rows and ``tensor.zero_()`` are for the head only, while ``tensor + 0`` or ``tensor.fill_(1)`` work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ncclep_py.memory_map import align

if TYPE_CHECKING:
    import torch

__all__ = ["ElasticBuffer"]


class ElasticBuffer:
    """Rows ``[rows, width]``, the first of them in GPU memory.

    Args:
        rows: rows in all, the worst case.
        width: elements of a row.
        dtype: torch dtype.
        head_rows: rows that must lie in GPU memory; rounded up to the driver's granularity (2 MiB).
        device: CUDA device, default the current one.

    Attributes:
        tensor: the rows.
        head_rows: rows that lie wholly in GPU memory.
        gpu_bytes, host_bytes: memory taken of each kind.

    Raises:
        ValueError: a size is wrong.
        RuntimeError: there is no GPU, or it cannot map host memory this way; the driver's words if it refuses.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, head_rows: int, device: int | None = None) -> None:
        import torch

        if min(rows, width) < 1 or not 0 < head_rows <= rows:
            raise ValueError(f"rows and width must be at least 1 and head_rows in [1, rows], got {rows}, {width} and {head_rows}")
        if not torch.cuda.is_available():
            raise RuntimeError("an elastic buffer needs a CUDA GPU")
        self._device = torch.cuda.current_device() if device is None else device
        self._mapped: list[tuple[int, int]] = []
        self._address, self._reserved = 0, 0
        torch.zeros(1, device=f"cuda:{self._device}")   # makes the context
        row_bytes = width * dtype.itemsize
        try:
            head, tail = self._map(head_rows * row_bytes, rows * row_bytes)
        except BaseException:
            self.close()
            raise
        self.gpu_bytes, self.host_bytes = head, tail
        self.head_rows = min(rows, head // row_bytes)
        memory = torch.as_tensor(_Mapping(self._address, rows * row_bytes, self), device=f"cuda:{self._device}")
        self.tensor: torch.Tensor | None = memory.view(dtype).view(rows, width)

    def _map(self, head_bytes: int, total_bytes: int) -> tuple[int, int]:
        """Reserve the range and put memory behind it; bytes of head and tail."""
        from cuda.bindings import driver

        kinds, places = driver.CUdevice_attribute, driver.CUmemLocationType
        node = _checked(driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, self._device))
        if not _checked(driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, self._device)):
            raise RuntimeError("this GPU or its driver cannot map host memory into an address range of its own (HOST_NUMA)")
        on_gpu = _properties(driver, places.CU_MEM_LOCATION_TYPE_DEVICE, self._device)
        on_host = _properties(driver, places.CU_MEM_LOCATION_TYPE_HOST_NUMA, max(node, 0))
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = max(_checked(driver.cuMemGetAllocationGranularity(p, least)) for p in (on_gpu, on_host))
        head = align(head_bytes, unit)
        tail = align(max(total_bytes - head, 0), unit)
        self._address = int(_checked(driver.cuMemAddressReserve(head + tail, unit, 0, 0)))
        self._reserved = head + tail
        access = driver.CUmemAccessDesc()
        access.location.type, access.location.id = places.CU_MEM_LOCATION_TYPE_DEVICE, self._device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for at, size, properties in ((self._address, head, on_gpu), (self._address + head, tail, on_host)):
            if size:
                memory = _checked(driver.cuMemCreate(size, properties, 0))
                try:
                    _checked(driver.cuMemMap(at, size, 0, memory, 0))
                finally:
                    _checked(driver.cuMemRelease(memory))   # the mapping keeps it
                self._mapped.append((at, size))
                _checked(driver.cuMemSetAccess(at, size, [access], 1))
        return head, tail

    def close(self) -> None:
        """Wait for the device and give the memory back; idempotent. Tensors over it must not be used any more."""
        from cuda.bindings import driver

        self.tensor = None
        if self._mapped:
            import torch

            torch.cuda.synchronize(self._device)
        while self._mapped:
            _checked(driver.cuMemUnmap(*self._mapped.pop()))
        if self._reserved:
            size, self._reserved = self._reserved, 0
            _checked(driver.cuMemAddressFree(self._address, size))

    def __enter__(self) -> ElasticBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Mapping:
    """The range as torch sees it; holds the buffer."""

    def __init__(self, address: int, num_bytes: int, owner: ElasticBuffer) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _properties(driver: Any, kind: Any, index: int) -> Any:
    """Pinned memory at a place."""
    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type, made.location.id = kind, index
    return made


def _checked(result: tuple) -> Any:
    """The value of a driver call, or a ``RuntimeError`` with the driver's words."""
    from cuda.bindings import driver

    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {driver.cuGetErrorString(result[0])[1].decode()}")
    return result[1] if len(result) == 2 else None
