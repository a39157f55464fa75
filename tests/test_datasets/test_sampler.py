from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from mmdet.datasets.samplers import AspectRatioBatchSampler
from mmdet.registry import DATASETS
from mmengine.runner.loops import _InfiniteDataloaderIterator
from torch.utils.data import BatchSampler, DataLoader, Dataset

from damex.datasets.sampler import MixtureSampler
from damex.datasets.spec import DatasetSpec
from damex.errors import ConfigError


@dataclass
class Mixture:
    """What the sampler needs to know of a MixtureDataset."""

    sizes: list[int]
    weights: list[float | None]

    @property
    def specs(self):
        return [DatasetSpec(f"d{i}", weight=w) for i, w in enumerate(self.weights)]

    def __len__(self):
        return sum(self.sizes)

    def source(self, index):
        return int(np.searchsorted(np.cumsum(self.sizes), index, side="right"))


SMALL = Mixture([7, 3, 12], [5.0, 1.0, 2.5])
CASES = [
    pytest.param(SMALL, 11, id="three datasets"),
    pytest.param(Mixture([5, 40], [None, None]), None, id="by number of images"),
    pytest.param(Mixture([100, 4], [1000.0, 1.0]), 10, id="a share of 1/1001"),
    pytest.param(Mixture([3], [2.0]), 8, id="one dataset"),
]


BATCHES = dict(homogeneous_batches=True, batch_size=4)


def stream(sampler):
    """(index, seed) of one pass over the sampler."""
    return [(int(index), index.seed) for index in sampler]


@pytest.mark.parametrize("options", [{}, dict(shuffle=False), BATCHES])
@pytest.mark.parametrize(("mixture", "samples"), CASES)
def test_shares_are_exact_and_images_are_seen_in_turn(mixture, samples, options):
    unit = options.get("batch_size", 1)
    samples = samples and samples * unit
    sampler = MixtureSampler(mixture, seed=3, samples_per_epoch=samples, **options)
    weights = np.array(
        [s if w is None else w for s, w in zip(*vars(mixture).values(), strict=True)]
    )
    shares = weights / weights.sum()
    seen = np.zeros(len(mixture), dtype=int)
    for epoch in range(150):
        order = sampler.epoch_indices(epoch)
        assert len(order) == len(sampler) == sampler.total
        seen += np.bincount(order, minlength=len(mixture))
        per_dataset = np.split(seen, np.cumsum(mixture.sizes)[:-1])
        expected = shares * (epoch + 1) * sampler.total
        for counts, share in zip(per_dataset, expected, strict=True):
            assert abs(counts.sum() - share) <= unit
            assert counts.max() - counts.min() <= 1


def test_order_is_a_function_of_seed_and_epoch():
    one = MixtureSampler(SMALL, seed=3, samples_per_epoch=20)
    ones = dict(homogeneous_batches=True, batch_size=1)
    explicit = dict(sampling="explicit", **ones)
    two = MixtureSampler(SMALL, seed=3, samples_per_epoch=20, **explicit)
    other = MixtureSampler(SMALL, seed=4, samples_per_epoch=20)
    first = stream(one)
    assert first == stream(two) == stream(one)
    assert len({seed for _, seed in first}) == 20
    assert first != stream(other)
    one.set_epoch(1)
    second = stream(one)
    assert [i for i, _ in second] != [i for i, _ in first]
    assert not {seed for _, seed in second} & {seed for _, seed in first}


def test_every_pass_has_a_permutation_of_its_own():
    # An epoch is half a pass; epochs 0 and 2 are the first halves of two passes.
    sampler = MixtureSampler(Mixture([40], [None]), seed=0, samples_per_epoch=20)
    assert set(sampler.epoch_indices(0)) != set(sampler.epoch_indices(2))


def test_datasets_are_interleaved():
    sampler = MixtureSampler(Mixture([50, 50], [None, None]), seed=0)
    sources = [index >= 50 for index in sampler.epoch_indices(0)]
    changes = sum(a != b for a, b in itertools.pairwise(sources))
    # 99 neighbors that differ with probability 1/2: 50 on average, 5 deviation.
    assert 25 < changes < 75


