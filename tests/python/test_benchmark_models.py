"""The networks of the benchmark are those that its figures are of."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks import models


def same_values(mine: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    """Whether all that they keep is the same, in the same order."""
    pairs = zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True)
    return all(torch.equal(each, other) for each, other in pairs)


def test_residual_networks_are_torchvisions():
    vision = pytest.importorskip("torchvision").models
    for make, theirs in (
        (lambda: models.resnet50(100), lambda: vision.resnet50(num_classes=100)),
        (lambda: models.resnet18(False), lambda: vision.resnet18(num_classes=10)),
    ):
        pair = []
        for each in (make, theirs):
            torch.manual_seed(0)
            pair.append(each())
        assert same_values(*pair)
        images = torch.randn(2, 3, 64, 64)
        assert torch.equal(*(network(images) for network in pair))


def test_swin_is_torchvisions():
    vision = pytest.importorskip("torchvision").models
    theirs = vision.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        stochastic_depth_prob=0.0,
        num_classes=10,
    )
    mine = models.Swin(10, 64, 32, (2, 2), (2, 4), 4)
    with torch.no_grad():
        for each, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            each.copy_(other)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(mine(images), theirs(images))


def test_the_networks_are_those_that_the_figures_are_of():
    with torch.device("meta"):
        made = {
            "ResNet-50": models.resnet50(1000),
            "Swin-T": models.swin_tiny(1000),
            "ViT-B/16": models.vit_base(1000),
            "BERT-base": models.bert_base(),
            "BERT-large": models.bert_large(),
            "GPT-2": models.gpt2(),
            "160M": models.llama_160m(),
            "Llama 3.2 1B": models.llama_1b(),
        }
    # As torchvision, timm and transformers say; GPT-2's 124,439,808 and 47 more words of 768.
    assert {name: sum(p.numel() for p in net.parameters()) for name, net in made.items()} == {
        "ResNet-50": 25_557_032,
        "Swin-T": 28_288_354,
        "ViT-B/16": 86_567_656,
        "BERT-base": 109_514_298,
        "BERT-large": 335_174_458,
        "GPT-2": 124_475_904,
        "160M": 162_417_408,
        "Llama 3.2 1B": 1_235_814_400,
    }


def test_a_llama_sees_what_is_before_and_how_far():
    torch.manual_seed(0)
    network = models.Llama(2, 4, 2, 32, 64, 16, 64)
    tokens = torch.randint(64, (1, 8))
    whole = network(tokens)
    torch.testing.assert_close(network(tokens[:, :5]), whole[:, :5])
    q, k = (torch.randn(1, 1, 1, 8).expand(1, 1, 16, 8) for _ in "qk")
    turned = [models._turned(each, network.cos, network.sin) for each in (q, k)]
    scores = (turned[0] @ turned[1].transpose(2, 3))[0, 0]
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])
    assert not torch.allclose(scores[1:], scores[:-1])


def test_the_products_of_a_dlrm_are_those_of_all_pairs():
    network = models.Dlrm(3, 50, 8)
    seen: list[torch.Tensor] = []
    network.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    numbers, ids = torch.randn(2, 13), torch.randint(50, (3, 2, 4))
    network(numbers, ids)
    vectors = [network.numbers(numbers).relu()]
    vectors += [
        table.weight[each].sum(1) for table, each in zip(network.features, ids, strict=True)
    ]
    pairs = [(a * b).sum(1) for b, a in itertools.combinations(vectors, 2)]
    found = seen[0][:, 8:].sort(1).values
    torch.testing.assert_close(found, torch.stack(pairs, 1).sort(1).values)
