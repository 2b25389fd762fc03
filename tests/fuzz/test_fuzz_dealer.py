"""Batches of problems: each slot is begun before any goes on, nothing comes twice, nobody waits for a compiler."""

from multigemm.fuzz.dealer import LEAD, Batch, Dealer
from multigemm.fuzz.plan import Options


def options(examples: int = 0) -> Options:
    return Options(("cpu",), kinds=3, turns=2, burst=4, examples=examples)


def test_every_slot_is_begun_first() -> None:
    dealer = Dealer(options())
    batches = [dealer.deal() for _ in range(6)]
    assert [batch and options().slot_of(batch.first) for batch in batches] == [0, 1, 2, 3, 4, 5]
    assert dealer.cold() == [0, 1, 2, 3, 4, 5]


def test_only_what_has_been_compiled_goes_on() -> None:
    dealer = Dealer(options())
    first = [dealer.deal() for _ in range(6)]
    assert first[4] is not None and first[1] is not None
    assert not dealer.seen(first[4].first) and not dealer.seen(first[1].first + 3)
    assert dealer.cold() == [0, 2, 3, 5]
    rest = [dealer.deal() for _ in range(8)]
    assert {options().slot_of(batch.first) for batch in rest if batch} == {1, 4}
    numbers = [n for batch in [*first, *rest] if batch for n in range(batch.first, batch.stop)]
    assert len(set(numbers)) == len(numbers) == 14 * 4


def test_what_is_compiled_comes_before_what_is_not_if_asked() -> None:
    dealer = Dealer(options())
    assert dealer.deal(fresh=False) == Batch(0, 4) and dealer.is_cold(3)
    dealer.seen(0)
    assert dealer.deal(fresh=False) == Batch(24, 28) and not dealer.is_cold(25)
    assert dealer.deal() == Batch(4, 8)


def test_kernels_that_a_process_has_loaded_go_on_for_some_laps() -> None:
    dealer = Dealer(options())
    for slot in range(6):
        assert dealer.deal() == Batch(4 * slot, 4 * slot + 4)
        dealer.seen(4 * slot)
    mine = [dealer.deal(loaded={2, 4}) for _ in range(2 * LEAD)]
    assert {dealer.options.slot_of(batch.first) for batch in mine if batch} == {2, 4}
    others = [batch for _ in range(LEAD) if (batch := dealer.deal(loaded={2, 4}))]
    assert {dealer.options.slot_of(batch.first) for batch in others} > {2, 4}, "nobody stays behind for ever"
    numbers = [batch.first for batch in [*mine, *others] if batch]
    assert len(set(numbers)) == len(numbers)


def test_as_many_as_were_asked_for() -> None:
    dealer = Dealer(options(examples=10))
    assert [dealer.deal() for _ in range(4)] == [Batch(0, 4), Batch(4, 8), Batch(8, 10), None]
    dealer.more(3)
    assert dealer.deal() == Batch(12, 15)


def test_the_last_slot_to_come_back_is_told() -> None:
    dealer = Dealer(options())
    assert [dealer.seen(4 * slot) for slot in (0, 1, 2, 3, 3, 4, 5, 5)] == [False] * 6 + [True, False]
    assert not dealer.cold()


def test_without_kinds_numbers_follow_one_another() -> None:
    dealer = Dealer(Options(("cpu",), burst=4, examples=6))
    assert [dealer.deal(), dealer.deal(), dealer.deal()] == [Batch(0, 4), Batch(4, 6), None]
    assert not dealer.seen(3) and not dealer.cold()