def test_without_shuffle_files_keep_their_order():
    sampler = MixtureSampler(
        Mixture([3, 2], [1.0, 1.0]), seed=0, samples_per_epoch=4, shuffle=False
    )
    assert sampler.epoch_indices(0) == [0, 1, 3, 4]
    assert sampler.epoch_indices(1) == [2, 0, 3, 4]


def ranks(monkeypatch, world_size, mixture=SMALL, **options):
    """One sampler per process of a run."""
    samplers = []
    for rank in range(world_size):
        monkeypatch.setattr(
            "damex.datasets.sampler.get_dist_info", lambda r=rank: (r, world_size)
        )
        samplers.append(MixtureSampler(mixture, seed=3, **options))
    return samplers


@pytest.mark.parametrize("options", [{}, BATCHES])
@pytest.mark.parametrize(("world_size", "samples"), [(2, 40), (4, 80), (4, 70)])
def test_ranks_share_the_order_of_a_single_process(
    monkeypatch, world_size, samples, options
):
    unit, total = options.get("batch_size", 1), 80 if samples == 70 else samples
    samplers = ranks(monkeypatch, world_size, samples_per_epoch=samples, **options)
    if not options and samples == 70:  # padded to equal lengths
        total = 72
    assert {s.total for s in samplers} == {total}
    streams = [stream(sampler) for sampler in samplers]
    assert {len(s) for s in streams} == {len(samplers[0])} == {total // world_size}
    together = []
    for start in range(0, total // world_size, unit):
        together += [one for s in streams for one in s[start : start + unit]]
    (single,) = ranks(monkeypatch, 1, samples_per_epoch=total, **options)
    # Equal seeds too: augmentation does not depend on the number of processes.
    assert together == stream(single)


def take(sampler, number):
    return [(int(i), i.seed) for i in itertools.islice(sampler, number)]


@pytest.mark.parametrize(
    ("options", "used"), [*(({}, n) for n in (1, 19, 20, 45)), (BATCHES, 44)]
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_skip_continues_the_infinite_stream(monkeypatch, options, used, world_size):
    def fresh():
        options_ = dict(options, samples_per_epoch=20 * world_size, infinite=True)
        return ranks(monkeypatch, world_size, **options_)[-1]

    length = len(fresh())
    whole = take(fresh(), 100)
    resumed = fresh()
    resumed.skip(used - 1)  # skips add up
    resumed.skip(1)
    assert take(resumed, 100 - used) == whole[used:]
    # The place inside of an epoch is skipped once, whole epochs for good.
    epoch = used - used % length
    assert take(resumed, 30) == whole[epoch : epoch + 30]
    if world_size == 1:
        orders = [fresh().epoch_indices(epoch) for epoch in range(3)]
        assert [i for i, _ in whole[: 3 * length]] == [*itertools.chain(*orders)]


def test_a_resumed_finite_stream_goes_on_with_later_epochs():
    """mmengine's iteration loop counts epochs from 0 again after it has skipped."""
    sampler = MixtureSampler(SMALL, seed=3, samples_per_epoch=20)
    sampler.skip(5 * 20)
    assert [int(i) for i in sampler] == sampler.epoch_indices(5)
    sampler.set_epoch(1)
    assert [int(i) for i in sampler] == sampler.epoch_indices(6)


def test_epochs_are_large_enough_for_all_datasets():
    ten = Mixture([4] * 10, [1.0] * 10)
    for samples, message in (
        (0, "must be 1 or more, got 0"),
        (5, r"=5 is too small .* 10 datasets; .* 100 or"),
    ):
        with pytest.raises(ConfigError, match=message):
            MixtureSampler(ten, seed=0, samples_per_epoch=samples)
    # Three equal shares of 6 samples: 2 = 3 datasets - 1, which is the bound.
    three = Mixture([4] * 3, [1.0] * 3)
    for mixture, samples in ((ten, 100), (three, 6), (three, 7), (three, 13)):
        sampler = MixtureSampler(mixture, seed=0, samples_per_epoch=samples)
        lengths = {len(sampler.epoch_indices(epoch)) for epoch in range(200)}
        assert lengths == {samples}


def test_passes_by_hand():
    mixture = Mixture([50, 10], [3.0, 1.0])
    sampler = MixtureSampler(mixture, seed=0, samples_per_epoch=100)
    assert sampler.describe().splitlines() == [
        "one epoch: 100 samples",
        "  d0: 75.0%, 75.0 samples of 50 images, 1.50 passes",
        "  d1: 25.0%, 25.0 samples of 10 images, 2.50 passes",
    ]
    # 400 samples: 300 of 50 images, and 100 of 10.
    assert sampler.passes(400) == {"d0": 6.0, "d1": 10.0}


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        (dict(sampling="proportional"), [100 / 126, 25 / 126, 1 / 126]),
        (dict(sampling="sqrt"), [10 / 16, 5 / 16, 1 / 16]),
        (dict(sampling="uniform"), [1 / 3] * 3),
        (dict(sampling="temperature", temperature=1), [100 / 126, 25 / 126, 1 / 126]),
        (dict(sampling="temperature", temperature=2.0), [10 / 16, 5 / 16, 1 / 16]),
        (dict(sampling="temperature", temperature=1e9), [1 / 3] * 3),
    ],
)
def test_shares_by_size(options, shares):
    mixture = Mixture([100, 25, 1], [None] * 3)
    sampler = MixtureSampler(mixture, seed=0, **options)
    assert sampler.shares == pytest.approx(shares)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        (None, dict(sampling="square"), "sampling must be one of .*='square'"),
        (1.0, dict(sampling="sqrt"), "entries have weight=.*; remove them.*='sqrt'"),
        (None, dict(sampling="explicit"), "needs a weight=.*; add it to all"),
        (None, dict(sampling="temperature"), "which needs it; .*temperature=None"),
        (None, dict(sampling="sqrt", temperature=2.0), "is for sampling='temperature'"),
        (None, dict(temperature=2.0), "temperature'.*'proportional', temperature=2.0"),
        (None, dict(sampling="temperature", temperature=0.5), "1 or more; .*=0.5"),
        (None, dict(homogeneous_batches=True), "needs the batch_size of the dataload"),
    ],
)
def test_samplings_that_cannot_be(weights, options, message):
    with pytest.raises(ConfigError, match=message):
        MixtureSampler(Mixture([4, 5], [weights] * 2), seed=0, **options)


