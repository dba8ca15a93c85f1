"""The order of documents: permutations, weights, epochs, shards."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop.protocol.errors import EndstopError
from endstop.train.data.mixture import Mixture, Part, Place, ShardReader, as_mixture
from endstop.train.data.permutation import Permutation, mixed, shuffled


@given(st.integers(1, 20_000), st.integers(0, 2**64 - 1))
def test_a_permutation_hits_every_number_once(size, key):
    permutation = Permutation(size, key)
    assert len(permutation) == size
    sample = range(size) if size < 3000 else range(0, size, 7)
    images = [permutation[index] for index in sample]
    assert len(set(images)) == len(images)
    assert 0 <= min(images) <= max(images) < size


def images_of(size, key):
    permutation = Permutation(size, key)
    return [permutation[index] for index in range(size)]


def test_a_large_permutation_is_one_and_looks_random():
    size = 100_003
    images = images_of(size, 5)
    assert sorted(images) == list(range(size))
    # Of a random order about one number stays where it is, half of the steps go up, and thirds are even.
    assert sum(image == index for index, image in enumerate(images)) < 8
    ups = sum(a < b for a, b in pairwise(images))
    assert abs(ups - size / 2) < 1000
    thirds = Counter(3 * image // size for image in images[: size // 3])
    assert all(abs(count - size / 9) < 500 for count in thirds.values())
    assert images != images_of(size, 6)


def test_the_size_does_not_cost_memory_or_time():
    permutation = Permutation(10**15, 1)
    assert len({permutation[index] for index in range(1000)}) == 1000


def test_a_small_shuffle_reaches_every_order():
    orders = Counter(tuple(shuffled([0, 1, 2], mixed(key))) for key in range(6000))
    assert len(orders) == 6
    assert all(abs(count - 1000) < 150 for count in orders.values())


def test_the_numbers_are_the_same_on_every_machine():
    assert mixed(1, 2, 3) == 5246500226706903259
    assert shuffled([0, 1, 2, 3, 4], 9) == [2, 1, 0, 4, 3]
    assert images_of(10_000, 3)[:4] == [5309, 1093, 9636, 3557]


mixtures = st.lists(
    st.tuples(st.integers(1, 60), st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 3.0])),
    min_size=1,
    max_size=4,
).filter(lambda parts: any(weight > 0 for _, weight in parts))


@given(mixtures, st.integers(0, 3), st.booleans())
def test_an_epoch_gives_each_source_its_share_and_sources_give_all_before_they_repeat(parts, seed, shuffle):
    sources = [[f"{number}:{index}" for index in range(size)] for number, (size, _) in enumerate(parts)]
    mixture = Mixture(zip(sources, (w for _, w in parts), strict=True), shuffle=shuffle)
    order = mixture.order(seed)
    epochs = 5
    places = [order[at] for at in range(epochs * len(mixture))]
    for epoch in range(epochs):
        counts = Counter(place.part for place in places[epoch * len(mixture) : (epoch + 1) * len(mixture)])
        for number, (size, weight) in enumerate(parts):
            assert counts[number] == (max(1, round(weight * size)) if weight else 0)
    for number, (size, _) in enumerate(parts):
        own = [place for place in places if place.part == number]
        for at in range(0, len(own), size):
            turn = own[at : at + size]
            assert {place.epoch for place in turn} == {at // size}
            assert len({place.index for place in turn}) == len(turn)
        if not shuffle:
            assert [place.index for place in own] == [at % size for at in range(len(own))]
    assert mixture.item(places[0]) == sources[places[0].part][places[0].index]
    # Any place can be computed on its own.
    assert mixture.order(seed)[len(places) - 1] == places[-1]


def test_sources_are_spread_evenly_over_a_long_epoch():
    mixture = Mixture([(range(50_000), 1.0), (range(5_000), 1.0)])
    order = mixture.order(0)
    small = [order[at].part for at in range(len(mixture))]
    for at in range(0, len(mixture), 11_000):
        assert abs(sum(small[at : at + 11_000]) - 1000) < 100


def test_epochs_and_seeds_have_orders_of_their_own():
    mixture = Mixture([(range(50), 1.0), (range(50), 1.0)])
    orders = [tuple(mixture.order(seed)[at] for at in range(100)) for seed in range(3)]
    second = tuple(mixture.order(0)[at] for at in range(100, 200))
    indices = [tuple((p.part, p.index) for p in order) for order in (*orders, second)]
    assert len(set(indices)) == 4
    # The two sources are not shuffled alike.
    both = [[p.index for p in orders[0] if p.part == part] for part in (0, 1)]
    assert both[0] != both[1]


class Blocks(list):
    blocks = (0, 10, 10, 25, 30)


def test_blocks_stay_together_and_are_shuffled_inside():
    order = Mixture([(Blocks(range(30)), 1.0)]).order(4)
    indices = [order[at].index for at in range(30)]
    assert sorted(indices) == list(range(30))
    block_of = [0 if i < 10 else 1 if i < 25 else 2 for i in indices]
    runs = [block for at, block in enumerate(block_of) if at == 0 or block_of[at - 1] != block]
    assert sorted(runs) == [0, 1, 2]
    assert indices != sorted(indices)
    again = [order[at].index for at in range(30, 60)]
    assert sorted(again) == list(range(30))
    assert again != indices


@given(mixtures, st.integers(1, 5))
def test_shards_deal_the_order_among_them(parts, shards):
    mixture = Mixture((list(range(size)), weight) for size, weight in parts)
    order = mixture.order(1)
    readers = [ShardReader(order, shard, shards) for shard in range(shards)]
    dealt = [reader.next_place() for _ in range(7) for reader in readers]
    assert dealt == [order[at] for at in range(7 * shards)]
    assert readers[0].place(3) == order[3 * shards]
    assert [reader.position for reader in readers] == [7] * shards


class Numbers:
    """A stream of the numbers below `size`, again and again."""

    def __init__(self, size, documents):
        self.size, self.documents = size, documents

    def read(self, state=None):
        return NumbersReader(self.size, 0 if state is None else state["at"])


class NumbersReader:
    def __init__(self, size, at):
        self.size, self.at = size, at

    def take(self, position):
        assert position >= self.at
        self.at = position + 1
        return f"stream {position % self.size}"

    def state(self):
        return {"at": self.at}


def test_a_stream_is_read_forwards_by_every_shard_and_goes_on_where_it_was():
    mixture = Mixture([Part(Numbers(1000, 30)), Part([f"list {n}" for n in range(10)])])
    assert len(mixture) == 40
    order = mixture.order(0)
    readers = [ShardReader(order, shard, 2) for shard in range(2)]
    items = []
    for _ in range(30):
        for reader in readers:
            items.append(reader.item(reader.next_place()))
    streamed = [item for item in items if item.startswith("stream")]
    assert streamed == [f"stream {n}" for n in range(len(streamed))]
    assert 42 <= len(streamed) <= 48
    again = ShardReader(order, 1, 2)
    again.load_state(readers[1].state())
    for _ in range(20):
        assert again.item(again.next_place()) == readers[1].item(readers[1].next_place())


def test_what_is_no_mixture():
    with pytest.raises(EndstopError, match="source 1 has no documents"):
        Mixture([(["a"], 1.0), ([], 1.0)])
    with pytest.raises(EndstopError, match="at least one source"):
        Mixture([(["a"], 0.0)])
    with pytest.raises(EndstopError, match="at least one source"):
        Mixture([])
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="the weight of source 0 must be 0 or more"):
            Mixture([(["a"], weight)])
    with pytest.raises(IndexError):
        as_mixture(["a"]).order()[-1]
    # An empty source of weight 0 is left out.
    assert as_mixture(Mixture([(["a"], 1.0), ([], 0.0)])).order()[0] == Place(0, 0, 0)


def test_the_summary_names_sources():
    class Named(list):
        name, licence, origin = "songs", "CC0", "a wheel"

    mixture = Mixture([(Named("ab"), 2.0), Part(["x"], 0.5, "notes")])
    assert mixture.sources() == [
        {"name": "songs", "weight": 2.0, "documents": 2, "licence": "CC0", "origin": "a wheel"},
        {"name": "notes", "weight": 0.5, "documents": 1, "licence": None, "origin": None},
    ]
