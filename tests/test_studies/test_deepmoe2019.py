from types import SimpleNamespace

import pytest
import torch

from studies.deepmoe2019.measures import (
    conv_flops,
    counted_flops,
    embedding_flops,
    flops_by_hand,
    score,
)
from studies.deepmoe2019.network import (
    STRATEGIES,
    VGG,
    DigitNet,
    Recipe,
    conv_parameters,
    draw_digits,
    shrink,
    train,
)
from studies.harness import seeded

pytestmark = pytest.mark.studies

STAGES = ((4, 6), (8,))


@pytest.fixture(scope="module")
def digits():
    return draw_digits(seed=0, num_train=128)


@pytest.fixture
def network():
    # A seed with different open channels for different images.
    with seeded(3):
        return DigitNet(STAGES, embedding_widths=(2, 3)).eval()


def test_operations_by_hand_and_by_the_counter(network, digits):
    images = digits.test.images_S1HW[:7]
    # 2 * 9 multiply-adds: 64 pixels * (1*4 + 4*6) + 16 pixels * 6*8 = 2560.
    assert conv_flops(network, {}, num_images=1) == 2 * 9 * 2560
    gates = {
        "conv1": torch.tensor([[1.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0]]),
        "conv2": torch.tensor([[3.0, 1.0, 1.0, 0.0, 0.0, 0.0]]).expand(2, 6),
    }
    # First image: 64 * (1*2 + 2*3) + 16 * 3*8 = 896; the second: 16 * 3*8 = 384.
    assert conv_flops(network, gates, num_images=2) == 2 * 9 * (896 + 384) / 2
    # 16 pixels * 1*2 + 4 pixels * 2*3 = 56; linear layers 3*10 + 10*(4 + 6 + 8) = 210.
    assert embedding_flops(network) == 2 * 9 * 56 + 2 * 210
    counted, gap = counted_flops(network, images)
    assert counted == flops_by_hand(network, images)
    assert gap < 1e-5
    closed = sum((g == 0).sum().item() for g in network.gating(images).layers.values())
    assert closed > 0
    assert counted < 2 * 9 * 2560 + 2 * (9 * 56 + 210 + 80)


def test_scores_tell_own_gates_from_those_of_another_image(network, digits):
    # conv3's gate c is open for class c alone, and the readout looks at it.
    def gate(images, labels):
        one_hot = torch.nn.functional.one_hot(labels, 10)[:, :8].float()
        return {"conv3": one_hot}

    labels = digits.test.labels_S

    # An embedding that is right in training, and calls 0 1, 1 2 and so on in a test.
    def gating(images):
        training = images is digits.train.images_S1HW
        true = digits.train.labels_S if training else labels
        said = true if training else (true + 1) % 10
        return SimpleNamespace(
            logits_BE=torch.nn.functional.one_hot(said, 10), layers=gate(images, true)
        )

    network.gating.forward = gating
    with torch.no_grad():
        network.layers[2].norm.bias.fill_(50.0)
        network.fc.weight.zero_().fill_diagonal_(1.0)
        network.fc.bias.zero_()
    found = score(network, digits)
    known = (labels < 8).double().mean().item() * 100
    zeros = (labels == 0).double().mean().item() * 100
    # Closed to 8 and 9, for which all logits are zero and class 0 wins.
    assert found.accuracy == pytest.approx(known)
    assert found.blank_accuracy == pytest.approx(known)
    assert found.embedding_accuracy == 0.0
    assert found.embedding_train_accuracy == 100.0
    # What is 9 is 0 for the embedding, and for the network with no gate open.
    nines = (labels == 9).double().mean().item() * 100
    assert found.copied == pytest.approx(nines)
    borrowed = labels.roll(1)
    said = torch.where(borrowed < 8, borrowed, 0)
    agree = (said == labels).double().mean().item() * 100
    assert found.borrowed_accuracy == pytest.approx(agree)
    assert zeros < 20
    # One of 8 channels for known classes, none for others; 9 patterns.
    assert found.active == pytest.approx(known / 8, abs=1e-3)
    assert found.patterns == 9