# --- one dataset per batch ------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_batch_of_each_process_is_of_one_dataset(monkeypatch, world_size):
    samplers = ranks(monkeypatch, world_size, samples_per_epoch=40, **BATCHES)
    steps = []
    for epoch in range(5):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        rows = [[SMALL.source(i) for i, _ in stream(sampler)] for sampler in samplers]
        assert {len(row) for row in rows} == {len(samplers[0])}
        for start in range(0, len(rows[0]), 4):
            batches = [row[start : start + 4] for row in rows]
            assert all(len(batch) == 4 == batch.count(batch[0]) for batch in batches)
            steps.append({batch[0] for batch in batches})
    # Processes have datasets of their own.
    assert any(len(step) > 1 for step in steps) == (world_size > 1)


def test_a_wrapped_mixture_is_refused_by_name(two_datasets):
    mixture = dict(type="MixtureDataset", datasets=two_datasets)
    wrapped = DATASETS.build(dict(type="RepeatDataset", times=2, dataset=mixture))
    with pytest.raises(ConfigError, match="got a RepeatDataset; remove this wrapper"):
        MixtureSampler(wrapped)


# --- batches of one aspect ratio ------------------------------------------------------


class Upright(Mixture):
    """Every third image stands."""

    def get_data_info(self, index):
        return dict(width=32, height=48 if index % 3 == 0 else 16)


PORTRAITS = Upright([7, 3, 12], [5.0, 1.0, 2.5])


