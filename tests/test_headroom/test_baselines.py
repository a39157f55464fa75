"""Every baseline builds the detector of its name, on as many images."""

import pytest
from mmdet.registry import DATA_SAMPLERS, DATASETS, MODELS
from mmengine.optim import build_optim_wrapper

from damex.config_files import CONFIGS, merge_options, moe_of_file, read_config
from damex.engine.config import resolve_config
from damex.errors import ConfigError
from damex.models.insertion import moe_blocks
from damex.workbench.headroom.baselines import baselines_of, experts_of, read_joint


@pytest.fixture
def joint(config):
    """``joint(**options)``: the joint training of the small config, with options."""

    def make(**options):
        cfg = read_config(str(config))
        merge_options(cfg, options)
        return read_joint(cfg)

    return make


def configs(joint, *names):
    return {one.name: one.config for one in baselines_of(joint, names)}


def build(cfg):
    return MODELS.build(resolve_config(cfg)["model"])


def drawn(cfg, epochs=1):
    """Samples of each dataset in some epochs, counted."""
    loader = resolve_config(cfg)["train_dataloader"]
    data = DATASETS.build(loader["dataset"])
    sampler = DATA_SAMPLERS.build(
        loader["sampler"], default_args=dict(dataset=data, seed=0)
    )
    indices = [i for epoch in range(epochs) for i in sampler.epoch_indices(epoch)]
    names = [data.specs[data.locate(index)[0]].name for index in indices]
    return {name: names.count(name) for name in set(names)}


def widths(detector, component):
    layers = getattr(detector, component).layers
    return [layer.ffn.layers[0][0].out_features for layer in layers]


@pytest.mark.parametrize(
    ("name", "encoder", "decoder"),
    [("dense", 256, 256), ("wide_decoder", 256, 1024), ("wide_encoder", 1024, 256)],
)
def test_baselines_have_dense_ffns_of_their_width(joint, name, encoder, decoder):
    detector = build(configs(joint(), name)[name])
    assert widths(detector, "encoder") == [encoder] * 2
    assert widths(detector, "decoder") == [decoder] * 3
    assert detector.resolved_moe() == {}


@pytest.mark.parametrize(
    ("name", "encoder", "decoder"),
    [("wide_decoder", 256, 2048), ("wide_encoder", 1024, 512)],
)
def test_ffns_of_transformers_get_their_width_by_another_key(
    joint, name, encoder, decoder
):
    config = dict(encoder_ffn_dim=256, decoder_ffn_dim=512)
    found = joint(model=dict(type="MoETransformersDetector", config=config))
    wide = configs(found, name)[name].model.config
    assert (wide.encoder_ffn_dim, wide.decoder_ffn_dim) == (encoder, decoder)


def test_baselines_do_not_change_each_other_or_the_config(config):
    cfg = read_config(str(config))
    before = cfg.to_dict()
    joint = read_joint(cfg)
    baselines_of(joint, ["dense_lr2", "wide_decoder", "single"])
    assert cfg.to_dict() == before
    dense = configs(joint, "dense")["dense"]
    assert dense.optim_wrapper == cfg.optim_wrapper
    assert dense.model.decoder == cfg.model.decoder


def test_twice_the_learning_rate_reaches_groups_with_a_factor(joint):
    baseline = configs(joint(), "dense_lr2")["dense_lr2"]
    wrapper = baseline.optim_wrapper
    wrapper["paramwise_cfg"] = dict(custom_keys=dict(backbone=dict(lr_mult=0.1)))
    groups = build_optim_wrapper(build(baseline), wrapper).param_groups
    assert {round(group["lr"], 6) for group in groups} == {0.0024, 0.00024}


def test_single_runs_read_what_the_joint_run_reads_of_each_dataset(joint):
    weighted = joint(
        **{
            "mixture.0.weight": 3.0,
            "mixture.1.weight": 1.0,
            "train_cfg.max_epochs": 4,
            "train_dataloader.sampler.samples_per_epoch": 10,
        }
    )
    assert weighted.shares == dict(street=0.75, park=0.25)
    dense, *singles = baselines_of(weighted, ["dense", "single"])
    whole = drawn(dense.config, epochs=4)
    assert dense.images == sum(whole.values()) == 40
    assert [one.name for one in singles] == ["single_street", "single_park"]
    for one, name in zip(singles, weighted.shares, strict=True):
        own = drawn(one.config, epochs=4)
        assert own == {name: one.images}
        assert abs(own[name] - whole[name]) <= 4 * 0.5  # half a sample per epoch


