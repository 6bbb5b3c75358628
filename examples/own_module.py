"""Put a head on a module of your own: any `nn.Module` from pictures `[B, 3, H, H]` to vectors `[B, D]`.

python examples/own_module.py birds/ new/ --save birds.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from fewshot_dpkl import FewShotClassifier
from fewshot_dpkl.backbones import Extractor
from fewshot_dpkl.data import read_query, read_support


class ColourMap(nn.Module):
    """Your network here: the mean colour of each cell of a grid, `[B, 3, H, H]` to `[B, 3 · cells²]`."""

    def __init__(self, cells: int = 4) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(cells)

    def forward(self, pictures: Tensor) -> Tensor:
        return torch.flatten(self.pool(pictures), 1)


parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
parser.add_argument("support", type=Path, help="folder with a folder of pictures per class")
parser.add_argument("query", type=Path, help="folder of pictures to classify")
parser.add_argument("--save", type=Path, help="keep the fitted classifier (.safetensors)")
arguments = parser.parse_args()

support, query = read_support(arguments.support), read_query([arguments.query])  # hidden files are left out

# An Extractor freezes the module and knows how its pictures are prepared. The card names it in saved files.
backbone = Extractor(
    ColourMap(),
    resize=72,  # the shorter side of a picture
    crop=64,  # the middle square that the module sees
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    card={"backbone": "colour map"},
)
# What is no picture is skipped with a warning.
classifier = FewShotClassifier(backbone, on_unreadable="skip").fit(support.paths, support.labels)
answers, probabilities = classifier.predict(query.paths), classifier.predict_proba(query.paths).max(1)
for path, answer, probability in zip(query.paths, answers, probabilities, strict=True):
    print(path, answer, f"{probability:.3f}")

if arguments.save:
    classifier.save(arguments.save)
    FewShotClassifier.load(
        arguments.save, backbone
    )  # a module of your own is given again, a name is not needed