def aspect_loader(**options):
    """Pairs of (index, seed) in batches of one aspect ratio."""
    sampler = MixtureSampler(PORTRAITS, seed=0, samples_per_epoch=13, **options)
    batches = AspectRatioBatchSampler(sampler, batch_size=2)
    return DataLoader(_Indices(), batch_sampler=batches, num_workers=0, collate_fn=list)


class _Indices(Dataset):
    """Gives back the index that it is asked for."""

    def __getitem__(self, index):
        return int(index), index.seed


def test_aspect_ratio_batches_hold_the_sampler_s_epoch():
    loader = aspect_loader()
    sampler = loader.batch_sampler.sampler
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = list(loader)
        assert len(batches) == len(loader) == 7
        upright = [[index % 3 == 0 for index, _ in batch] for batch in batches]
        # All but the rest of the two buckets are of one kind.
        assert all(len(set(kinds)) == 1 for kinds in upright[:-2])
        assert {kinds[0] for kinds in upright} == {True, False}
        samples = [sample for batch in batches for sample in batch]
        assert sorted(samples) == sorted((int(i), i.seed) for i in sampler)


@pytest.mark.parametrize("infinite", [True, False])
def test_aspect_ratio_batches_go_on_after_a_resume_by_iteration(infinite, monkeypatch):
    monkeypatch.setattr("mmengine.runner.loops.time.sleep", lambda seconds: None)
    whole = _InfiniteDataloaderIterator(aspect_loader(infinite=infinite))
    expected = [next(whole) for _ in range(30)][17:]
    resumed = _InfiniteDataloaderIterator(aspect_loader(infinite=infinite))
    resumed.skip_iter(17)  # in the third epoch of 7 batches
    assert [next(resumed) for _ in range(13)] == expected


# --- what a resumed run leaves out of an epoch ----------------------------------------


KINDS = [
    pytest.param(BatchSampler, {}, id="plain"),
    pytest.param(AspectRatioBatchSampler, {}, id="aspect ratio"),
    pytest.param(BatchSampler, dict(homogeneous_batches=True), id="homogeneous"),
]


def makers(monkeypatch, world_size, kind, *, batch_size=2, samples=72, **options):
    """The batch sampler of each process, in the second epoch."""
    if options.get("homogeneous_batches"):
        options["batch_size"] = batch_size
    samplers = ranks(
        monkeypatch, world_size, PORTRAITS, samples_per_epoch=samples, **options
    )
    for sampler in samplers:
        sampler.set_epoch(1)
    return [kind(sampler, batch_size, False) for sampler in samplers]


def samples_in(batches):
    return Counter((int(i), i.seed) for batch in batches for i in batch)


def read(makers_of_ranks, used=None):
    """Samples of the first batches of all processes, which have as many."""
    rows = [list(itertools.islice(maker, used)) for maker in makers_of_ranks]
    assert len({len(row) for row in rows}) == 1
    return samples_in(itertools.chain(*rows))


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("parts", [(1, 1), (1, 2), (2, 1), (2, 3, 2), (3, 1, 4)])
def test_an_epoch_in_parts_is_the_whole_epoch(monkeypatch, kind, options, parts):
    (whole,) = makers(monkeypatch, 1, kind, **options)
    passes, seen = [], Counter()
    for world_size in parts:
        batches = makers(monkeypatch, world_size, kind, **options)
        left = {b.sampler.skip_seen(1, passes, b) for b in batches}
        assert left == {len(list(batches[0]))}
        used = 6 if len(passes) + 1 < len(parts) else None
        seen += read(batches, used)
        passes.append([world_size, 2, used])
    assert seen == read([whole])
    for maker in (whole, *batches):  # the epoch after it
        maker.sampler.set_epoch(2)
    assert read(batches) == read([whole])


def test_as_many_processes_go_on_with_their_own_batches(monkeypatch):
    whole = makers(monkeypatch, 2, AspectRatioBatchSampler)
    resumed = makers(monkeypatch, 2, AspectRatioBatchSampler)
    for before, after in zip(whole, resumed, strict=True):
        after.sampler.skip_seen(1, [[2, 2, 3], [2, 2, 2]], after)
        expected = [[(int(i), i.seed) for i in batch] for batch in before][5:]
        assert [[(int(i), i.seed) for i in batch] for batch in after] == expected


