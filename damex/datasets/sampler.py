"""MixtureSampler: dataset sampling with exact shares and exact resumption."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mmdet.registry import DATA_SAMPLERS
from mmengine.dist import get_dist_info, sync_random_seed
from mmengine.logging import print_log
from torch.utils.data import BatchSampler, Sampler

from damex.datasets.mixture import MixtureDataset, SeededIndex, mix_seed
from damex.errors import ConfigError

SAMPLINGS = ("explicit", "proportional", "sqrt", "temperature", "uniform")


@DATA_SAMPLERS.register_module()
class MixtureSampler(Sampler[SeededIndex]):
    """Samples datasets by weight; a pure function of seed, epoch and position.

    Dataset i gets the share ``w_i / sum(w)`` of all samples, rounded over the whole run
    and not per batch or epoch, so that small shares count, too. Each dataset is an
    endless sequence of its permutations: every image is seen once before any is seen
    twice.

    Nothing is stored: a resumed run continues with the same samples, and any number of
    processes or workers sees the same global order.

    With ``homogeneous_batches`` every batch of a process is of one dataset, and shares
    are those of batches. Processes draw different datasets, so that each step still
    learns from several (Muppet, Aghajanyan et al. 2021, arXiv 2101.11038).

    Args:
        dataset: The mixture.
        seed: Same on all processes; drawn once and shared when None.
        samples_per_epoch: Samples of one epoch over all processes; by default the
            number of images in the mixture.
        shuffle: False keeps the order of files (datasets still follow the weights).
        infinite: Iterate over epochs without end, for IterBasedTrainLoop: no batch is
            smaller than the others.
        sampling: The weight of a dataset of n images: ``explicit``, from its mixture
            entry; ``proportional``, n; ``sqrt``, its root; ``uniform``, 1; or
            ``temperature``, n to the power of 1 / ``temperature`` (Arivazhagan et al.
            2019, arXiv 1907.05019). By default explicit if entries have weights, else
            proportional.
        temperature: 1 is proportional, 2 the root, and a large one uniform.
        homogeneous_batches: Whether a batch holds images of one dataset only.
        batch_size: Images of a homogeneous batch; filled in from the dataloader.

    Raises:
        ConfigError: If ``samples_per_epoch`` is below the number of datasets, or an
            option is unknown, contradictory, or missing.
    """

    def __init__(
        self,
        dataset: MixtureDataset,
        *,
        seed: int | None = None,
        samples_per_epoch: int | None = None,
        shuffle: bool = True,
        infinite: bool = False,
        sampling: str | None = None,
        temperature: float | None = None,
        homogeneous_batches: bool = False,
        batch_size: int | None = None,
    ) -> None:
        if not hasattr(dataset, "specs"):
            raise ConfigError(
                f"MixtureSampler draws from a MixtureDataset, got a "
                f"{type(dataset).__name__}; remove this wrapper: an entry's weight and "
                "the sampler's samples_per_epoch say how often images are seen."
            )
        self.dataset = dataset
        self.seed = sync_random_seed() if seed is None else seed
        self.rank, self.world_size = get_dist_info()
        self.shuffle = shuffle
        self.infinite = infinite
        self.epoch = 0
        self._first_epoch = 0
        self._skipped = 0
        # Remaining samples of this process in a resumed epoch, and its index.
        self._left: tuple[int, list[int]] | None = None
        total = len(dataset) if samples_per_epoch is None else samples_per_epoch
        if total < 1:
            raise ConfigError(f"samples_per_epoch must be 1 or more, got {total}.")
        if homogeneous_batches and batch_size is None:
            raise ConfigError(
                "MixtureSampler: homogeneous_batches=True needs the batch_size of the "
                "dataloader; set it in the sampler, too."
            )
        # Samples of one dataset that one process reads at once: 1 or a batch.
        self._unit = batch_size if homogeneous_batches and batch_size else 1
        self._asked_for = total
        group = self.world_size * self._unit
        self.total = group * math.ceil(total / group)
        weights = sampling_weights(dataset, sampling, temperature)
        self.shares = weights / weights.sum()
        if self.shares.max() * self.total < self._unit * (len(weights) - 1):
            raise ConfigError(
                f"samples_per_epoch={total} is too small to share among "
                f"{len(weights)} datasets; set it to "
                f"{self._unit * len(weights) ** 2} or more."
            )
        print_log(self.describe(), logger="current", level=logging.INFO)

    def describe(self) -> str:
        """Composition of one epoch, a line per dataset."""
        passes = self.passes(self.total).items()
        rows = zip(passes, self.shares, self.dataset.sizes, strict=True)
        lines = [
            f"  {name}: {share:.1%}, {share * self.total:.1f} samples of {size} "
            f"images, {seen:.2f} passes"
            for (name, seen), share, size in rows
        ]
        return "\n".join([f"one epoch: {self.total} samples", *lines])

    def passes(self, samples: int) -> dict[str, float]:
        """How often each image of a dataset is seen in ``samples`` of all processes."""
        rows = zip(self.dataset.specs, self.shares, self.dataset.sizes, strict=True)
        return {spec.name: float(share * samples / n) for spec, share, n in rows}

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration yields."""
        self.epoch = epoch

    def skip(self, num_samples: int) -> None:
        """Skip samples of this process, as mmengine asks on resumption.

        Ignored if the checkpoint recorded the seen samples more exactly.
        """
        if self._left is not None:
            return
        epochs, self._skipped = divmod(self._skipped + num_samples, len(self))
        # mmengine's loop counts epochs from 0 after skipping.
        self._first_epoch += epochs

    def __len__(self) -> int:
        """Samples per epoch and process."""
        return self._unit * math.ceil(self.total / (self.world_size * self._unit))

    def __iter__(self) -> Iterator[SeededIndex]:
        start, self._skipped = self._skipped, 0
        epoch = self.epoch + self._first_epoch
        while True:
            order = self.epoch_indices(epoch)
            for place in self._places(epoch)[start:]:
                yield SeededIndex(order[place], mix_seed(self.seed, epoch, place))
            if not self.infinite:
                return
            epoch, start = epoch + 1, 0

    def order(self) -> dict[str, Any]:
        """Everything that determines the order of samples, for checkpoints."""
        return dict(
            seed=self.seed,
            total=self.total,
            samples_per_epoch=self._asked_for,
            batch=self._unit,
            shuffle=self.shuffle,
            sizes=list(self.dataset.sizes),
            shares=self.shares.tolist(),
        )

    def load_state(self, order: dict[str, Any]) -> bool:
        """Continue in the order of an earlier run with any number of processes.

        If that number does not divide samples_per_epoch, epochs stay padded as in that
        run. Returns False if the config asks for another mixture or epoch length.
        """
        own = dict(seed=order.get("seed"), total=order.get("total"))
        if {**self.order(), **own} != order:
            return False
        self.seed, self.total = order["seed"], order["total"]
        return True

    def skip_seen(
        self, epoch: int, passes: Sequence[Sequence[int]], batches: BatchSampler
    ) -> int:
        """Leave out the samples of an epoch that earlier parts of the run have seen.

        With as many processes as before, each continues with its samples; otherwise,
        the rest is redistributed in order.

        Args:
            epoch: Index of the epoch.
            passes: Of each part the number of processes, batch size, and batches used
                by each.
            batches: Current batch sampler on top of this sampler.

        Returns:
            Number of batches that remain for each process.
        """
        order = self.epoch_indices(epoch)
        seen: set[int] = set()
        rows = [list(range(self.total))]
        for world_size, batch_size, used in passes:
            rows = self._share_out(rows, world_size, seen)
            for rank, row in enumerate(rows):
                maker = self._batches(row, order, batches, batch_size)
                read = itertools.chain(*itertools.islice(maker, used))
                gone = {sample.seed for sample in read}
                rows[rank] = [place for place in row if place not in gone]
                seen |= gone
        row = self._share_out(rows, self.world_size, seen)[self.rank]
        self._left = epoch, row
        return len(self._batches(row, order, batches, batches.batch_size))

    def _batches(
        self, row: list[int], order: list[int], like: BatchSampler, batch_size: int
    ) -> Any:
        """Batches of positions in an epoch, grouped by a copy of a batch sampler."""
        samples = [SeededIndex(order[place], place) for place in row]
        return type(like)(_Row(self.dataset, samples), batch_size, like.drop_last)

    def skip_first(
        self, passes: Sequence[Sequence[int]], *, drop_last: bool = False
    ) -> None:
        """Leave out what the passes of a training by iterations have seen.

        They are those of :meth:`skip_seen`; each pads epochs to its own processes. If
        the sampler is not endless, epochs end in a smaller batch, or without it.
        """
        epoch = first = 0
        whole = math.floor if drop_last else math.ceil
        for world_size, batch_size, used in passes:
            left = batch_size * used  # samples that each process has read
            part = 1 if self.infinite else batch_size
            while True:
                units = math.ceil((self.total - first) / world_size / self._unit)
                length = part * whole(units * self._unit / part)
                if left < length:
                    break
                left, epoch, first = left - length, epoch + 1, 0
            first += left * world_size
        self._first_epoch = epoch
        rest = list(range(first, self.total))
        row = self._share_out([rest], self.world_size, set())[self.rank]
        self._left = self._first_epoch, row

    def _places(self, epoch: int) -> list[int]:
        """Positions in the order of an epoch that this process reads."""
        if self._left is not None and self._left[0] == epoch:
            return self._left[1]
        return self._row(range(self.total), self.rank, self.world_size)

    def _share_out(
        self, rows: list[list[int]], world_size: int, seen: set[int]
    ) -> list[list[int]]:
        """Positions of each process; unchanged for the same number of processes."""
        if len(rows) == world_size:
            return rows
        rest = sorted(set(itertools.chain(*rows)) - seen)
        return [self._row(rest, rank, world_size) for rank in range(world_size)]

    def _row(self, places: Sequence[int], rank: int, world_size: int) -> list[int]:
        """Every ``world_size``-th unit; the last round is padded from the start."""
        units = np.reshape(places, (-1, self._unit))
        even = math.ceil(len(units) / world_size) * world_size
        return np.resize(units, (even, self._unit))[rank::world_size].ravel().tolist()

    def epoch_indices(self, epoch: int) -> list[int]:
        """Indices of an epoch (from 0) in the order in which all processes read it.

        Process r reads every ``world_size``-th of the ``total`` indices, or batches,
        from r.
        """
        begins, ends = self._drawn_before(epoch), self._drawn_before(epoch + 1)
        offsets = np.cumsum([0, *self.dataset.sizes[:-1]])
        rows = enumerate(zip(begins, ends, offsets, strict=True))
        indices = np.concatenate(
            [self._stream(i, int(b), int(e)) + offset for i, (b, e, offset) in rows]
        )
        units = indices.reshape(-1, self._unit)
        if self.shuffle:
            rng = np.random.default_rng([self.seed, 0, epoch])
            units = units[rng.permutation(len(units))]
        return units.ravel().tolist()

    def _drawn_before(self, epoch: int) -> np.ndarray:
        """Samples drawn per dataset before an epoch; the largest absorbs rounding."""
        units = epoch * self.total // self._unit
        # Independent rounding keeps each count growing and within half a unit.
        drawn = np.rint(self.shares * units).astype(np.int64)
        largest = int(self.shares.argmax())
        drawn[largest] += units - drawn.sum()
        return drawn * self._unit

    def _stream(self, source: int, begin: int, end: int) -> np.ndarray:
        """Entries ``begin`` to ``end`` of the endless permutations of one dataset."""
        size = self.dataset.sizes[source]
        if begin == end:
            return np.zeros(0, dtype=np.int64)
        cycles = range(begin // size, (end - 1) // size + 1)
        row = np.concatenate([self._permutation(source, cycle) for cycle in cycles])
        first = begin - cycles[0] * size
        return row[first : first + end - begin]

    def _permutation(self, source: int, cycle: int) -> np.ndarray:
        size = self.dataset.sizes[source]
        if not self.shuffle:
            return np.arange(size)
        return np.random.default_rng([self.seed, 1, source, cycle]).permutation(size)


class _Row(Sampler[SeededIndex]):
    """Sampler over known samples."""

    def __init__(self, dataset: MixtureDataset, samples: list[SeededIndex]) -> None:
        self.dataset, self.samples = dataset, samples

    def __iter__(self) -> Iterator[SeededIndex]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)


