"""The study: lambda, stages, operations and widening on digits."""

from __future__ import annotations

from damex.studies.deepmoe2019.conclusion import conclusion
from damex.studies.deepmoe2019.digits import draw_digits
from damex.studies.deepmoe2019.figure import draw_figure
from damex.studies.deepmoe2019.measurements import (
    EMBEDDING_WIDTHS,
    WEAK_EMBEDDING_WIDTHS,
    Plan,
    measure_all,
)
from damex.studies.deepmoe2019.rows import all_rows
from damex.studies.deepmoe2019.training import Recipe
from damex.studies.progress import StudyProgress
from damex.studies.result import StudyResult, StudySettings

__all__ = ["run"]

SEEDS = 5


def run(settings: StudySettings, progress: StudyProgress) -> StudyResult:
    """Runs the study.

    Args:
        settings: How much.
        progress: Told how far it is.
    """
    plan = _plan(settings)
    found = measure_all(plan, progress)
    rows = all_rows(found)
    num_images = len(draw_digits(seed=0).test_labels_B)
    recipe, deep = plan.recipe, plan.vgg_recipe
    return StudyResult(
        title="DeepMoE (Wang et al. 2019, arXiv 1806.01531)",
        rows=rows,
        conclusion=conclusion(rows, found),
        figure=draw_figure(found, num_images=num_images),
        settings={
            "training images": plan.num_train,
            "test images": num_images,
            "epochs": f"{recipe.joint_epochs} + {recipe.frozen_epochs}",
            "epochs of VGG": f"{deep.joint_epochs} + {deep.frozen_epochs}",
            "widths of VGG divided by": plan.vgg_divisor,
            "batch": recipe.batch_size,
            "learning rate of SGD": recipe.lr,
            "learning rate of VGG": deep.lr,
            "lambda of VGG": deep.l1_weight,
            "widths of the embedding": EMBEDDING_WIDTHS,
            "of the weak one": WEAK_EMBEDDING_WIDTHS,
        },
    )


def _plan(settings: StudySettings) -> Plan:
    if settings.quick:
        return Plan(
            seeds=range(settings.seeds or 1),
            l1_weights=(0.0, 1e-3, 1e-1),
            strategies=("W1-Mid",),
            vgg_divisor=16,
            recipe=Recipe(joint_epochs=6, frozen_epochs=2),
            other_recipes={},
            vgg_recipe=Recipe(joint_epochs=2, frozen_epochs=1, lr=0.02),
            num_train=600,
            num_flop_images=20,
        )
    return Plan(
        seeds=range(settings.seeds or SEEDS),
        l1_weights=(0.0, 1e-4, 1e-3, 1e-2, 1e-1),
        strategies=("W1-High", "W1-Mid", "W4-Low", "W13-All"),
        vgg_divisor=8,
        recipe=Recipe(),
        other_recipes={
            "learning rate 0.02": Recipe(lr=0.02),
            "twice the epochs": Recipe(joint_epochs=60, frozen_epochs=20),
        },
        vgg_recipe=Recipe(joint_epochs=15, frozen_epochs=5, lr=0.02),
    )
