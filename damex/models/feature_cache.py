"""FeatureCache: outputs of frozen layers, kept in memory for the next epoch.

Axes: B images, C channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from damex.errors import ConfigError

ADMITTED = 8  # a full cache admits one in this many new images
RARE = 0.1  # hit rate below which the report explains why


class FeatureCache:
    """Feature maps of images in memory, up to ``size_mib`` per process.

    If every new image were admitted, a full cache would evict most images shortly
    before they recur in the next epoch: with room for half of them, 15 % are found. So
    a full cache admits one in eight, evicting the least recently used, and 43 % are
    found (bimodal insertion: Qureshi et al., ISCA 2007). The key is the hash of the
    pixels that the layers see, so flips, sizes and padding need no care. Copies and
    pickles of a cache are empty.
    """

    def __init__(self, size_mib: float) -> None:
        self.size_mib = size_mib
        self._entries: OrderedDict[bytes, tuple[Tensor, ...]] = OrderedDict()
        self._bytes = 0
        self._weights: list[tuple[int, int]] = []
        self._images = self._hits = self._refused = 0

    def __reduce__(self) -> tuple[type[FeatureCache], tuple[float]]:
        return type(self), (self.size_mib,)

    @property
    def mib(self) -> float:
        """Current size in MiB."""
        return self._bytes / 2**20

    @torch.no_grad()
    def features(
        self,
        images_BCHW: Tensor,
        compute: Callable[[Tensor], Sequence[Tensor]],
        frozen: Sequence[nn.Module],
    ) -> list[Tensor]:
        """Return the features of all images, detached and in new memory.

        ``compute`` is called with the images that are not cached. The cache is cleared
        when the parameters or buffers of ``frozen``, the modules behind ``compute``,
        change.

        Raises:
            ConfigError: If a parameter of ``frozen`` is trained.
        """
        self._start_anew_if_changed(frozen)
        keys = _keys(images_BCHW)
        entries = [self._find(key) for key in keys]
        missed = [number for number, one in enumerate(entries) if one is None]
        if missed:
            # Indexing copies; avoid it for the whole batch.
            whole = len(missed) == len(keys)
            features = compute(images_BCHW if whole else images_BCHW[missed])
            for row, number in enumerate(missed):
                entry = tuple(one[row : row + 1].clone() for one in features)
                entries[number] = entry
                self._keep(keys[number], entry)
        self._images += len(keys)
        self._hits += len(keys) - len(missed)
        found = [entry for entry in entries if entry is not None]
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def report(self) -> str:
        """Return the hit rate in one line; empty if the cache was not used."""
        if not self._images:
            return ""
        share = self._hits / self._images
        line = (
            f"frozen features: {100 * share:.0f} % of {self._images:,} images from the "
            f"cache ({self.mib:.0f} MiB of {self.size_mib:g})"
        )
        if share >= RARE:
            return line
        if self._refused:
            return f"{line}; it is full: raise backbone.cache_mib"
        return (
            f"{line}; few images came again: augmentation and changing padding make "
            "new ones, and short epochs show a part of the data"
        )

    def _start_anew_if_changed(self, frozen: Sequence[nn.Module]) -> None:
        weights: list[Tensor] = []
        for module in frozen:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    raise ConfigError(
                        "TimmBackbone: cache_mib keeps what frozen layers make, but "
                        f"{name} of {type(module).__name__} is trained; lower "
                        "frozen_stages or leave cache_mib out."
                    )
                weights.append(parameter)
            weights.extend(module.buffers())
        # In-place changes, such as loading a state dict, increment the version.
        now = [(one.data_ptr(), one._version) for one in weights]
        if now != self._weights:
            self._entries.clear()
            self._bytes = 0
            self._weights = now

    def _find(self, key: bytes) -> tuple[Tensor, ...] | None:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def _keep(self, key: bytes, entry: tuple[Tensor, ...]) -> None:
        size, limit = _bytes(entry), self.size_mib * 2**20
        if key in self._entries or size > limit:
            return
        if self._bytes + size > limit:
            self._refused += 1
            if self._refused % ADMITTED:
                return
        while self._bytes + size > limit:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= _bytes(oldest)
        self._entries[key] = entry
        self._bytes += size


def reports(model: nn.Module) -> Iterator[str]:
    """Yield the reports of all caches in a model that were used."""
    for module in model.modules():
        cache = getattr(module, "feature_cache", None)
        if isinstance(cache, FeatureCache) and (line := cache.report()):
            yield line


def _keys(images_BCHW: Tensor) -> list[bytes]:
    """Hash each image together with all else that affects its features."""
    device = images_BCHW.device.type
    mixed = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    about = f"{tuple(images_BCHW.shape[1:])} {images_BCHW.dtype} {mixed}".encode()
    bytes_BN = images_BCHW.cpu().contiguous().flatten(1).view(torch.uint8).numpy()
    return [hashlib.sha256(about + one.tobytes()).digest() for one in bytes_BN]


def _bytes(entry: tuple[Tensor, ...]) -> int:
    return sum(one.numel() * one.element_size() for one in entry)
