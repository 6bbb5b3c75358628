"""FewShotClassifier: pictures in, probabilities out, with any backbone; saved and refused."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fewshot_dpkl import DPKLHead, FewShotClassifier, NearestNeighborHead, find_backbone, load_head
from fewshot_dpkl.backbones import Extractor, load_backbone
from fewshot_dpkl.pictures.classifier import KEY
from fewshot_dpkl.pictures.embedding import Backbone, embed
from tests.conftest import ROOT
from tests.heads import test_heads
from tests.picture_files import make_folder, picture

QUICK = DPKLHead(epochs=10, latent=16, particles=3, embeddings=2, frequencies=32)


pytestmark = pytest.mark.usefixtures("registered_backbones")


def tiny(seed: int = 0) -> Extractor:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 5, 4), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )
    return Extractor(net, resize=26, crop=24, card={"backbone": "tiny"})


@pytest.fixture
def task(tmp_path):
    """Support paths and labels, query paths and labels: three classes told apart by colour."""
    root = make_folder(tmp_path / "pictures", {"a": 3}, per_class=6)
    paths = sorted(root.rglob("*.png"))
    labels = [path.parent.name for path in paths]
    return paths[::2], labels[::2], paths[1::2], labels[1::2]


def test_it_predicts_as_head_and_backbone_do_by_hand(task):
    paths, labels, query, truth = task
    backbone = tiny()
    classifier = FewShotClassifier(backbone, "nn").fit(paths, labels)

    def by_hand(files):
        pixels = np.stack(
            [np.asarray(Image.open(file).resize((26, 26), Image.Resampling.BILINEAR)) for file in files]
        )
        with torch.no_grad():
            return backbone(torch.from_numpy(pixels[:, 1:25, 1:25].copy())).numpy()

    expected = NearestNeighborHead().fit(by_hand(paths), labels)
    assert classifier.predict_proba(query) == pytest.approx(expected.predict_proba(by_hand(query)), abs=1e-3)
    assert classifier.predict(query).tolist() == truth
    assert classifier.score(query, truth) == 1
    assert classifier.classes_.tolist() == ["a-0", "a-1", "a-2"]


def test_all_kinds_of_pictures_are_one(task):
    paths, labels, query, _ = task
    classifier = FewShotClassifier(tiny(), QUICK).fit(paths, labels)
    expected = classifier.predict_proba(query)
    arrays = np.stack([np.asarray(Image.open(path)) for path in query])
    for kind in ([Image.open(path) for path in query], list(map(str, query)), arrays, list(arrays)):
        assert np.array_equal(classifier.predict_proba(kind), expected)
    assert np.array_equal(classifier.predict_proba(torch.from_numpy(arrays).permute(0, 3, 1, 2)), expected)


def test_a_picture_does_not_depend_on_the_pictures_beside_it(task):
    _, _, query, _ = task
    backbone = load_backbone("conv4-mini-imagenet")
    together, _ = embed(backbone, query)
    for index in (0, 4):
        assert np.array_equal(embed(backbone, query[index : index + 1])[0][0], together[index])


def test_what_cannot_be_classified_is_named(task, tmp_path):
    paths, labels, _, _ = task
    classifier = FewShotClassifier(tiny(), "nn")
    (tmp_path / "empty.png").touch()
    with pytest.raises(ValueError, match=r"empty\.png: the file is empty .*, picture 10: an array .*; leave"):
        classifier.fit([*paths, tmp_path / "empty.png", np.zeros(3)], [*labels, "a-0", "a-0"])
    with pytest.raises(ValueError, match="9 pictures but 8 labels"):
        classifier.fit(paths, labels[:-1])
    classifier.fit(paths, labels)
    for one in (paths[0], str(paths[0]), Image.open(paths[0]), np.zeros((8, 8, 3), np.uint8)):
        with pytest.raises(ValueError, match="give a list of pictures"):
            classifier.predict(one)
    with pytest.raises(
        ValueError, match=r"Sequential is not a backbone; wrap a module .* backbones\.Extractor"
    ):
        FewShotClassifier(nn.Sequential()).fit(paths, labels)


def test_backbones_come_from_installed_packages(monkeypatch):
    assert isinstance(find_backbone("conv4-mini-imagenet"), Backbone)
    with pytest.raises(FileNotFoundError, match="no backbone 'nowhere'"):
        find_backbone("nowhere")
    other = EntryPoints(
        [EntryPoint("mine", "tests.pictures.test_classifier:named", "fewshot_dpkl.backbones")]
    )
    monkeypatch.setattr(
        "fewshot_dpkl.pictures.embedding.entry_points", lambda group: other.select(group=group)
    )
    assert find_backbone("mine:large").name == "mine:large"
    with pytest.raises(ValueError, match=r"no installed package offers the backbone 'conv4'; install"):
        find_backbone("conv4")


def named(name: str) -> Extractor:
    backbone = tiny()
    backbone.name = name
    return backbone


def test_the_project_registers_its_backbones():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["fewshot_dpkl.backbones"]
    assert set(points) == {"default", "torchvision", "timm"}
    for name, value in points.items():
        assert EntryPoint(name, value, "fewshot_dpkl.backbones").load() is load_backbone


def test_features_are_kept_by_content_and_backbone(task, tmp_path, monkeypatch):
    paths, labels, query, _ = task
    cache = tmp_path / "cache"
    expected = FewShotClassifier(tiny(), "nn", cache).fit(paths, labels).predict_proba(query)
    files = sorted(cache.rglob("*.npy"))
    assert len(files) == len(paths) + len(query)
    query[0].rename(query[0].with_name("renamed.png"))
    query[0] = query[0].with_name("renamed.png")
    files[0].write_bytes(b"damaged")
    runs = []
    plain = Extractor.embed
    monkeypatch.setattr(Extractor, "embed", lambda self, pixels: runs.append(1) or plain(self, pixels))
    again = FewShotClassifier(tiny(), "nn", cache).fit(paths, labels).predict_proba(query)
    assert np.array_equal(again, expected)
    assert len(runs) == 1  # the damaged one
    query[0].write_bytes(picture(77, (24, 24), "PNG"))
    FewShotClassifier(tiny(), "nn", cache).fit(paths, labels).predict_proba(query)
    assert len(runs) == 2
    FewShotClassifier(tiny(seed=1), "nn", cache).fit(paths, labels)
    assert len(runs) == 2 + len(paths)


def test_another_weight_layer_or_preprocessing_is_another_identity():
    torch.manual_seed(0)
    same = Extractor(tiny().module, 26, 24, card={"backbone": "tiny"})
    others = [
        tiny(1),
        Extractor(tiny().module, 27, 24, card={"backbone": "tiny"}),
        Extractor(tiny().module, 26, 24, mean=(0.5, 0.5, 0.5), card={"backbone": "tiny"}),
        Extractor(nn.Sequential(*tiny().module, nn.ReLU()), 26, 24, card={"backbone": "tiny"}),
    ]
    assert same.identity == tiny().identity
    assert len({tiny().identity, *(other.identity for other in others)}) == 5


def test_a_saved_classifier_gives_the_same_bits_in_a_fresh_process(task, tmp_path):
    paths, labels, query, _ = task
    classifier = FewShotClassifier("conv4-mini-imagenet", QUICK).fit(paths, labels)
    classifier.save(tmp_path / "c.safetensors")
    code = (
        "import sys, numpy as np; from backbones import load_backbone\n"
        "from fewshot_dpkl import FewShotClassifier\n"
        "folder, *query = sys.argv[1:]; backbone = load_backbone('conv4-mini-imagenet')\n"
        "loaded = FewShotClassifier.load(folder + '/c.safetensors', backbone)\n"
        "np.save(folder + '/p.npy', loaded.predict_proba(query))"
    )
    command = [sys.executable, "-c", code, str(tmp_path), *map(str, query)]
    subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)})
    assert np.array_equal(np.load(tmp_path / "p.npy"), classifier.predict_proba(query))
    by_name = FewShotClassifier.load(tmp_path / "c.safetensors")
    assert np.array_equal(by_name.predict(query), classifier.predict(query))
    features = classifier.embed(query)
    assert np.array_equal(
        load_head(tmp_path / "c.safetensors").predict_proba(features), by_name.predict_proba(query)
    )


def test_other_backbones_versions_and_files_are_refused(task, tmp_path):
    paths, labels, _, _ = task
    path = tmp_path / "c.safetensors"
    FewShotClassifier(tiny(), "nn").fit(paths, labels).save(path)
    assert FewShotClassifier.load(path, tiny()).head == "nn"
    with pytest.raises(
        ValueError, match=r"fitted with the backbone tiny \(\w+\), but tiny is another one here"
    ):
        FewShotClassifier.load(path, tiny(seed=1))
    with pytest.raises(ValueError, match=r"cannot be loaded here: no backbone 'tiny'; give one"):
        FewShotClassifier.load(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    changed = json.dumps({**json.loads(metadata[KEY]), "version": 9})
    save_file(load_file(path), tmp_path / "new.safetensors", metadata={**metadata, KEY: changed})
    with pytest.raises(
        ValueError, match=r"has classifier format 9\.1, this version of fewshot-dpkl reads format 2\.1"
    ):
        FewShotClassifier.load(tmp_path / "new.safetensors", tiny())
    NearestNeighborHead().fit(np.eye(2), [0, 1]).save(tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match=r"head\.safetensors is not a saved classifier"):
        FewShotClassifier.load(tmp_path / "head.safetensors")
    with pytest.raises(FileNotFoundError, match="no saved classifier at"):
        FewShotClassifier.load(tmp_path / "nowhere.safetensors")


def test_a_damaged_file_is_refused(task, tmp_path):
    paths, labels, _, _ = task
    path = tmp_path / "c.safetensors"
    FewShotClassifier(tiny(), "nn").fit(paths, labels).save(path)
    whole = path.read_bytes()
    for cut in (0, 5, 200, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"c\.safetensors"):
            FewShotClassifier.load(path, tiny())
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(whole), 100):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            loaded = FewShotClassifier.load(path, tiny())
        except ValueError:
            continue
        # what is only read by people: the name of the backbone and its preprocessing, spaces
        assert np.array_equal(loaded.classes_, ["a-0", "a-1", "a-2"])
        assert place < 8 + int.from_bytes(whole[:8], "little")


@pytest.mark.parametrize("name", ["blr", "dblr", "dpkl", "nn"])
def test_the_mean_of_the_particles_is_the_prediction(name):
    x, y, xq, _ = test_heads.task()
    head = test_heads.quick(name).fit(x, np.array(["c", "a", "d", "b"])[y])
    each = head.predict_proba_particles(xq)
    assert each.shape == (len(xq), getattr(head, "particles", 1), 4)
    assert each.mean(1) == pytest.approx(head.predict_proba(xq), abs=1e-9)