def test_single_runs_know_their_own_classes_alone(config, joint):
    """Also those of a written config, which holds its label space."""
    found = joint(**{"model.ignore_unannotated_classes": True})
    assert found.shares == pytest.approx(dict(street=5 / 8, park=3 / 8))
    dense, *singles = baselines_of(found, ["dense", "single"])
    assert (dense.images, *(one.images for one in singles)) == (8, 5, 3)
    assert dense.config.model.ignore_unannotated_classes
    classes = [["car", "person", "bus"], ["person", "dog", "car"]]
    written = read_joint(resolve_config(read_config(str(config))))
    again = baselines_of(written, ["single"])
    for one, other, names in zip(singles, again, classes, strict=True):
        assert "ignore_unannotated_classes" not in one.config.model
        resolved = resolve_config(one.config)
        for loader in ("train_dataloader", "val_dataloader", "test_dataloader"):
            data = DATASETS.build(resolved[loader]["dataset"])
            assert list(data.metainfo["classes"]) == names
        assert build(one.config).bbox_head.num_classes == 3
        assert build(other.config).bbox_head.num_classes == 3
        assert drawn(other.config) == drawn(one.config)


def test_a_single_of_few_classes_has_the_detections_that_it_can_have(joint):
    options = {"model.num_queries": 2, "model.test_cfg.max_per_img": 8}
    options["mixture.1.classes"] = ["person"]
    found = joint(**options)
    dense, street, park = baselines_of(found, ["dense", "single"])
    asked = [one.config.model.test_cfg.max_per_img for one in (dense, street, park)]
    assert asked == [8, 6, 2]
    resolve_config(park.config)  # which refuses more


def test_full_singles_are_as_long_as_the_joint_training(joint):
    found = joint()
    dense, street, park = baselines_of(found, ["dense", "single_full"])
    assert [street.name, park.name] == ["single_full_street", "single_full_park"]
    assert dense.images == street.images == park.images
    assert drawn(park.config) == {"park": dense.images}
    assert park.config.param_scheduler == dense.config.param_scheduler
    assert build(park.config).bbox_head.num_classes == 3


def test_training_by_iterations_is_shortened_with_its_schedule(joint):
    found = joint(
        **{
            "train_cfg.type": "IterBasedTrainLoop",
            "max_iters": 800,
            "train_cfg.val_interval": 400,
        }
    )
    found.config.train_cfg.pop("max_epochs", None)
    dense, street, park = baselines_of(found, ["dense", "single"])
    assert (dense.images, street.images, park.images) == (1600, 1000, 600)
    assert street.config.train_cfg.max_iters == 500
    assert street.config.train_cfg.val_interval == 250
    warm_up, decay = street.config.param_scheduler
    assert (warm_up.begin, warm_up.end) == (0, round(50 * 5 / 8))
    assert decay == dense.config.param_scheduler[1]  # as long as the training
    found.config.param_scheduler[1].update(begin=0.5, end=1.0)  # fractions of it
    street, *_ = baselines_of(found, ["single"])
    decay = street.config.param_scheduler[1]
    assert (decay.begin, decay.end, type(decay.end)) == (0.5, 1.0, float)
    assert dense.config.param_scheduler[0].end == 50


def test_epochs_and_shares_of_the_training_stay_in_a_schedule(joint):
    found = joint()
    found.config.param_scheduler = [
        dict(type="MultiStepLR", by_epoch=False, milestones=[0.9, 80]),
        dict(type="MultiStepLR", milestones=[8, 11]),
    ]
    by_iteration, by_epoch = configs(found, "single")["single_street"].param_scheduler
    assert by_iteration["milestones"] == [0.9, 50]
    assert by_epoch["milestones"] == [8, 11]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(mixture=None), r"the config has no mixture"),
        (dict(train_dataloader=None), "the config sets no train_dataloader"),
        (dict(train_cfg=dict(type="EpochBasedTrainLoop")), "neither max_epochs nor"),
        (dict(val_evaluator=dict(type="CocoMetric")), "no dict.type='MixtureMetric'"),
        (
            {"optim_wrapper.experts": dict(type="NormalizedGD", lr=0.1)},
            "optim_wrapper.experts is for detectors with experts",
        ),
        (
            {"train_dataloader.sampler.type": "DefaultSampler"},
            "sampler must be dict.type='MixtureSampler'",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_starts(config, change, message):
    cfg = read_config(str(config))
    cfg.merge_from_dict(change)
    for key, value in change.items():
        if "." not in key:
            cfg[key] = value
    with pytest.raises(ConfigError, match=message):
        read_joint(cfg)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("wide_decoder", {"model.decoder.layer_cfg": None}, "it is None in the config"),
        ("wide_encoder", {"model.encoder": None}, "multiplies model.encoder"),
        ("dense_lr2", {"optim_wrapper.optimizer.lr": None}, "multiplies optim_wrapper"),
    ],
)
def test_a_baseline_names_the_setting_that_it_cannot_change(
    joint, name, change, message
):
    found = joint(**change)
    with pytest.raises(ConfigError, match=f"{message}.*--baselines"):
        baselines_of(found, [name])


