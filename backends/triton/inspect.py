"""What the assembler made of a kernel: registers, stack, shared memory, read from the cubin itself.

Spills show as a stack frame. Reading the ELF needs no GPU and no tool of the CUDA toolkit, so any
machine that can compile can also check.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

FRAME_SIZE, REGISTERS = 0x11, 0x2F
FORMAT_WORDS = 0x04


@dataclass(frozen=True, slots=True)
class Usage:
    """Per-thread registers and stack bytes (spills, or arrays that would not stay in registers)."""

    registers: int
    stack: int


def _sections(code: bytes) -> dict[str, bytes]:
    """Sections of a 64-bit little-endian ELF file by name."""
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * size) for i in range(count)]
    text = headers[names][4]

    def name(at: int) -> str:
        return code[text + at : code.index(b"\0", text + at)].decode()

    return {name(h[0]): code[h[4] : h[4] + h[5]] for h in headers}


def _attributes(raw: bytes) -> list[tuple[int, bytes]]:
    """The records of an .nv.info section: format, attribute, then a size and that many bytes (or a value)."""
    found, at = [], 0
    while at + 4 <= len(raw):
        kind, attribute, size = struct.unpack_from("<BBH", raw, at)
        length = size if kind == FORMAT_WORDS else 0
        found.append((attribute, raw[at + 4 : at + 4 + length]))
        at += 4 + length
    return found


def usage(code: bytes) -> Usage:
    """The largest register count and stack frame of any function in the cubin."""
    values: dict[int, list[int]] = {FRAME_SIZE: [0], REGISTERS: [0]}
    for attribute, data in _attributes(_sections(code).get(".nv.info", b"")):
        if attribute in values and len(data) == 8:
            values[attribute].append(struct.unpack("<II", data)[1])
    return Usage(max(values[REGISTERS]), max(values[FRAME_SIZE]))
