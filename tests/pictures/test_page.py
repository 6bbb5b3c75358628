"""The local page: what it answers, whom it refuses, and how it looks in a real browser."""

from __future__ import annotations

import http.client
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from fewshot_dpkl import FewShotClassifier
from fewshot_dpkl.backbones import build
from fewshot_dpkl.backbones.files import save_tensors
from fewshot_dpkl.pictures.page import Limits, Session, make_server
from tests.browser import chromium
from tests.conftest import assert_refused
from tests.picture_files import make_folder, odd_pictures, picture

pytestmark = pytest.mark.usefixtures("registered_backbones")
BACKBONE = "conv4-mini-imagenet"


@pytest.fixture
def serve(registered_backbones):
    """Start servers of the page; they end with the test."""
    servers = []

    def start(limits: Limits | None = None, backbones=(BACKBONE,)) -> int:
        server = make_server(Session(backbones, limits))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server.server_address[1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(
    port: int, method: str, path: str, body: bytes | str | None = None, **headers: str
) -> tuple[int, dict, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path, body, {"Origin": f"http://127.0.0.1:{port}", **headers})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, dict(response.getheaders()), content


def add(port: int, content: bytes) -> str:
    status, _, answer = ask(port, "POST", f"/picture?backbone={BACKBONE}", content)
    assert status == 200, answer
    return json.loads(answer)["id"]


def question(port: int, heads=("centroid", "blr")) -> dict:
    examples = {
        name: [add(port, picture(seed, (24, 24), "PNG", colour)) for seed in (10 * colour, 10 * colour + 1)]
        for name, colour in (("zebra", 0), ("ant", 1), ("moth", 2))
    }
    return {
        "backbone": BACKBONE,
        "heads": list(heads),
        "classes": [{"name": name, "pictures": ids} for name, ids in examples.items()],
        "queries": [add(port, picture(77, (24, 24), "PNG", 1))],
    }


def test_the_page_answers_as_the_classifier_does(serve, tmp_path):
    port = serve()
    status, _, content = ask(port, "POST", "/classify", json.dumps(question(port)))
    assert status == 200
    answer = json.loads(content)
    assert answer["classes"] == ["zebra", "ant", "moth"]
    files = [picture(10 * colour + i, (24, 24), "PNG", colour) for colour in range(3) for i in (0, 1)]
    classifier = FewShotClassifier(BACKBONE, "blr").fit(files, ["zebra"] * 2 + ["ant"] * 2 + ["moth"] * 2)
    expected = classifier.predict_proba([picture(77, (24, 24), "PNG", 1)])[0]
    said = answer["heads"]["blr"]
    by_name = dict(zip(answer["classes"], said["probabilities"][0], strict=True))
    assert [by_name[name] for name in classifier.classes_] == pytest.approx(expected.tolist(), abs=1e-9)
    assert said["entropy"][0] == pytest.approx(-(expected * np.log(expected)).sum() / np.log(3))
    assert said["particles"] == 10
    assert min(said["spread"][0]) > 0
    assert answer["heads"]["centroid"]["spread"] == [[0, 0, 0]]
    status, _, content = ask(port, "POST", "/model", json.dumps(question(port, ["blr"])))
    (tmp_path / "m.safetensors").write_bytes(content)
    loaded = FewShotClassifier.load(tmp_path / "m.safetensors")
    assert loaded.predict_proba([picture(77, (24, 24), "PNG", 1)])[0] == pytest.approx(expected)


def test_heads_learn_from_the_pictures_to_classify_when_asked_to(serve):
    port = serve()
    asked = question(port, ("centroid", "nn"))
    asked["queries"].append(add(port, picture(78, (24, 24), "PNG", 2)))
    plain, taught = (
        json.loads(ask(port, "POST", "/classify", json.dumps({**asked, "transductive": tick}))[2])["heads"]
        for tick in (False, True)
    )
    files = [picture(10 * colour + i, (24, 24), "PNG", colour) for colour in range(3) for i in (0, 1)]
    queries = [picture(77, (24, 24), "PNG", 1), picture(78, (24, 24), "PNG", 2)]
    labels = ["zebra"] * 2 + ["ant"] * 2 + ["moth"] * 2
    classifier = FewShotClassifier(BACKBONE, "centroid").fit(files, labels, unlabeled=queries)
    expected = classifier.predict_proba(queries)[:, [2, 0, 1]]
    assert np.array(taught["centroid"]["probabilities"]) == pytest.approx(expected, abs=1e-6)
    assert taught["centroid"] != plain["centroid"]
    assert taught["nn"] == plain["nn"]


def test_it_answers_to_this_machine_and_its_own_page_alone(serve):
    port = serve()
    assert ask(port, "GET", "/")[0] == 200
    assert ask(port, "GET", "/", Host=f"localhost:{port}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1"):  # DNS rebinding
        assert ask(port, "GET", "/", Host=host)[0] == 403
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{port + 1}"):  # a form of another site
        assert ask(port, "POST", "/classify", "{}", Origin=origin)[0] == 403
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/classify", "{}")
    assert connection.getresponse().status == 403
    connection.close()
    _, headers, page = ask(port, "GET", "/")
    nonce = headers["Content-Security-Policy"].split("'nonce-")[1].split("'")[0]
    assert page.decode().count(f'nonce="{nonce}"') == 2
    assert b"http://" not in page
    assert b"https://" not in page
    assert ask(port, "GET", "/../session.py")[0] == 404


def test_uploads_are_limited_and_only_pictures_are_taken(serve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    port = serve(Limits(picture_bytes=3000, pictures=8, classes=3))
    _, refused = odd_pictures()
    for name, (content, why) in refused.items():
        if len(content) < 3000:
            status, _, answer = ask(port, "POST", f"/picture?backbone={BACKBONE}", content)
            assert status == 400, name
            assert why in json.loads(answer)["error"]
    status, _, answer = ask(port, "POST", f"/picture?backbone={BACKBONE}", b"x" * 9000)
    assert (status, json.loads(answer)["error"]) == (413, "0.0 MB are too many, at most 0 are taken")
    assert ask(port, "POST", "/picture?backbone=/etc/passwd", picture(0, (9, 9)))[0] == 400
    assert (
        ask(port, "POST", f"/picture?backbone={BACKBONE}", None, **{"Transfer-Encoding": "chunked"})[0] == 411
    )
    asked = question(port)
    for wrong, why in [
        ({"queries": asked["queries"] * 3}, "at most 3 classes and 8 pictures"),
        ({"classes": [*asked["classes"], {"name": "x", "pictures": ["y"]}]}, "at most 3 classes"),
        ({"classes": asked["classes"][:1]}, "at least two classes"),
        ({"classes": [{**each, "name": "same"} for each in asked["classes"]]}, "a name of its own"),
        ({"heads": ["svm"]}, "not known"),
        ({"heads": 7}, "not understood"),
        ({"classes": None}, "not understood"),
    ]:
        status, _, answer = ask(port, "POST", "/classify", json.dumps({**asked, **wrong}))
        assert status == 400
        assert why in json.loads(answer)["error"]
    for path in ("/classify", "/model"):
        for body in ("[]", "3", "no json", "[" * 100_000):
            assert ask(port, "POST", path, body)[0] == 400
    assert list(tmp_path.iterdir()) == []


def test_what_was_forgotten_is_asked_for_again(serve):
    port = serve(Limits(kept=3))
    asked = question(port)
    status, _, content = ask(port, "POST", "/classify", json.dumps(asked))
    assert status == 200
    ids = [key for each in asked["classes"] for key in each["pictures"]]
    assert json.loads(content) == {"missing": ids[:4]}


def test_a_taken_port_is_refused_in_a_sentence(serve, run_script):
    assert_refused(run_script("demo_app.py", "--port", serve()), "choose another --port")
    assert_refused(run_script("demo_app.py", "--port", "70000"), "--port is 70000")
    assert_refused(run_script("demo_app.py", "--backbone", "nowhere"), "no backbone 'nowhere'")


def choose(browser, css: str, paths: list[Path]) -> None:
    browser.type(css, "\n".join(map(str, paths)))


def drop(browser, css: str, path: Path) -> None:
    """As if the file were dragged from the desktop."""
    browser.run(
        "const files = new DataTransfer();"
        "files.items.add(new File([new Uint8Array(arguments[1])], arguments[2]));"
        "const drop = new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true});"
        "document.querySelector(arguments[0]).dispatchEvent(drop)",
        css,
        list(path.read_bytes()),
        path.name,
    )


def test_in_a_browser_pictures_become_bars(serve, tmp_path):
    """Screenshots go to $FEWSHOT_DPKL_SCREENSHOTS, to be looked at, else to a folder of the test."""
    shots = Path(os.environ.get("FEWSHOT_DPKL_SCREENSHOTS") or tmp_path / "shots")
    shots.mkdir(parents=True, exist_ok=True)
    root = make_folder(tmp_path / "pictures", {"birds": 3}, per_class=5, size=60)
    other = tmp_path / "other.safetensors"
    save_tensors(
        other, build("conv4").state_dict(), {"backbone": "conv4", "preprocessing": {"resize": 84, "crop": 84}}
    )
    port = serve(backbones=(BACKBONE, str(other)))
    with chromium(tmp_path / "profile") as browser:
        browser.look(1200)
        browser.open(f"http://127.0.0.1:{port}/")
        browser.wait("document.body.dataset.state === 'waiting'")
        browser.run("document.getElementById('add').click()")
        for number in range(3):
            pictures = sorted((root / "birds" / f"birds-{number}").iterdir())[:4]
            choose(browser, f"#classes .card:nth-child({number + 1}) input[type=file]", pictures)
        broken = tmp_path / "broken.jpg"
        broken.write_bytes(b"no picture")
        queries = [root / "birds" / f"birds-{number}" / "4.png" for number in range(3)]
        choose(browser, "#query input[type=file]", [*queries, broken])
        browser.wait("document.body.dataset.state === 'ready'")
        assert browser.run("return document.querySelector('#query .why').textContent").startswith(
            "broken.jpg: no pic"
        )
        says = browser.run("return [...document.querySelectorAll('.says')].map(e => e.textContent)")
        assert says == [
            f"class {number} {head}" for number in (1, 2, 3) for head in ("nn", "dpkl-calibrated")
        ]
        wide = browser.run(
            "return [...document.querySelectorAll('.answer .heads > div')].map(head => "
            "[...head.querySelectorAll('.fill')].reduce((sum, e) => sum + parseFloat(e.style.width), 0))"
        )
        assert wide == pytest.approx([100] * 6, abs=0.3)
        assert browser.run("return document.querySelectorAll('.whisker').length") == 9  # of DPKL's bars alone
        browser.screenshot(shots / "demo-desktop.png")

        browser.run("document.querySelector('#heads input[value=centroid]').click()")
        browser.run("document.querySelector('#heads input[value=dpkl-calibrated]').click()")
        browser.wait("document.body.dataset.state === 'ready'")
        heads = browser.run("return [...document.querySelectorAll('.says span')].map(e => e.textContent)")
        assert heads == ["nn", "centroid"] * 3
        browser.run("document.querySelector('#heads input[value=dpkl-calibrated]').click()")
        browser.wait("document.body.dataset.state === 'ready'")
        for width, dark in ((390, False), (390, True), (1200, True)):
            browser.look(width, dark=dark)
            assert browser.run("return document.documentElement.scrollWidth") <= width
            browser.screenshot(shots / f"demo-{width}{'-dark' if dark else ''}.png")
        seen = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert seen == "rgb(20, 24, 30)"
        browser.run("document.querySelector('#query .thumb.bad').click()")
        browser.wait("document.body.dataset.state === 'ready' && !document.querySelector('#query .bad')")
        drop(browser, "#query", queries[0])
        browser.wait(
            "document.body.dataset.state === 'ready' && document.querySelectorAll('.answer').length === 4"
        )
        before = browser.run("return document.querySelector('.bar').textContent")
        browser.run("const s = document.querySelector('#backbone'); s.selectedIndex = 1; s.onchange()")
        browser.wait("document.body.dataset.state === 'ready'")
        assert browser.run("return document.querySelector('.bar').textContent") != before
        browser.run("document.querySelector('#saved').value = 'dpkl-calibrated'")
        browser.run("document.querySelector('#save').click()")
        browser.wait(
            "document.querySelector('#status').textContent.startsWith('Saved dpkl-calibrated.safetensors')"
        )
        complaints = [line for line in browser.complaints() if "status of 400" not in line]  # broken.jpg
        assert complaints == []
