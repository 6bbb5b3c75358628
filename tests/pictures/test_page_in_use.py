"""The page in a real browser, as somebody uses it: folders, names, models, reloads, answers to keep."""

from __future__ import annotations

import csv
import http.client
import json
import os
import socket
import struct
from pathlib import Path

import numpy as np
import pytest

from fewshot_dpkl import HEADS, CentroidHead, FewShotClassifier
from tests.browser import chromium
from tests.picture_files import make_folder, picture
from tests.pictures.test_page import BACKBONE, ask, choose, question, serve

__all__ = ["serve"]  # a fixture
pytestmark = pytest.mark.usefixtures("registered_backbones")
READY = "document.body.dataset.state === 'ready'"
WAITING = "document.body.dataset.state === 'waiting'"


class Doubting(CentroidHead):
    """A fake head to which the first picture of every question is a stranger."""

    def unfamiliarity(self, X):
        return np.where(np.arange(len(X)) == 0, 0.97, 0.2)


def text(browser, css):
    return browser.run("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", css)


def names(browser):
    return browser.run("return [...document.querySelectorAll('#classes .row input')].map(e => e.value)")


def put(browser, css, value, event="onchange"):
    script = "const e = document.querySelector(arguments[0]); e.value = arguments[1]; e[arguments[2]]()"
    browser.run(script, css, value, event)


def shoot(browser, tmp_path, name):
    """Screenshots go to $FEWSHOT_DPKL_SCREENSHOTS, to be looked at, else to a folder of the test."""
    shots = Path(os.environ.get("FEWSHOT_DPKL_SCREENSHOTS") or tmp_path / "shots")
    shots.mkdir(parents=True, exist_ok=True)
    browser.screenshot(shots / name)


