"""Put DPKL on a module of your own: any `nn.Module` from pictures `[B, 3, H, H]` to vectors `[B, D]`.

python examples/own_module.py birds/ new/ --save birds.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from fewshot_dpkl import FewShotClassifier
from fewshot_dpkl.backbones import Extractor


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

support = sorted(arguments.support.glob("*/*.*"))
query = sorted(arguments.query.rglob("*.*"))

# An Extractor freezes the module and knows how its pictures are prepared. The card names it in saved files.
backbone = Extractor(
    ColourMap(),
    resize=72,  # the shorter side of a picture
    crop=64,  # the middle square that the module sees
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    card={"backbone": "colour map"},
)
classifier = FewShotClassifier(backbone, head="dpkl").fit(support, [path.parent.name for path in support])
for path, row in zip(query, classifier.predict_proba(query), strict=True):
    print(path, classifier.classes_[row.argmax()], f"{row.max():.3f}")

if arguments.save:
    classifier.save(arguments.save)
    FewShotClassifier.load(
        arguments.save, backbone
    )  # a module of your own is given again, a name is not needed
