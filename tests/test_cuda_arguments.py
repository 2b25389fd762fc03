"""The arguments of a kernel in memory: where they lie, and how they follow the operands."""

from __future__ import annotations

import ctypes

import pytest

from multigemm.cuda.arguments import OPERANDS, Address, ArgumentBlock, join, words

Addresses = tuple[int, ...]


def addresses(**given: int) -> Addresses:
    return tuple(given.get(name, 0) for name in OPERANDS)


def content(block: ArgumentBlock) -> bytes:
    """All that lies between the first argument and the end of the last."""
    return ctypes.string_at(block.pointers[0] or 0, block.size)


def test_arguments_lie_where_the_driver_is_told() -> None:
    values: list[int | bytes] = [7, bytes(range(128)), -1, 2**63, bytes(128), True, b"abc", 5]
    block = ArgumentBlock(values)
    assert len(block.pointers) == len(values)
    for value, address in zip(values, block.pointers, strict=True):
        assert address is not None
        if isinstance(value, bytes):
            assert address % 64 == 0, "tensor maps are aligned"
            assert ctypes.string_at(address, len(value)) == value
        else:
            assert ctypes.c_uint64.from_address(address).value == value % 2**64
    assert block.size == 8 * (8 + 16 + 1 + 1 + 6 + 16 + 1 + 7 + 1 + 1)


def test_addresses_follow_their_operands_and_nothing_else_does() -> None:
    def block(a: int, ends: int) -> ArgumentBlock:
        first = Address(a, "a")
        table = join([words(1, first.at(a + 24)), words(Address(ends, "ends"))])
        return ArgumentBlock([first, 4096, table, first.at(a // 16 * 16), Address(ends, "ends")])

    moved = block(4096, 512)
    before = content(moved)
    moved.move(addresses(a=8192, ends=1024, out=77))
    assert content(moved) == content(block(8192, 1024)) != before
    moved.move(addresses(a=4096, ends=512))
    assert content(moved) == before


@pytest.mark.parametrize(("value", "behind"), [(Address(5000, "b"), False), (5000, True), (6000, False)])
def test_an_address_that_is_no_slot_stays_behind(value: int, behind: bool) -> None:
    block = ArgumentBlock([1, words(value, 2), 3])
    assert block.stays_behind([(8, 9), (4096, 6000)]) is behind


def test_no_arguments() -> None:
    assert ArgumentBlock([]).size == 0