@pytest.mark.parametrize("by", ["names", "label file", "written config"])
def test_partitioned_has_classes_of_each_dataset_that_learn_from_it_alone(
    config, joint, by
):
    found = joint()
    if by == "label file":
        car = dict(car="vehicle")
        labels = dict(version=1, unlisted="union", datasets=dict(street=car, park=car))
        found = joint(label_space=labels)
    elif by == "written config":
        found = read_joint(resolve_config(read_config(str(config))))
    baseline = configs(found, "partitioned")["partitioned"]
    loader = resolve_config(baseline)["val_dataloader"]
    car = "vehicle" if by == "label file" else "car"
    assert list(DATASETS.build(loader["dataset"]).metainfo["classes"]) == [
        *[f"street/{name}" for name in (car, "person", "bus")],
        *[f"park/{name}" for name in ("person", "dog", car)],
    ]
    detector = build(baseline)
    assert detector.bbox_head.num_classes == 6
    awareness = detector.awareness
    own, foreign = [True] * 3, [False] * 3
    assert awareness.annotated_SC.tolist() == [[*own, *foreign], [*foreign, *own]]
    assert awareness.config.ignore_unannotated_classes
    assert awareness.config.label_prior.source == "head"
    shipped = read_config("head_per_dataset")
    assert shipped.label_space == "partitioned"
    for key in ("ignore_unannotated_classes", "label_prior"):
        assert shipped.model[key] == baseline.model[key]


@pytest.mark.parametrize("kind", ["MoEDeformableDETR", "MoETransformersDetector"])
def test_partitioned_needs_a_detector_that_guesses_the_dataset(joint, kind):
    found = joint(**{"model.type": kind})
    with pytest.raises(ConfigError, match=r"needs model.type='MoEDINO'.*--baselines"):
        baselines_of(found, ["partitioned"])


def test_one_dataset_has_no_single(joint, two_datasets):
    found = joint(mixture=two_datasets[:1])
    with pytest.raises(ConfigError, match="the mixture has one dataset, 'street'"):
        baselines_of(found, ["single"])


def test_the_oracle_is_a_training_of_the_recipe(joint):
    (one,) = baselines_of(joint(), ["oracle"])
    (recipe,) = experts_of(joint(), ["damex_best"])
    assert (one.name, one.config.to_dict()) == (recipe.name, recipe.config.to_dict())
    assert one.config.moe == moe_of_file("damex_best")
    assert one.images == 8


def test_experts_are_files_or_arms_of_a_file(joint, tmp_path):
    """All read as many images as the dense detector, if their file sets no number."""
    own, parts = tmp_path / "mine.py", tmp_path / "parts.py"
    own.write_text("moe = None\nmodel = dict(dataset_head=dict(loss_weight=0.5))")
    parts.write_text(
        "moe = dict(layers=dict(decoder=[1]), num_experts=3)\n"
        "arms = dict(\n"
        "    five=dict(moe=dict(num_experts=5)),\n"
        "    dense_faster=dict(moe=None, optim_wrapper=dict(optimizer=dict(lr=0.5))),\n"
        "    half=dict(train_dataloader=dict(sampler=dict(samples_per_epoch=4))),\n"
        ")\n"
    )
    plain = joint()
    (dense,) = baselines_of(plain, ["dense"])
    found = experts_of(plain, ["vanilla", str(own), str(parts)])
    assert [one.images for one in found] == [dense.images] * 4 + [dense.images // 2]
    named = {one.name: one.config for one in found}
    assert list(named) == ["vanilla", "mine", "five", "dense_faster", "half"]
    assert build(named["mine"]).awareness.config.dataset_head.loss_weight == 0.5
    assert named["mine"].model.num_queries == plain.config.model.num_queries
    (block,) = moe_blocks(build(named["five"]))
    assert (block.name, block.moe.num_experts) == ("decoder.1", 5)
    assert list(moe_blocks(build(named["dense_faster"]))) == []
    assert named["dense_faster"].optim_wrapper.optimizer.lr == 0.5
    assert named["five"].optim_wrapper == plain.config.optim_wrapper


def test_experts_may_not_take_the_folder_of_a_baseline(joint, tmp_path):
    own = tmp_path / "wide_decoder.py"
    own.write_text("moe = dict(layers=dict(decoder=[1]))")
    with pytest.raises(
        ConfigError, match="another training has the name 'wide_decoder'"
    ):
        experts_of(joint(), [str(own)])


def test_every_intervention_of_the_worlds_can_be_built(joint):
    trainings = experts_of(joint(), [str(CONFIGS / "_base_" / "interventions.py")])
    with_experts = {r.name: len(list(moe_blocks(build(r.config)))) for r in trainings}
    assert with_experts["decoder_only"] < with_experts["by_token"]
    dense = {name for name, blocks in with_experts.items() if blocks == 0}
    assert dense == {"dense_label_prior", "dense_averaged"}