def test_another_batch_size_leaves_the_same_samples(monkeypatch):
    (small,) = makers(monkeypatch, 1, AspectRatioBatchSampler)
    (large,) = makers(monkeypatch, 1, AspectRatioBatchSampler, batch_size=3)
    seen = read([small], 5)
    assert large.sampler.skip_seen(1, [[1, 2, 5]], large) == 21  # of 72 - 10 samples
    (whole,) = makers(monkeypatch, 1, BatchSampler)
    assert seen + read([large]) == read([whole])


def test_what_cannot_be_shared_evenly_is_filled_up(monkeypatch):
    batches = makers(monkeypatch, 4, BatchSampler, batch_size=1)
    for batch in batches:
        assert batch.sampler.skip_seen(1, [[1, 1, 65]], batch) == 2  # 7 for 4
    found = read(batches)
    assert found.total() == 8
    assert sorted(found.values()) == [1] * 6 + [2]


def test_a_longer_epoch_of_more_processes_stays_in_a_resumed_run(monkeypatch):
    four, one = (makers(monkeypatch, size, BatchSampler, samples=18) for size in (4, 1))
    assert [b[0].sampler.total for b in (four, one)] == [20, 18]
    one[0].sampler.seed = 99
    assert one[0].sampler.load_state(four[0].sampler.order())
    assert (len(one[0].sampler), len(one[0])) == (20, 10)
    assert read(one) == read(four)
    (other,) = makers(monkeypatch, 1, BatchSampler, samples=19)
    assert not other.sampler.load_state(four[0].sampler.order())
    assert other.sampler.total == 19


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("used", range(9))
def test_a_run_by_iterations_goes_on_after_smaller_batches(
    monkeypatch, used, world_size, drop_last
):
    """Epochs of 11 samples in batches of 4 or, by 3 processes, of 4 in batches of 3."""
    size = 4 if world_size == 1 else 3

    def batches(skipped):
        found = []
        for sampler in ranks(monkeypatch, world_size, samples_per_epoch=11):
            if skipped:
                passes = [(world_size, size, skipped)]
                sampler.skip_first(passes, drop_last=drop_last)
                sampler.skip(1)  # what mmengine asks for, of another number
            maker, epochs = BatchSampler(sampler, size, drop_last), []
            for epoch in range(12):  # counted from 0 in a resumed run, too
                sampler.set_epoch(epoch)
                epochs += [[(int(i), i.seed) for i in batch] for batch in maker]
            found.append(epochs)
        return found

    for whole, resumed in zip(batches(0), batches(used), strict=True):
        assert resumed[: len(whole) - used] == whole[used:]


@pytest.mark.parametrize(
    ("passes", "epoch", "first", "after"),
    [
        ([(2, 1, 15)], 1, 6, 1),
        ([(1, 2, 15)], 1, 6, 2),
        ([(2, 3, 5)], 1, 6, 3),
        # 5 processes read 5 each of an epoch of 24, and then 2 of the next.
        ([(5, 1, 7)], 1, 10, 2),
        # 14 are left for them, 3 each, and then 4 epochs of 5; 1 of the next.
        ([(2, 1, 5), (5, 1, 24)], 5, 5, 1),
    ],
)
def test_an_endless_run_goes_on_with_other_processes(
    monkeypatch, passes, epoch, first, after
):
    options = dict(samples_per_epoch=24, infinite=True)
    (single,) = ranks(monkeypatch, 1, PORTRAITS, **options)
    whole = [(int(i), i.seed) for i in itertools.islice(single, 24 * 8)]
    resumed = ranks(monkeypatch, after, PORTRAITS, **options)
    for sampler in resumed:
        sampler.skip_first(passes)
        sampler.skip(3)  # what mmengine asks for, of another number
    rows = [itertools.islice(sampler, 36 // after) for sampler in resumed]
    found = [sample for step in zip(*rows, strict=True) for sample in step]
    begin = 24 * epoch + first
    assert [(int(i), i.seed) for i in found] == whole[begin : begin + 36]