def test_stage_two_trains_the_network_and_nothing_of_the_gating_path(digits):
    with seeded(0):
        network = DigitNet(STAGES, embedding_widths=(2, 3))
    recipe = Recipe(joint_epochs=1, frozen_epochs=1)
    generator = torch.Generator().manual_seed(0)
    start = {k: v.clone() for k, v in network.state_dict().items()}
    train(network, digits, recipe, generator, stage=1)
    joint = {k: v.clone() for k, v in network.state_dict().items()}
    changed = {k for k in start if not torch.equal(start[k], joint[k])}
    assert changed == set(start)
    train(network, digits, recipe, generator, stage=2)
    final = network.state_dict()
    changed = {k for k in start if not torch.equal(joint[k], final[k])}
    assert changed == {k for k in start if not k.startswith("gating.")}


def test_without_mu_and_lambda_only_the_classes_train_the_gates(digits):
    gradients = {}
    for mu in (0.0, 1.0):
        with seeded(0):
            network = DigitNet(STAGES, embedding_widths=(2, 3))
        with torch.no_grad():  # shut: the classes say nothing about the embedding
            for head in network.gating.heads.values():
                head.weight_CE.fill_(0.0)
        bias = network.gating.embedding.fc.bias
        before = bias.clone()
        recipe = Recipe(joint_epochs=1, l1_weight=0.0, aux_weight=mu, weight_decay=0.0)
        train(network, digits, recipe, torch.Generator().manual_seed(0), stage=1)
        gradients[mu] = (bias - before).abs().max().item()
    assert gradients[0.0] == 0.0
    assert gradients[1.0] > 1e-3


def test_the_widening_strategies_have_the_layers_and_weights_of_table_1():
    for stages in (VGG, *STRATEGIES.values()):
        assert [len(stage) for stage in stages] == [2, 2, 3, 3, 3]
    millions = {name: conv_parameters(s) / 1e6 for name, s in STRATEGIES.items()}
    # W1-Mid: 9 * (3*64 + 64*64 + 64*128 + 128*128 + 128*2990 + 2990*256 + 256*256
    #              + 256*512 + 5*512*512) = 9 * 2684352.
    assert millions["W1-Mid"] == pytest.approx(9 * 2.684352)
    # W4-Low: 9 * (3*512 + 3*512*512 + 512*256 + 2*256*256 + 256*512 + 5*512*512)
    assert millions["W4-Low"] == pytest.approx(9 * 2.491904)
    assert millions["W13-All"] == pytest.approx(24.183018)
    # Its last width is lost; ours was chosen for as many weights as the two have.
    assert millions["W1-High"] == pytest.approx(24.17, abs=0.01)
    assert shrink(STRATEGIES["W1-Mid"], 8)[2] == (374, 32, 32)


@pytest.fixture(scope="module")
def rows(result):
    return {(row.name, row.settings): row for row in result.rows}


def test_the_quick_study_shows_sparsity_and_patterns(rows):
    falls = rows[
        "least fall of active channels from one lambda to the next, points", ""
    ]
    assert falls.holds
    patterns = rows["distinct gate patterns of the 597 test images", "lambda 0.001"]
    assert patterns.holds
    # Better than chance by far, with gates that were learned.
    assert rows["accuracy, %", "lambda 0.001"].mean > 60
    assert rows["accuracy of the embedding network alone, %", "mu 1"].mean > 60
    assert rows["accuracy of the embedding network alone, %", "mu 0"].mean < 40
    another = rows["accuracy with the gates of another image, %", "lambda 0.001"]
    assert another.mean < rows["accuracy, %", "lambda 0.001"].mean - 30


def test_what_holds_exactly_holds_in_the_quick_study(result):
    exact = [
        row
        for row in result.rows
        if row.name.startswith(("change of", "logits with", "operations executed"))
    ]
    assert len(exact) == 4
    assert all(row.holds for row in exact)
    # Gated networks: 3 lambdas, mu 0, a weak embedding, 2 of VGG; and 4 plain ones.
    assert [len(row.values) for row in exact] == [7, 11, 7, 11]
