"""The pages a member has in hand."""

import pytest

from rorqual.attention.kv.directory.stock import Stock


def test_pages_come_in_runs_and_behind_the_one_named():
    stock = Stock(4)
    stock.put(range(8, 16))
    assert stock.take(3) == [8, 9, 10]
    assert stock.take(2) == [12, 13]  # the extent that has the most
    assert stock.take(2, after=10) == [11, 14]  # then the only one left that has any
    assert stock.pages() == [15] and stock.n_pages == 1 and 15 in stock and 14 not in stock


def test_what_comes_back_is_given_out_again():
    stock = Stock(4)
    stock.put([1, 2])
    taken = stock.take(2)
    stock.put(taken)
    assert stock.pages() == [1, 2]
    assert stock.take(0) == []


def test_surplus_takes_whole_extents_first():
    stock = Stock(4)
    stock.put([0, 1, 4, 5, 6, 7])
    assert stock.surplus(keep=2) == [4, 5, 6, 7] and stock.pages() == [0, 1]
    assert stock.surplus(keep=2) == []


def test_misuse():
    stock = Stock(4)
    stock.put([0])
    with pytest.raises(AssertionError, match="already"):
        stock.put([0])
    with pytest.raises(AssertionError, match="2 pages wanted, 1 in stock"):
        stock.take(2)
