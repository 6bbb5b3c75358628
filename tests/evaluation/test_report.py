"""The page of an evaluation: what it says, that it is whole and safe, and how it looks in a browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from fewshot_dpkl import EpisodeSampler, evaluate
from fewshot_dpkl.evaluation.evaluator import by_class, paired_differences
from fewshot_dpkl.evaluation.report import report
from fewshot_dpkl.evaluation.report.pictures import ticks
from tests.conftest import assert_refused, cluster_features
from tests.heads.test_heads import quick

HEADS = ("nn", "centroid", "logreg")


@pytest.fixture(scope="module")
def results():
    """Results with everything a page can show, on features hard enough for wrong answers."""
    features = cluster_features(spread=2.5)
    heads = {name: quick(name) for name in HEADS}
    runs = {}
    for shot in (1, 3):
        sampler = EpisodeSampler(features, way=3, shot=shot, query=5)
        found = evaluate(heads, features, sampler, 12, unseen=True)
        summary = {name: result.summary() for name, result in found.items()}
        runs[shot] = {"heads": summary, "paired": paired_differences(found)}
        classes = by_class(found, sampler.draw(range(12)).classes, features.class_names)
    return {
        "command": "python scripts/eval_episodes.py --features a&b.npz",
        "settings": {"way": 3, "shot": 3, "query": 5, "episodes": 12, "seed": 0, "head": list(HEADS)},
        "versions": {"torch": "2"},
        "features": {"dataset": "clusters", "backbone": {"name": "made-up", "recipe": {"lr": 0.1}}},
        **runs[3],
        "classes": classes,
        "sweeps": {"shot": [{"way": 3, "shot": shot, **run} for shot, run in runs.items()]},
    }


def copy(results):
    return json.loads(json.dumps(results))


class Page(HTMLParser):
    """Checks that elements are closed in order; collects tables, texts, tags and attributes."""

    VOID = ("meta", "br", "hr", "line", "circle", "rect", "polyline")

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts, self.tables = [], [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attributes):
        assert tag in self.VOID
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data.replace("\u00a0", " ")

    def table(self, *headings):
        """The rows, by their heading, of the table with these first headings."""
        (rows,) = [rows for rows in self.tables if rows[0][: len(headings)] == list(headings)]
        return {row[0]: row[1:] for row in rows[1:]}


def test_the_page_shows_the_figures(results):
    page = Page(report(results))
    shown = page.table("head", "accuracy %", "NLL", "ECE")
    assert list(shown) == list(HEADS)
    for name, figures in results["heads"].items():
        accuracy, nll, ece, brier = shown[name][:4]
        assert accuracy == f"{100 * figures['accuracy']:.2f} ± {100 * figures['ci95']:.2f}"
        assert (nll, ece, brier) == tuple(f"{figures[key]:.4f}" for key in ("nll", "ece", "brier"))
        auroc = f"{figures['unseen_auroc']:.3f} ± {figures['unseen_auroc_ci95']:.3f}"
        assert auroc in shown[name]
    swept = page.table("head", "1-shot", "3-shot")
    assert swept["nn"][1] == shown["nn"][0]
    text = " ".join(page.texts)
    assert results["command"] in text
    assert "backbone.recipe.lr" in text
    for name in ("Reliability of nn", "Accuracy against shot", "Accuracy of each head"):
        assert name in page.texts


def test_differences_are_row_minus_column_and_marked_when_clear(results):
    page = Page(report(results))
    accuracy, nll = [rows for rows in page.tables if rows[0] == ["minus", *HEADS]]
    for rows, figure, factor, decimals, better in ((accuracy, "accuracy", 100, 2, 1), (nll, "nll", 1, 3, -1)):
        for i, head in enumerate(HEADS):
            assert rows[i + 1][i + 1] == ""
            for j, other in enumerate(HEADS[:i]):
                (pair,) = [p for p in results["paired"] if (p["head"], p["minus"]) == (head, other)]
                value, interval = pair[figure], pair[f"{figure}_ci95"]
                below, above = rows[i + 1][j + 1], rows[j + 1][i + 1]
                for text, difference in ((below, value), (above, -value)):
                    mark = "" if abs(value) <= interval else "▲ " if better * difference > 0 else "▼ "
                    number = f"{factor * difference:+.{decimals}f}".replace("-", "−")
                    assert text == f"{mark}{number} ± {factor * interval:.{decimals}f}"
    assert any("▲" in text for row in nll for text in row)


def test_hardest_classes_come_first(results):
    rows = Page(report(results)).table("class", *HEADS)
    means = {row["name"]: np.mean(list(row["accuracy"].values())) for row in results["classes"]}
    assert list(rows) == sorted(means, key=means.get)
    for row in results["classes"]:
        assert rows[row["name"]][0] == f"{100 * row['accuracy']['nn']:.1f}"


def test_reliability_bars_have_the_height_of_the_accuracy(results):
    picture = re.search(r'aria-label="Reliability of nn".*?</svg>', report(results), re.S)[0]
    heights = [float(h) for h in re.findall(r'class="bar"[^>]*height="([\d.]+)"', picture)]
    bins = results["heads"]["nn"]["reliability"]
    expected = [140 * r / n for n, r in zip(bins["count"], bins["right"], strict=True) if n]
    np.testing.assert_allclose(heights, expected, atol=0.06)


def test_the_page_stands_alone_and_is_accessible(results):
    page = Page(report(results))
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {"src", "href", "srcset", "action", "style"} & names
    assert not any(name.startswith("on") for name in names)
    assert "url(" not in report(results)
    assert page.tags.count("title") == 1 + page.tags.count("svg") == 1 + page.tags.count("desc")
    assert ("lang", "en") in page.attributes
    assert ("scope", "col") in page.attributes
    assert ("scope", "row") in page.attributes
    assert all(heading for rows in page.tables for heading in rows[0])
    assert "prefers-color-scheme: dark" in report(results)


def test_every_text_is_escaped(results):
    """Whatever a name, a path or a card holds, it is shown and not run."""
    bad = '<script>alert("x")</script>&\'"'
    renamed = json.loads(
        json.dumps(results).replace('"nn"', json.dumps(bad)).replace("class 3", "\\u003cb>3")
    )
    renamed["command"] = renamed["versions"]["torch"] = renamed["features"]["dataset"] = bad
    renamed["settings"][bad] = {bad: [bad]}
    page = Page(report(renamed))
    assert not {"script", "b"} & set(page.tags)
    assert "<b>3" in page.texts
    assert page.texts.count(bad) >= 8
    assert Page(report(results)).tags.count("tr") + 1 == page.tags.count("tr")  # the new setting


def test_a_page_of_one_head_and_no_extras(results):
    """One head, no sweep, no wrong answer: nothing to compare, and the page says nothing of it."""
    small = copy(results)
    small["heads"] = {"nn": {k: v for k, v in results["heads"]["nn"].items() if "unseen" not in k}}
    small["heads"]["nn"].update(accuracy=1.0, ci95=0.0, entropy_wrong=None)
    for key in ("paired", "sweeps", "classes", "command", "versions", "features"):
        del small[key]
    page = Page(report(small))
    assert "Paired differences" not in page.texts
    assert "Hardest classes" not in page.texts
    assert "unseen AUROC" not in page.tables[0][0]
    assert page.table("head", "accuracy %")["nn"][0] == "100.00 ± 0.00"
    assert "–" in page.table("head", "accuracy %")["nn"]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (52.3, 64.4), (39.7, 70.6), (99.99, 100), (50, 50), (3, 3e4)]
)
@pytest.mark.parametrize("steps", [5, 8])
def test_ticks_are_round_and_hold_the_range(low, high, steps):
    marks = ticks(low, high, steps)
    assert marks[0] <= low + 1e-9
    assert marks[-1] >= high - 1e-9
    assert 2 <= len(marks) <= steps + 2
    assert len({round(b - a, 9) for a, b in pairwise(marks)}) == 1


# In a browser


def browse(page, *arguments):
    """Run headless Chromium on a file; what it printed."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs Chromium: install Debian's chromium package")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += ["--hide-scrollbars", f"--user-data-dir={page.parent / 'profile'}"]
    command = [browser, *flags, *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_drawn_in_light_and_dark(results, scheme, tmp_path):
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(report(results), encoding="utf-8")
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    browse(page, *dark, f"--screenshot={picture}", "--window-size=390,2400")
    pixels = np.asarray(Image.open(picture).convert("RGB"), float)
    assert pixels.shape == (2400, 390, 3)
    corner = pixels[2, 2].mean()
    assert corner < 60 if scheme == "dark" else corner > 240
    drawn = np.abs(pixels - pixels[2, 2]).max(2) > 40
    assert drawn.mean() > 0.02
    assert drawn.reshape(24, 100, 390).any((1, 2)).all()  # something in every stretch of the page
    colourful = np.ptp(pixels, axis=2) > 60  # the series of the pictures
    assert colourful.mean() > 0.005


def test_a_phone_does_not_scroll_sideways(results, tmp_path):
    """Wide tables scroll in their own boxes; the page as a whole is as wide as the screen."""
    page = tmp_path / "report.html"
    ask = (
        "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script></body>"
    )
    opened = report(results).replace("default-src 'none'", "script-src 'unsafe-inline'")
    page.write_text(opened.replace("<details>", "<details open>").replace("</body>", ask), encoding="utf-8")
    width, screen = re.search(
        r"<title>(\d+) of (\d+)</title>", browse(page, "--dump-dom", "--window-size=390,800")
    ).groups()
    assert int(width) == int(screen) <= 500


# From the command line


def test_the_script_writes_a_page(run_script, tmp_path):
    cluster_features().save(tmp_path / "clusters.npz")
    common = ["--features", tmp_path / "clusters.npz", "--head", "nn", "--head", "centroid"]
    common += ["--episodes", 3, "--way", 3, "--shot", 2, "--query", 4]
    target = tmp_path / "new" / "report.html"
    ran = run_script("eval_episodes.py", *common, "--sweep-shot", 1, 4, "--report", target)
    assert ran.returncode == 0, ran.stderr
    page = Page(target.read_text(encoding="utf-8"))
    assert "3-way 2-shot evaluation" in page.texts
    assert list(page.table("head", "1-shot", "4-shot")) == ["nn", "centroid"]
    assert any("--sweep-shot 1 4 --report" in text for text in page.texts)
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]


def test_a_page_that_cannot_be_written_is_refused_before_the_work(run_script, tmp_path):
    (tmp_path / "file").write_text("")
    for target, words in (
        (tmp_path, "is a folder; name a file"),
        (tmp_path / "file" / "report.html", "file is a file; choose another place"),
    ):
        ran = run_script("eval_episodes.py", "--head", "nn", "--episodes", 1, "--report", target)
        assert_refused(ran, words)
        assert ran.stdout == ""
