"""Queries and padding of a DETR: which are tokens, and which lie on an object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mmdet.models.detectors import DINO, DeformableDETR
from torch import Tensor

from damex.errors import DataError


def real_query_mask(query_BND: Tensor) -> Tensor:
    """Return a mask (B, N) of decoder queries, False for mmdet's zero fillers.

    DINO's denoising queries are padded to the largest number of boxes in the batch, and
    in DDQ DETR non-maximum suppression may leave fewer proposals than queries. Fillers
    must not be routed or counted. A real query is an embedding or a linear map with
    bias, never zero in all channels.
    """
    return (query_BND != 0).any(dim=-1)


def selects_by_first_class(detector: Any) -> bool:
    """Whether queries are selected by the score of class 0, regardless of its meaning.

    True for two-stage Deformable DETR (Zhu et al. 2021), whose first stage separates
    objects from background.
    """
    is_staged = isinstance(detector, DeformableDETR) and detector.as_two_stage
    return is_staged and not isinstance(detector, DINO)  # DINO scores all classes


def ids_of(samples: Sequence[Any], key: str, device: torch.device) -> Tensor:
    """Return the ``group_id`` or ``dataset_id`` of every image, -1 where unknown."""
    ids = [sample.metainfo.get(key, -1) for sample in samples]
    return torch.tensor(ids, dtype=torch.long, device=device)


def valid_ratio_of(
    batch_inputs: Tensor, batch_data_samples: Sequence[Any] | None
) -> Tensor | None:
    """Return the share (B, 2) of the padded height and width that is image.

    None if no image is padded. ``batch_data_samples`` provide ``img_shape``.
    """
    sizes = _padded_sizes(batch_inputs, batch_data_samples)
    if not sizes:
        return None
    height, width = batch_inputs.shape[-2:]
    ratios = [(h / height, w / width) for h, w in sizes]
    return torch.tensor(ratios, dtype=torch.float64, device=batch_inputs.device)


def image_mask_of(
    batch_inputs: Tensor, batch_data_samples: Sequence[Any] | None
) -> Tensor | None:
    """Return a mask (B, H, W), False for padding; None if no image is padded."""
    sizes = _padded_sizes(batch_inputs, batch_data_samples)
    if not sizes:
        return None
    mask_BHW = torch.zeros_like(batch_inputs[:, 0], dtype=torch.bool)
    for image, (height, width) in enumerate(sizes):
        mask_BHW[image, :height, :width] = True
    return mask_BHW


def _padded_sizes(
    batch_inputs: Tensor, batch_data_samples: Sequence[Any] | None
) -> list[tuple[int, int]]:
    """Return height and width of each image; empty if no image is padded."""
    sizes = [tuple(s.metainfo["img_shape"][:2]) for s in batch_data_samples or ()]
    return sizes if set(sizes) - {tuple(batch_inputs.shape[-2:])} else []


def batches_of_one_shape(
    batch_inputs: Tensor, batch_data_samples: Sequence[Any]
) -> Iterator[tuple[Tensor, list[Any]]]:
    """Split a batch (B, 3, H, W) into batches whose images need no more padding.

    In a batch, mmdet pads each image to the size of the largest. Convolutions see that
    border, so the result of an image would depend on its neighbors. Here each image
    keeps its ``pad_shape``, which is its own size in whole ``pad_size_divisor``;
    ``batch_input_shape`` is set to it.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for place, sample in enumerate(batch_data_samples):
        shape = sample.metainfo.get("pad_shape", batch_inputs.shape[-2:])
        places.setdefault(tuple(shape[:2]), []).append(place)
    for (height, width), chosen in places.items():
        samples = [batch_data_samples[place] for place in chosen]
        for sample in samples:
            sample.set_metainfo(dict(batch_input_shape=(height, width)))
        yield batch_inputs[chosen, :, :height, :width], samples


def check_cells(cells: int, num_queries: int) -> None:
    """Raise a DataError if feature maps have fewer cells than queries are selected."""
    if cells < num_queries:
        raise DataError(
            f"it has {cells} feature map cells, fewer than model.num_queries="
            f"{num_queries}: too small or elongated. Raise image_size, pad images to "
            "one canvas with model.data_preprocessor.pad_size_divisor=<longest side in "
            "pixels>, or lower num_queries."
        )


@contextmanager
def naming_images(samples: Sequence[Any] | None) -> Iterator[None]:
    """Begin a DataError with a file of the batch, whose images have one shape."""
    try:
        yield
    except DataError as error:
        paths = (sample.metainfo.get("img_path") for sample in samples or ())
        first, *others = dict.fromkeys(paths) or [None]  # windows share a path
        more = f" and {len(others)} more of its batch" if others else ""
        raise DataError(f"{first or 'an image'}{more}: {error}") from error


def boxes_of(samples: Sequence[Any]) -> list[Tensor]:
    """Return each image's boxes (G, 4), x1 y1 x2 y2 relative to the image's size."""
    return [relative_boxes(s.gt_instances.bboxes, s.img_shape) for s in samples]


def relative_boxes(boxes_N4: Any, image_shape: Sequence[int]) -> Tensor:
    """Divide x1 y1 x2 y2 in pixels, a tensor or mmdet's boxes, by the image's size."""
    pixels_N4 = getattr(boxes_N4, "tensor", boxes_N4)  # mmdet's box types hold a tensor
    height, width = image_shape[:2]
    return pixels_N4 / pixels_N4.new_tensor([width, height, width, height])


def encoder_foreground(
    boxes: Sequence[Tensor], spatial_shapes_L2: Tensor, valid_ratio_B2: Tensor | None
) -> Tensor:
    """Return a mask (B, N) of feature cells whose centre is on an object.

    ``spatial_shapes_L2`` is height and width of each level, over the padded batch;
    cells are ordered by level, then by row. Padded cells are background.
    """
    levels, device = [], spatial_shapes_L2.device
    for height, width in spatial_shapes_L2.tolist():
        y_H = (torch.arange(height, device=device) + 0.5) / height
        x_W = (torch.arange(width, device=device) + 0.5) / width
        grid_y, grid_x = torch.meshgrid(y_H, x_W, indexing="ij")
        levels.append(torch.stack([grid_x, grid_y], dim=-1).flatten(0, 1))
    centres_BN2 = torch.cat(levels).expand(len(boxes), -1, -1)
    if valid_ratio_B2 is not None:  # height and width
        centres_BN2 = centres_BN2 / valid_ratio_B2.flip(1).to(centres_BN2)[:, None]
    return _on_object(boxes, centres_BN2)


def query_foreground(boxes: Sequence[Tensor], reference_points_BN: Tensor) -> Tensor:
    """Return a mask (B, N) of decoder queries whose reference is centred on an object.

    References are relative to the image: centres (B, N, 2) or boxes as centre and size
    (B, N, 4). Denoising queries follow the same rule.
    """
    return _on_object(boxes, reference_points_BN[..., :2].detach())


def _on_object(boxes: Sequence[Tensor], points_BN2: Tensor) -> Tensor:
    masks = []
    for boxes_G4, points_N2 in zip(boxes, points_BN2, strict=True):
        points_N12 = points_N2.unsqueeze(1)
        inside_NG = (points_N12 >= boxes_G4[:, :2]) & (points_N12 < boxes_G4[:, 2:])
        masks.append(inside_NG.all(dim=-1).any(dim=-1))
    return torch.stack(masks)
