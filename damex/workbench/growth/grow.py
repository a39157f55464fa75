"""``damex grow``: start a training on the datasets of a checkpoint plus new ones."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmdet.registry import DATASETS, MODELS
from mmengine.config import Config, ConfigDict
from mmengine.registry import init_default_scope
from torch import Tensor

from damex.config_files import config_of, mixture_datasets
from damex.datasets.label_space import LabelSpace
from damex.engine.checkpoint import check_tensors
from damex.engine.config import check_detector, label_space_of, resolve_config
from damex.engine.console import filter_console
from damex.engine.freezing import freeze_all_but
from damex.engine.rows import (
    GROUP_EXPERTS,
    RowNames,
    check_declared,
    has_groups,
    remap_rows,
    row_keys,
)
from damex.errors import ConfigError, printable
from damex.inference.predictor import Predictor
from damex.inference.stored import (
    DetectorCheckpoint,
    check_target,
    disable_expert_parallel,
    write_checkpoint,
)
from damex.inference.trust import forget_pretrained
from damex.models.blocks import MoEBlock
from damex.models.build import moe_difference, resolved_moe
from damex.models.config import read_moe
from damex.models.insertion import moe_blocks
from damex.models.starts import fork_rng
from damex.moe import TopKGate
from damex.options import option_of

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class Changed:
    """A detector with the weights of a checkpoint, for more or fewer datasets."""

    config: Config  # resolved, as are its ``space`` and ``moe``
    space: LabelSpace
    state: Mapping[str, Tensor]
    old: LabelSpace  # of the checkpoint
    moe: Mapping[str, Any]
    notes: tuple[str, ...]  # warnings about what works but is probably unintended
    # For each new dataset group the old one whose experts it copies.
    sources: Mapping[str, str] = field(default_factory=dict)
    # Mean probability of each old group, per compared new group.
    similarity: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    alone_problem: str = ""  # why ``train_only`` cannot train the new datasets, if so

    @property
    def new_datasets(self) -> tuple[str, ...]:
        """Names of the datasets that are not in the checkpoint."""
        known = self.old.dataset_names
        return tuple(name for name in self.space.dataset_names if name not in known)

    @property
    def new_classes(self) -> tuple[str, ...]:
        """Names of the classes that are not in the checkpoint."""
        return tuple(c for c in self.space.classes if c not in self.old.classes)

    def write(self, path: Path, *, with_config: bool = True) -> None:
        """Write the checkpoint, and its config."""
        write_checkpoint(
            path,
            self.state,
            config=self.config.pretty_text,
            with_config=with_config,
            dataset_meta=self.space.to_metainfo(),
            moe=dict(self.moe),
        )


def add_datasets(
    stored: DetectorCheckpoint, cfg: Config, *, like: str = AUTO, images: int = 64
) -> Changed:
    """Extend a trained detector for the new datasets of a mixture.

    Old classes, experts and router rows keep their weights. A new dataset group copies
    the experts of the old group that its images resemble: random FFNs would disturb the
    layers behind them, and zero-initialized low-rank maps would leave the dataset to
    the shared FFN, which never served one alone. Rows of new classes are random.
    ``like`` may name an old dataset instead, or be 'none' for new experts; ``images``
    is how many of each new dataset are compared at most. ConfigError if the config does
    not extend the checkpoint, or no dataset is nearest; DataError if images cannot be
    read.
    """
    if cfg.get("mixture") is None:
        raise ConfigError(
            "the config sets no mixture; name the datasets of the checkpoint and the "
            "new one in mixture=[dict(name=..., ...), ...]."
        )
    cfg = resolve_config(cfg)
    check_detector(cfg["model"])
    if (space := label_space_of(cfg)) is None:
        raise ConfigError("no dataloader of the config has a MixtureDataset.")
    _check_extends(stored, space)
    detector = build_initialized(cfg["model"])
    state = remapped_state(stored, detector, space)
    owners = row_keys(detector, state, RowNames.of_space(space))
    has_experts = any(rows[0].kind == "groups" for rows in owners.values())
    old = stored.space.group_names
    new = [name for name in space.group_names if has_experts and name not in old]
    sources, similarity = _choose_sources(stored, cfg, space, new, like, images)
    for group, source in sources.items():
        for name, keys in owners.items():
            rows = {key: row for row, key in enumerate(keys)}
            for key, row in rows.items():
                copied = rows.get(replace(key, names=(source,)))
                if (key.kind, key.names) == ("groups", (group,)) and copied is not None:
                    state[name][row] = state[name][copied]
    moe, notes = detector.resolved_moe(), tuple(_notes(stored, detector))
    grown = Changed(cfg, space, state, stored.space, moe, notes, sources, similarity)
    return replace(grown, alone_problem=_alone_problem(detector, grown))


def remapped_state(
    stored: DetectorCheckpoint, detector: Any, space: LabelSpace
) -> dict[str, Tensor]:
    """Return the checkpoint's state dict with the rows of a label space.

    ConfigError if the number of an old dataset's experts would change.
    """
    _check_experts(stored, detector, space)
    state = dict(stored.state)
    then, wanted = map(RowNames.of_space, (stored.space, space))
    remap_rows(state, detector, stored=then, wanted=wanted)
    for path, block in detector.named_modules():
        # Masks of experts that belong to no dataset have a row per dataset group.
        if isinstance(block, MoEBlock) and not has_groups(block):
            key, mask_GE = f"{path}.moe.{GROUP_EXPERTS}", block.moe.group_experts_GE
            state.pop(key, None)
            if mask_GE is not None:
                state[key] = mask_GE
    check_tensors(state, detector, path=stored.path)
    return state


def _alone_problem(detector: Any, grown: Changed) -> str:
    """Why ``train_only`` would reject the new datasets; freezes the parameters."""
    moe = grown.config["model"].get("moe") or {}
    if moe.get("expert_parallel", 1) > 1:
        return "train_only cannot be combined with moe.expert_parallel; set it to 1."
    try:
        freeze_all_but(detector, grown.space, grown.new_datasets)
    except ConfigError as error:
        return str(error)
    return ""


def _check_extends(stored: DetectorCheckpoint, space: LabelSpace) -> None:
    """Reject a mixture that changes old datasets or adds none (ConfigError)."""
    old, path = stored.space, stored.path
    for number, name in enumerate(old.dataset_names):
        if name not in space.dataset_names:
            raise ConfigError(
                f"the checkpoint {path} was trained on {name!r}, which the config's "
                "mixture does not have; add its entry (or remove the dataset first: "
                f"damex prune --drop {name})."
            )
        now = space.dataset_id(name)
        classes = dict(old.dataset_classes[number]), dict(space.dataset_classes[now])
        for own in {**classes[0], **classes[1]}:
            before, after = (found.get(own, "missing") for found in classes)
            if before != after:
                raise ConfigError(
                    f"class {own!r} of dataset {name!r} is {before!r} in the "
                    f"checkpoint {path} and {after!r} in the config; use the "
                    "label_space, rename and classes of its training."
                )
        if old.groups[number] != space.groups[now]:
            raise ConfigError(
                f"dataset {name!r} is of the group {old.groups[number]!r} in the "
                f"checkpoint {path} and of {space.groups[now]!r} in the config; set "
                "the same group='...'."
            )
    if len(space.dataset_names) == len(old.dataset_names):
        raise ConfigError(
            f"the config's mixture has no other datasets than the checkpoint {path} "
            f"({', '.join(old.dataset_names)}); add an entry for the new one."
        )


def build_initialized(model: Mapping[str, Any]) -> Any:
    """Build a detector as initialized for training, but without pretrained weights.

    Deterministic; the random state of the caller is unchanged.
    """
    init_default_scope("mmdet")
    model = copy.deepcopy(dict(model))
    disable_expert_parallel(model)
    for _ in forget_pretrained(model):  # the checkpoint has the weights
        pass
    with fork_rng(seed=0):
        detector = MODELS.build(ConfigDict(model))
        detector.init_weights()
    return detector


def _check_experts(
    stored: DetectorCheckpoint, detector: Any, space: LabelSpace
) -> None:
    """Reject a detector that changes the number of an old dataset's experts."""
    check_declared(detector)
    blocks = moe_blocks(detector)
    if not any(map(has_groups, blocks)):
        for then, block in zip(moe_blocks(stored.build()), blocks, strict=False):
            old, now = then.moe.num_experts, block.moe.num_experts
            if old != now:
                raise ConfigError(
                    f"the experts of the detector in {stored.path} belong to no "
                    "dataset (moe has no DatasetRoutingLoss and no teacher_forcing); "
                    f"there are {old} per layer, and the config makes {now}, as their "
                    f"number follows the dataset groups; set moe.num_experts={old}."
                )
    before = row_keys(detector, stored.state, RowNames.of_space(stored.space))
    after = row_keys(detector, detector.state_dict(), RowNames.of_space(space))
    for name in before.keys() & after.keys():
        both = before[name], after[name]
        for group in {*stored.space.groups} & {*space.groups}:
            old, now = (sum(group in key.names for key in keys) for keys in both)
            if old != now:
                raise ConfigError(
                    f"dataset group {group!r} has {old} experts per layer in the "
                    f"checkpoint {stored.path} and would have {now}: the number "
                    "of experts does not follow that of the groups; set "
                    "moe.num_experts=None, or (fine_grained.copies) as many more."
                )


