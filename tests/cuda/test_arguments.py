"""Argument blocks that follow their operands, and tensor maps as the driver is asked for them; no GPU needed."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from multigemm.cuda import driver, tensor_map
from multigemm.cuda.arguments import OPERANDS, Address, ArgumentBlock, Slot, along, fields, join, words
from multigemm.cuda.launch import Kernel
from multigemm.cuda.tensor_map import SIZE, encode_together, repeat
from multigemm.errors import LibraryError
from tests.support.concurrency import on_new_threads
from tests.support.cuda_driver import ADDRESSED, CONTEXT, FakeDriver, install

find_place: Callable[[], int] = tensor_map._place_of_address.__wrapped__


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


def block_words(block: ArgumentBlock) -> list[int]:
    return [int(word) for word in np.frombuffer(block._words, np.uint64)]


def moved_to(**addresses: int) -> tuple[int, ...]:
    return tuple(addresses.get(name, 0) for name in OPERANDS)


def test_arguments_lie_where_the_pointers_say() -> None:
    block = ArgumentBlock([5, -1, b"abc", 7, bytes(range(70))])
    at = [int(pointer or 0) for pointer in block.pointers]
    assert at[2] % 64 == at[4] % 64 == 0 and at[1] == at[0] + 8
    assert [struct.unpack("<q", ctypes.string_at(at[i], 8))[0] for i in (0, 1, 3)] == [5, -1, 7]
    assert ctypes.string_at(at[2], 3) == b"abc" and ctypes.string_at(at[4], 70) == bytes(range(70))
    assert block.size == at[4] + 72 - at[0]


def test_a_kernel_without_arguments_has_a_block() -> None:
    block = ArgumentBlock([])
    block.move(moved_to())
    assert block.size == 0 and not block.stays_behind([(1, 100)])


def test_a_move_rewrites_every_word_of_an_operand_and_no_other() -> None:
    a, b = Address(0x1000, "a"), Address(0x2000, "b")
    table = fields(struct.pack("<6Q", 1, 0x1010, 2, 0x1010, 3, 0x1010), [Slot(8, a.operand, 16, 3, 16)])
    block = ArgumentBlock([a, 9, along(b, b + 64), join([b"12345678", table, words(b)])])
    wanted = [0x1000, 9, 0x2040]
    tail = [int.from_bytes(b"12345678", "little"), 1, 0x1010, 2, 0x1010, 3, 0x1010, 0x2000]
    assert block_words(block) == [*wanted, *[0] * 5, *tail]
    block.move(moved_to(a=0x9000, b=0x2000))
    tail = [tail[0], 1, 0x9010, 2, 0x9010, 3, 0x9010, 0x2000]
    assert block_words(block) == [0x9000, 9, 0x2040, *[0] * 5, *tail]
    block.move(moved_to(a=0x9000, b=0x7000))
    assert block_words(block) == [0x9000, 9, 0x7040, *[0] * 5, *tail[:-1], 0x7000]
    block.move(moved_to(a=0x1000, b=0x2000))
    assert block_words(block)[0] == 0x1000 and block_words(block)[2] == 0x2040


def test_a_move_that_was_interrupted_is_made_whole_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Address(0x1000, "a"), Address(0x2000, "b")
    block = ArgumentBlock([a, b])
    block.move(moved_to(a=0x1000, b=0x2000))

    class Interrupted(dict[int, int]):
        def __setitem__(self, place: int, value: int) -> None:
            raise KeyboardInterrupt

    assert block._writers is not None
    first, (operand, [writer]) = block._writers
    block._writers = (first, (operand, [(0, Interrupted(), 0)]))
    with pytest.raises(KeyboardInterrupt):
        block.move(moved_to(a=0x9000, b=0x8000))
    block._writers = (first, (operand, [writer]))
    block.move(moved_to(a=0x1000, b=0x2000))
    assert block_words(block) == [0x1000, 0x2000]


def test_a_word_that_would_stay_behind_is_found() -> None:
    a = Address(0x1000, "a")
    assert ArgumentBlock([a, int(a) + 8]).stays_behind([(0x1000, 0x1010)])
    assert not ArgumentBlock([a, int(a) + 16]).stays_behind([(0x1000, 0x1010)])
    assert not ArgumentBlock([fields(bytes(64), [Slot(0, 0, 0, 4, 16)])]).stays_behind([(0x1000, 0x1010)])


def test_one_set_up_serves_all_boxes(fake: FakeDriver) -> None:
    boxes = tuple((64, 8 * (i + 1), 1) for i in range(16))
    maps = encode_together(torch.bfloat16, Address(1 << 40, "a"), (512, 100, 3), (1024, 102400), boxes)
    rows = np.frombuffer(maps, np.uint64).reshape(16, SIZE // 8)
    assert (rows[:, 0] == 1 << 40).all() and rows[:, 2:5].tolist() == [[512, 100, 3]] * 16
    assert [(int(row[11]) & 0xFFFFFFFF, int(row[11]) >> 32, int(row[12])) for row in rows] == list(boxes)
    assert [*map(tuple, rows[:, 7:9].tolist())] == [(1024, 102400)] * 16
    assert maps.slots == (Slot(8 * ADDRESSED, 0, 0, 16, SIZE),)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_maps_of_every_rank_are_encoded(rank: int, fake: FakeDriver) -> None:
    extents, strides = tuple(range(3, 3 + rank)), tuple(16 << i for i in range(rank - 1))
    raw = encode_together(torch.float16, 1 << 40, extents, strides, ((1,) * rank,), swizzle=0)
    found = np.frombuffer(raw, np.uint64)
    assert found[2 : 2 + rank].tolist() == [*extents] and found[7 : 6 + rank].tolist() == [*strides]
    assert raw.slots == ()


def test_a_refused_layout_is_named(fake: FakeDriver) -> None:
    with pytest.raises(LibraryError, match=r"address 0x10000000008.*\(24,\)"):
        encode_together(torch.float16, (1 << 40) + 8, (64, 64), (24,), ((64, 8),))


def test_maps_of_a_stack_are_one_map_at_several_addresses(fake: FakeDriver) -> None:
    first = Address(1 << 40, "b")
    alone = encode_together(torch.float16, first, (64, 64), (128,), ((64, 8),))
    stack = repeat(alone, [0, 512, 4096])
    each = [encode_together(torch.float16, first.at(first + x), (64, 64), (128,), ((64, 8),)) for x in (0, 512, 4096)]
    assert stack == join(each)
    assert [slot[:4] for slot in stack.slots] == [slot[:4] for slot in join(each).slots]


@pytest.mark.parametrize("place", [0, 3])
def test_the_place_of_the_address_is_found(place: int, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode_there(kind: object, address: int, *rest: object) -> bytes:
        return struct.pack("<16Q", *[address if i == place else 5 for i in range(16)])

    assert find_place() == 8 * ADDRESSED
    monkeypatch.setattr(tensor_map, "encode_together", encode_there)
    assert find_place() == 8 * place


@pytest.mark.parametrize(
    "spread", [lambda x: (x, x), lambda x: (x >> 4, 0), lambda x: (0, 0)], ids=["two", "coded", "none"]
)
def test_maps_that_do_not_hold_the_address_in_one_word_are_refused(
    spread: Callable[[int], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode_so(kind: object, address: int, *rest: object) -> bytes:
        return struct.pack("<16Q", *spread(address), *[5] * 14)

    monkeypatch.setattr(tensor_map, "encode_together", encode_so)
    with pytest.raises(LibraryError, match="one word that holds the address"):
        find_place()


def test_threads_encode_into_memory_of_their_own(fake: FakeDriver) -> None:
    found: dict[int, bytes] = {}

    def work(number: int) -> None:
        with driver.on_device(0):
            found[number] = b"".join(
                encode_together(torch.float16, (number + 1) << 32, (64, i + 1), (128,), ((64, 8),)) for i in range(50)
            )

    on_new_threads(*(partial(work, number) for number in range(4)))
    for number, raw in found.items():
        rows = np.frombuffer(raw, np.uint64).reshape(50, 16)
        assert (rows[:, 0] == (number + 1) << 32).all() and rows[:, 3].tolist() == [*range(1, 51)]
    assert len(found) == 4 and fake.without_context == []


def test_every_driver_call_of_a_kernel_has_the_devices_context(fake: FakeDriver) -> None:
    seen: list[int] = []

    def work() -> None:
        kernel = Kernel(b"image", "name", 1, shared=100_000)
        kernel.resident_clusters(2, 128, 100_000)
        kernel.blocks_per_processor(128, 0)
        seen.append(fake.current)
        with driver.on_device(1):
            seen.append(fake.current)
            with driver.on_device(0):
                seen.append(fake.current)
            seen.append(fake.current)

    on_new_threads(work)
    assert fake.without_context == [] and seen == [0, CONTEXT + 1, CONTEXT, CONTEXT + 1]
    assert fake.calls[:3] == ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"]
