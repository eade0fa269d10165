"""What a cubin says about itself: its kernels and the resources they take. A cubin is an ELF file."""

from __future__ import annotations

import struct

__all__ = ["entry_symbols", "resources"]


def _sections(cubin: bytes) -> list[tuple[int, int, int, int, int]]:
    """(type, offset, bytes, linked section, bytes of an entry) of every section of an ELF file."""
    table, = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    return [(h[1], h[4], h[5], h[6], h[9]) for h in headers]


def entry_symbols(cubin: bytes) -> list[str]:
    """Names of the kernels in a cubin, from its symbol table."""
    sections, names = _sections(cubin), []
    for kind, at, length, strings, entry in sections:
        if kind != 2:   # SHT_SYMTAB
            continue
        for symbol in range(at, at + length, entry):
            name, info, other = struct.unpack_from("<IBB", cubin, symbol)
            if info & 15 == 2 and other & 0x10:   # a function, and an entry point
                start = sections[strings][1] + name
                names.append(cubin[start:cubin.index(b"\0", start)].decode())
    return names


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack (spilled registers included), the largest of all functions in a cubin.

    Read from the cubin's ``.nv.info``, because not every nvJitLink reports them in its log (13.0 does not).
    """
    wanted = {0x2F: "registers", 0x11: "stack", 0x12: "stack"}
    found: dict[str, int] = {}
    for kind, at, length, _, _ in _sections(cubin):
        if kind != 0x70000000:   # SHT_CUDA_INFO
            continue
        end = at + length
        while at < end:   # form, attribute, and a value of 2 bytes, or of as many as these say
            form, attribute, value = struct.unpack_from("<BBH", cubin, at)
            if form == 4 and attribute in wanted:
                name = wanted[attribute]
                found[name] = max(found.get(name, 0), struct.unpack_from("<II", cubin, at + 4)[1])
            at += 4 + (value if form == 4 else 0)
    if found.keys() != set(wanted.values()):
        raise RuntimeError(f"the cubin reports {', '.join(found) or 'nothing'}, not the registers and the stack of its functions")
    return found