def _choose_sources(
    stored: DetectorCheckpoint,
    cfg: Any,
    space: LabelSpace,
    new: Sequence[str],
    like: str,
    images: int,
) -> tuple[dict[str, str], dict[str, dict[str, float]]]:
    """The old group whose experts each new one copies, and the mean probabilities."""
    if like == NONE or not new or cfg["model"].get("moe") is None:
        return {}, {}
    if like != AUTO:
        known = stored.space
        return dict.fromkeys(new, known.groups[known.dataset_id(like)]), {}
    predictor = Predictor(stored.path, trust=stored.trust)
    if not predictor.can_tell:
        raise ConfigError(
            f"the detector in {stored.path} does not predict datasets, so that it "
            "cannot compare the new images to the old ones; name a similar dataset "
            f"with --like, or use --like {NONE}."
        )
    similarity = {}
    for group in new:
        pairs = zip(space.dataset_names, space.groups, strict=True)
        names = [name for name, own in pairs if own == group]
        paths = [p for name in names for p in image_paths(cfg, name, images)]
        found = predictor(paths, min_score=1.0, tile=None)  # for probabilities alone
        similarity[group] = {
            old: sum(one.probabilities[old] for one in found) / len(found)
            for old in stored.space.group_names
        }
    best = {g: max(row, key=row.__getitem__) for g, row in similarity.items()}
    return best, similarity


