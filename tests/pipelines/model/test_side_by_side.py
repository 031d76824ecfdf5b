"""Parallel calls: all are made, with results in order; quick ones share a thread; an error stops the rest."""

import threading

import pytest

from sluice.pipelines.util.parallel import AT_ONCE, map_parallel


@pytest.mark.parametrize("patience", [0, 10])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_results_are_in_input_order(count: int, patience: float) -> None:
    assert map_parallel(lambda n: n * n, range(count), patience) == [n * n for n in range(count)]


def test_quick_work_uses_one_thread() -> None:
    assert len(set(map_parallel(lambda n: threading.get_ident(), range(100), patience=60))) == 1


@pytest.mark.parametrize("patience", [0, 0.001])
def test_more_threads_start_when_one_thread_waits(patience: float) -> None:
    together = threading.Barrier(AT_ONCE)
    assert map_parallel(lambda n: together.wait(60) >= 0, range(AT_ONCE), patience) == [True] * AT_ONCE


@pytest.mark.parametrize("patience", [0, 10])
def test_first_error_is_raised_and_no_further_items_start(patience: float) -> None:
    begun: list[int] = []

    def fail_late(n: int) -> None:
        begun.append(n)
        if n >= 20:
            raise ValueError(n)

    with pytest.raises(ValueError, match=r"^20$"):
        map_parallel(fail_late, range(1000), patience)
    assert len(begun) <= 20 + AT_ONCE


def test_nested_quick_work_uses_the_thread_of_its_item() -> None:
    def inner(n: int) -> set[int]:
        return {threading.get_ident(), *map_parallel(lambda m: threading.get_ident(), range(20), patience=60)}

    assert all(len(threads) == 1 for threads in map_parallel(inner, range(8), patience=60))


def test_nested_work_gets_more_threads_after_a_slow_item() -> None:
    together = threading.Barrier(AT_ONCE)

    def inner(n: int) -> list[bool]:
        return map_parallel(lambda m: m == 0 or together.wait(60) >= 0, range(AT_ONCE + 1), patience=1e-9)

    assert map_parallel(inner, [0, 1], patience=60)[0] == [True] * (AT_ONCE + 1)


def test_nested_error_is_raised() -> None:
    def inner(n: int) -> None:
        map_parallel(lambda m: 1 // (5 - m), range(20), patience=60)

    with pytest.raises(ZeroDivisionError):
        map_parallel(inner, [0, 1], patience=60)