def test_folders_names_models_reloads_and_answers(serve, tmp_path, monkeypatch):
    monkeypatch.setitem(HEADS, "centroid", Doubting)
    root = make_folder(tmp_path / "pictures", {"birds": 3, "new": 2}, per_class=3, size=60)
    (root / "birds" / "birds-0" / ".DS_Store").touch()
    (root / "birds" / "birds-1" / "notes.txt").write_text("no picture")
    port = serve()
    with chromium(tmp_path / "profile") as browser:
        browser.look(1200)
        browser.open(f"http://127.0.0.1:{port}/")
        browser.wait(WAITING)

        # a folder of classes becomes classes; what is no picture is named
        browser.drop("#classes .card", root / "birds")
        browser.wait("document.querySelectorAll('#classes .card').length === 3 && " + WAITING)
        assert names(browser) == ["birds-0", "birds-1", "birds-2"]
        assert [t.split(":")[0] for t in text(browser, "#classes .why")] == ["notes.txt"]
        assert browser.run("return document.querySelectorAll('#classes .thumb').length") == 10
        browser.run("document.querySelector('#classes .thumb.bad').click()")

        # a model is saved before there is anything to classify
        browser.wait(WAITING + " && !document.querySelector('#save').disabled")
        assert text(browser, "#status") == ["Give a picture to classify, or save the model."]
        browser.run("document.querySelector('#saved').value = 'nn'")
        browser.run("document.querySelector('#save').click()")
        saved = browser.downloaded("nn.safetensors")
        assert FewShotClassifier.load(saved).classes_.tolist() == ["birds-0", "birds-1", "birds-2"]

        # a folder to classify
        browser.drop("#query", root / "new")
        browser.wait("document.querySelectorAll('.answer').length === 6 && " + READY)

        # a name given twice: said where it is, and no old answers beside it
        put(browser, "#classes .card:nth-child(2) .row input", "birds-0")
        browser.wait(WAITING)
        assert text(browser, "#status") == [
            "Two classes are called birds-0: give every class a name of its own."
        ]
        assert text(browser, "#classes .why") == ["Another class is called birds-0."] * 2
        assert text(browser, ".answer") == []
        shoot(browser, tmp_path, "page-twice.png")
        put(browser, "#classes .card:nth-child(2) .row input", "owl")
        browser.wait(READY)

        # not sure, none of these
        browser.run("document.querySelector('#heads input[value=dpkl-calibrated]').click()")
        browser.run("document.querySelector('#heads input[value=centroid]').click()")
        browser.wait(READY)
        sure = text(browser, ".says")
        put(browser, "#threshold", "1", "oninput")
        assert {says.rsplit(" ", 1)[0] for says in text(browser, ".says")} == {"not sure"}
        put(browser, "#threshold", "0", "oninput")
        assert text(browser, ".says") == sure
        put(browser, "#unknown", "0.05", "oninput")
        browser.wait(READY)
        assert text(browser, ".says")[1] == "none of these centroid"
        browser.run("document.querySelector('#heads input[value=logreg]').click()")
        browser.wait(READY)
        assert text(browser, "#answers .hint") == ["logreg cannot say “none of these”; use dpkl-calibrated."]
        browser.run("document.querySelector('#heads input[value=logreg]').click()")
        browser.wait(READY)
        shoot(browser, tmp_path, "page-none-of-these.png")

        # the answers as a file
        browser.run("document.querySelector('#csv').click()")
        with browser.downloaded("answers.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["picture"] for row in rows] == [f"{i}.png" for i in (0, 0, 1, 1, 2, 2)] * 2
        assert rows[1]["label"] == "none of these"
        assert float(rows[1]["unfamiliarity"]) == 0.97
        assert sum(float(rows[0][f"p({name})"]) for name in ("birds-0", "owl", "birds-2")) == pytest.approx(1)

        # a reload brings all of it back
        before = text(browser, ".says"), names(browser)
        browser.reload()
        browser.wait(READY)
        assert (text(browser, ".says"), names(browser)) == before
        assert browser.run("return document.querySelector('#unknown').value") == "0.05"

        # a model is loaded
        choose(browser, "#load", [saved])
        browser.wait("document.querySelector('#model') && " + READY)
        assert text(browser, "#model strong") == ["nn.safetensors"]
        assert {says.split(" ")[1] for says in text(browser, ".says")} == {"nn"}
        shoot(browser, tmp_path, "page-model.png")
        browser.look(390)
        assert browser.run("return document.documentElement.scrollWidth") <= 390
        browser.reload()
        browser.wait("document.querySelector('#model') && " + READY)
        choose(browser, "#load", [root / "new" / "new-0" / "0.png"])
        browser.wait("document.querySelector('#status').className === 'bad'")
        assert text(browser, "#status")[0].startswith("0.png: ")
        assert "is not a saved classifier" in text(browser, "#status")[0]

        browser.run("document.querySelector('#again').click()")
        browser.wait(WAITING)
        assert names(browser) == ["class 1", "class 2"]
        complaints = [line for line in browser.complaints() if "status of 400" not in line]  # no pictures
        assert complaints == []


def test_a_model_is_taken_by_its_contents(serve):
    port = serve()
    status, _, content = ask(port, "POST", "/model", json.dumps(question(port, ["nn"])))
    assert status == 200
    status, _, answer = ask(port, "POST", "/load", content)
    about = json.loads(answer)
    assert (status, about["head"], about["classes"]) == (200, "nn", ["ant", "moth", "zebra"])
    asked = {"backbone": BACKBONE, "model": about["id"], "queries": question(port)["queries"]}
    status, _, answer = ask(port, "POST", "/classify", json.dumps(asked))
    said = json.loads(answer)
    assert said["classes"] == ["ant", "moth", "zebra"]
    assert np.argmax(said["heads"]["nn"]["probabilities"]) == 0
    for wrong, why in ((b"", "is not a saved classifier"), (content[:-5], "is not a saved classifier")):
        status, _, answer = ask(port, "POST", "/load", wrong)
        assert status == 400
        assert why in json.loads(answer)["error"]
    status, _, answer = ask(port, "POST", "/classify", json.dumps({**asked, "model": "0"}))
    assert json.loads(answer)["error"] == "this model is no longer known here; load it again"


def test_a_closed_connection_is_nothing_to_tell(serve, capfd):
    port = serve()
    body = picture(1, (400, 400), "PNG")
    head = (
        f"POST /picture?backbone={BACKBONE} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Origin: http://127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    for sent in (head.encode() + body, head.encode() + body[:50], head.encode(), b"GET / HTTP/1.1\r\n"):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            # closed at once and with a reset, as a browser does that leaves the page
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(sent)
    assert ask(port, "GET", "/about")[0] == 200  # and it goes on
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/")
    connection.close()
    assert ask(port, "GET", "/about")[0] == 200
    assert capfd.readouterr().err == ""
