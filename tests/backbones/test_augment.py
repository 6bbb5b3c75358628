"""Augmentation: normalised, random by the generator alone, and of the kind torchvision does."""

from __future__ import annotations

import pytest
import torch
from torchvision.transforms import functional as reference

from fewshot_dpkl.backbones.augment import MEAN, STD, augment, jitter_colours, normalise, random_crops


def pictures(count: int = 4, size: int = 20) -> torch.Tensor:
    return torch.randint(60, 190, (count, size, size, 3), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )


def test_normalise_is_that_of_torchvision():
    images = pictures()
    expected = reference.normalize(images.permute(0, 3, 1, 2) / 255, list(MEAN), list(STD))
    torch.testing.assert_close(normalise(images), expected, atol=1e-5, rtol=1e-5)
    assert normalise(images).is_contiguous(memory_format=torch.channels_last)


def test_colour_jitter_is_that_of_torchvision():
    images = pictures().permute(0, 3, 1, 2).float()
    got = jitter_colours(images.clone(), 0.1, torch.Generator().manual_seed(5))
    factors = 1 + 0.1 * (2 * torch.rand(3, 4, 1, 1, 1, generator=torch.Generator().manual_seed(5)) - 1)
    for index, image in enumerate(images / 255):
        brightness, contrast, saturation = factors[:, index].flatten().tolist()
        image = reference.adjust_saturation(reference.adjust_brightness(image, brightness), saturation)
        torch.testing.assert_close(
            got[index] / 255, reference.adjust_contrast(image, contrast), atol=2e-3, rtol=0
        )


def test_crops_of_a_ramp_are_ramps_inside_it():
    ramp = torch.linspace(0, 1, 40).expand(200, 3, 40, 40).contiguous()
    crops = random_crops(ramp, 16, (0.3, 1.0), torch.Generator().manual_seed(0))
    assert crops.shape == (200, 3, 16, 16)
    assert crops.min() >= 0
    assert crops.max() <= 1
    steps = crops[:, 0, :, 1:-2].diff(dim=-1)  # B 16 12; the outermost pixels may be reflected ones
    rising = (steps > 0).all(-1).all(-1)
    falling = (steps < 0).all(-1).all(-1)
    assert (rising | falling).all()
    assert 60 < rising.sum() < 140  # half of them mirrored
    span = (crops[:, 0, 0, 0] - crops[:, 0, 0, -1]).abs()
    assert span.min() > 0.3 * 0.8  # widths from √(0.3 · 3/4) to 1 of the picture
    assert span.max() > 0.9


def test_every_view_follows_from_the_generator():
    images = pictures()
    first, again, other = (
        augment(images, 16, (0.4, 1.0), 0.4, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (4, 3, 16, 16)
    assert first.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("jitter", [0.0, 0.9])
def test_values_stay_those_of_pictures(jitter):
    views = augment(pictures(50), 16, (0.2, 1.0), jitter, torch.Generator().manual_seed(0))
    values = views * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    assert values.min() >= -1e-5
    assert values.max() <= 1 + 1e-5