def image_paths(cfg: Any, name: str, count: int) -> list[str]:
    """Up to ``count`` training images of a dataset of a resolved config, evenly spaced.

    DataError if the dataset cannot be loaded, or has no images.
    """
    loader = cfg.get("train_dataloader") or {}
    (mixture,) = mixture_datasets(loader.get("dataset")) or [{}]
    entries = [entry for entry in cfg["mixture"] if entry["name"] == name]
    changes = dict(datasets=entries, label_space="union")
    (source,) = DATASETS.build({"type": "MixtureDataset", **mixture, **changes}).sources
    number = min(count, len(source))
    places = [step * len(source) // number for step in range(number)]
    return [source.get_data_info(place)["img_path"] for place in places]


def _notes(stored: DetectorCheckpoint, detector: Any) -> Iterator[str]:
    """Warn if the detector works differently than in the checkpoint."""
    then = stored.model.get("moe")
    saved = {} if then is None else resolved_moe(read_moe(then))
    if difference := moe_difference(saved, detector.resolved_moe()):
        yield f"the experts of the checkpoint differ: {difference}."
    yield from mixing_notes(detector)


def mixing_notes(detector: Any) -> Iterator[str]:
    """Warn if detections of one dataset depend on the parameters of the others."""
    effect = "so that detections of the others change, too."
    layers = [block.moe for block in moe_blocks(detector)]
    if not all(
        isinstance(gate, TopKGate) and gate.renormalize and gate.capacity is None
        for gate in (layer.gate for layer in layers)
    ):
        yield f"the weight of an expert depends on all others (moe.gate), {effect}"
    elif any(
        layer.gate.k > size or (layer.gate.balance is not None and size > 1)
        for layer in layers
        if layer.group_experts_GE is not None
        for size in layer.group_experts_GE.sum(1).tolist()
    ):
        yield f"experts are not chosen within a dataset alone (moe.gate), {effect}"
    awareness = detector.awareness
    if awareness is not None and awareness.config.label_prior is not None:
        yield f"label_prior depends on all datasets, {effect}"


def grow(
    checkpoint: str,
    config: str,
    *,
    cfg_options: Sequence[str],
    out: str,
    like: str,
    images: int,
    trust: bool,
) -> None:
    """Write a checkpoint from which to start a training with new datasets."""
    filter_console()
    check_target(Path(out), with_config=False)
    cfg = config_of(config, cfg_options)  # first: it registers classes of the user
    stored = DetectorCheckpoint.read(checkpoint, trust=trust)
    grown = add_datasets(stored, cfg, like=like, images=images)
    grown.write(Path(out), with_config=False)
    lines = [*_lines(grown, out), *_next_steps(grown, out, config, cfg_options)]
    print(printable("\n".join(lines)))


def _lines(grown: Changed, out: str) -> Iterator[str]:
    """Report lines about the datasets, classes and experts of the new checkpoint."""
    yield f"written: {out}"
    yield (
        f"datasets: {', '.join(grown.old.dataset_names)} as they were; new: "
        f"{', '.join(grown.new_datasets)}"
    )
    yield (
        f"classes: {grown.old.num_classes} as they were; new: "
        f"{', '.join(grown.new_classes) or 'none'}"
    )
    for group, source in grown.sources.items():
        row = grown.similarity.get(group, {})
        best = sorted(row.items(), key=lambda item: -item[1])[:3]
        words = ", ".join(f"{name} {share:.2f}" for name, share in best)
        seen = f" (its images look like {words})" if words else ""
        yield f"experts of {group}: start as those of {source}{seen}"
    yield from (f"note: {note}" for note in grown.notes)


def _next_steps(
    grown: Changed, out: str, config: str, options: Sequence[str]
) -> Iterator[str]:
    """Training commands for the whole detector and for the new parts alone."""
    words = ["damex", "train", config, "--cfg-options", *options]
    words.append(option_of("load_from", out))
    yield "to train all of it:"
    yield f"  {shlex.join(words)}"
    if grown.alone_problem:
        yield f"the new parts cannot be trained alone: {grown.alone_problem}"
    else:
        words.append(option_of("train_only", [*grown.new_datasets]))
        effect = "" if grown.notes else ", without a change to other datasets"
        yield f"to train the new parts alone{effect}:"
        yield f"  {shlex.join(words)}"