def sampling_weights(
    dataset: MixtureDataset, sampling: str | None, temperature: float | None
) -> np.ndarray:
    """Weights above 0 of the datasets of a mixture; see :class:`MixtureSampler`.

    ConfigError if the options contradict each other or the entries.
    """
    given = [spec.weight for spec in dataset.specs]
    has_weights = given[0] is not None  # all or none have one
    sampling = sampling or ("explicit" if has_weights else "proportional")
    problem = ""
    if sampling not in SAMPLINGS:
        problem = f"sampling must be one of {SAMPLINGS}"
    elif has_weights and sampling != "explicit":
        problem = "the mixture's entries have weight=...; remove them, or sampling"
    elif sampling == "explicit" and not has_weights:
        problem = "sampling='explicit' needs a weight=...; add it to all entries"
    elif (sampling == "temperature") != (temperature is not None):
        problem = "temperature is for sampling='temperature', which needs it"
    elif temperature is not None and not temperature >= 1:
        problem = "temperature must be 1 or more"
    if problem:
        raise ConfigError(
            f"MixtureSampler: {problem}; got sampling={sampling!r}, "
            f"temperature={temperature!r}."
        )
    if sampling == "explicit":
        return np.array(given, dtype=np.float64)
    sizes = np.array(dataset.sizes, dtype=np.float64)
    powers = {"proportional": 1.0, "sqrt": 0.5, "uniform": 0.0}
    power = powers[sampling] if temperature is None else 1.0 / temperature
    return sizes**power
