"""Attention is explored in a browser: a page of a run, and a server for this machine alone."""

import http.client
import json
import re
import socket
import threading
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossattn import functional
from crossattn.viz import Explorer
from experiments import explore
from experiments.launch import Refused
from experiments.runs import parameters
from experiments.serving import HOST, PageServer
from experiments.settings import saved_config
from experiments.tasks import make_task
from tests.browser import Browser
from tests.experiments.conftest import ROOT, start
from tests.viz.test_explore import NASTY, weights_of

TEXT = "The page shows <b>words</b> & more."


@pytest.fixture(scope="module")
def opened(tiny_run):
    task = make_task(saved_config(tiny_run), tiny_run / "assets")
    return task, parameters(task, tiny_run)


@pytest.fixture(scope="module")
def reader(opened):
    return explore.texts_of(*opened)


def views_of(path):
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)[1])[
        "views"
    ]


@pytest.mark.slow
def test_a_page_has_the_attention_of_each_text(opened, tiny_run, launched, tmp_path):
    out = tmp_path / "page.html"
    code, said, _ = launched("explore", f"--workdir={tiny_run}", TEXT, "</script>", f"--out={out}")
    assert code == 0 and said.startswith(f"{out}: ")
    views = views_of(out)
    assert [view["name"] for view in views] == [TEXT, "</script>"]
    translator = opened[0].translator(opened[1])
    (written,) = translator.texts([TEXT])
    (seen,) = translator.attention([(TEXT, written)])
    assert np.abs(weights_of(views[0]) - seen.weights).max() < 1 / 500
    assert len(views[0]["tokens"]) == len(seen.target_tokens)


@pytest.mark.slow
def test_a_knocked_out_head_is_a_model_whose_kernel_has_zeros_there(opened):
    task, params = opened
    translator = task.translator(params)
    pair = (TEXT, "La page montre des mots.")
    (found,) = translator.knockouts([pair])
    (seen,) = translator.attention([pair])
    L, N = found.heads
    assert (L, N) == seen.weights.shape[:2]
    flat = functional.flatten(params)
    changed = []
    for layer in range(L):
        for head in range(N):
            name = f"decoder.stack.layers.{layer}.cross.out.kernel"
            zeroed = jax.tree.map(np.array, functional.nest(flat))
            functional.flatten(zeroed)[name][head] = 0
            (alone,) = task.translator(zeroed).knockouts([pair])
            own = found.probabilities[1 + layer * N + head]
            np.testing.assert_allclose(alone.probabilities[0], own, rtol=1e-5)
            assert alone.likeliest[0] == found.likeliest[1 + layer * N + head]
            changed.append(np.abs(own - found.probabilities[0]).max())
    assert min(changed) > 0
    (item,) = translator._batches([{"id": "0", "source": pair[0], "target": pair[1]}])
    batch, model = jax.tree.map(jnp.asarray, item.batch), task.bind(params)
    hidden, _ = task.read_source(model, batch, None, return_weights=True)
    logits = np.asarray(model.logits(hidden), np.float64)[0]
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    T = found.probabilities.shape[1]
    own = p[np.arange(len(p)), item.batch["target_out"][0]][:T]
    np.testing.assert_allclose(found.probabilities[0], own, rtol=1e-4)


@contextmanager
def serving(answer, longest=100, page="<p>page"):
    with PageServer(page, answer, 0, longest) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=20)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_the_page_is_served_and_questions_are_answered():
    with serving(lambda body, name: {"said": body.decode(), "name": name}) as server:
        assert server.server_address[0] == "127.0.0.1"
        status, page, headers = asked(server, "GET", "/")
        assert (status, page) == (200, "<p>page")
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert headers["X-Content-Type-Options"] == "nosniff"
        status, said, _ = asked(
            server, "POST", "/read", "é</script>".encode(), **{"X-Name": "a%20b.png"}
        )
        assert status == 200 and "<" not in said
        assert json.loads(said) == {"said": "é</script>", "name": "a b.png"}
        own = f"localhost:{server.server_port}"
        assert asked(server, "GET", "/", Host=own)[0] == 200
        assert asked(server, "POST", "/read", "x", Host=own, Origin=f"http://{own}")[0] == 200


def test_a_page_at_port_80_is_asked_for_without_its_port():
    with serving(lambda body, name: body.decode()) as server:
        port, server.server_port = server.server_port, 80
        for host in (HOST, "localhost", f"{HOST}:80"):
            connection = http.client.HTTPConnection(HOST, port, timeout=20)
            given = dict(Host=host, Origin=f"http://{host}")
            connection.request("POST", "/read", "x", given)
            assert connection.getresponse().status == 200
            connection.close()


def test_what_is_not_a_question_of_this_page_is_refused():
    def never(*_):
        raise AssertionError("asked")

    with serving(never) as server:
        for headers in (
            dict(Host="evil.example"),
            dict(Host=f"evil.example:{server.server_port}"),
            dict(Host=HOST),
            dict(Origin="https://evil.example"),
            dict(Origin="null"),
        ):
            for method, path in (("GET", "/"), ("POST", "/read")):
                status, said, _ = asked(server, method, path, **headers)
                assert status == 403 and server.address in json.loads(said)["error"]
        assert asked(server, "GET", "/etc/passwd")[0] == 404
        assert asked(server, "POST", "/", "x")[0] == 404
        assert asked(server, "PUT", "/read", "x")[0] == 501
        status, said, _ = asked(server, "POST", "/read", "x" * 101)
        assert (status, "expected at most 100" in said) == (413, True)
        for length in ("9" * 30, "-1", "1e9", "²"):
            with socket.create_connection((HOST, server.server_port), timeout=20) as raw:
                host = f"Host: {server.hosts[0]}\r\n"
                raw.sendall(
                    f"POST /read HTTP/1.0\r\n{host}Content-Length: {length}\r\n\r\n".encode(
                        "latin1", "replace"
                    )
                )
                assert raw.recv(12).split()[1] in (b"411", b"413")
        assert asked(server, "GET", "/")[0] == 200  # it still serves


def test_a_connection_that_says_nothing_keeps_nobody_waiting():
    with serving(lambda body, name: {}) as server:
        with socket.create_connection((HOST, server.server_port), timeout=20):
            assert asked(server, "GET", "/")[0] == 200


def test_a_port_that_is_taken_is_one_line(tiny_run, refused):
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(Refused, match=f"port {port} of 127.0.0.1 is taken; name another"):
            PageServer("", lambda *_: {}, port, 1)
        said = refused("explore", f"--workdir={tiny_run}", "--serve", f"--port={port}")
        assert f"port {port} of 127.0.0.1 is taken" in said


@pytest.mark.slow
def test_questions_to_a_run_are_read_or_refused_in_a_line(reader):
    with serving(reader.answer, 8000) as server:
        status, said, _ = asked(server, "POST", "/read", TEXT.encode())
        (view,) = json.loads(said)["views"]
        assert status == 200 and view["name"] == TEXT and view["knockouts"]["loss"]
        for body in ("", "   ", "x" * 2001):
            status, said, _ = asked(server, "POST", "/read", body.encode())
            assert status == 400 and "expected 1 to 2000" in json.loads(said)["error"]
        status, said, _ = asked(server, "POST", "/read", b"word " * 390)
        assert status == 400 and "the text is longer than the" in json.loads(said)["error"]
        for body in (
            b"\xff\xfe\x00",
            *(text.encode("utf-8", "replace") for text in NASTY if text.strip()),
        ):
            status, said, _ = asked(server, "POST", "/read", body)
            assert status in (200, 400) and set(json.loads(said)) <= {"views", "error"}


def test_a_person_types_into_the_page_and_sees_what_was_read(reader, tmp_path):
    browser = Browser(tmp_path)
    try:
        with serving(reader.answer, 8000, Explorer((), "a run", reader.ask).html) as server:
            browser.open(server.address)
            layers, heads = reader.read(TEXT).views[0]["shape"][:2]
            assert not browser.js("stage.offsetParent")
            browser.click("#given")
            browser.type(TEXT)
            browser.click("#send")
            browser.wait("page.views.length === 1 && !send.disabled", 200)
            assert browser.js("document.querySelectorAll('#heads canvas').length") == layers * heads
            browser.hover('#memory [data-at="0"]')
            assert "is read by" in browser.text("#said")
            assert browser.js("document.querySelectorAll('b').length") > 0
            browser.js("given.value = ' '; ask.requestSubmit()")
            browser.wait("!send.disabled && said.innerText.includes('expected 1 to 2000')")
        browser.js("given.value = 'more'; ask.requestSubmit()")
        browser.wait("said.innerText.includes('does not answer')")
    finally:
        browser.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "got nothing to read; give texts, pictures or sounds, or --serve"),
        (["word", "--out=page.png"], "expected a name that ends in .html"),
        (["word", "--out=no/such/page.html"], "no/such/page.html cannot be written"),
    ],
)
def test_what_cannot_be_explored_is_one_line(given, said, tiny_run, refused):
    assert said in refused("explore", f"--workdir={tiny_run}", *given)


@pytest.mark.slow
def test_a_model_without_cross_attention_has_nothing_to_explore(refused, tmp_path, capsys):
    config = f"--config={ROOT}/configs/rnn_translation.py:none,tiny"
    assert start("train", config, f"--workdir={tmp_path}", "--config.train.steps=2") == 0
    said = refused("explore", f"--workdir={tmp_path}", "word", f"--out={tmp_path}/page.html")
    assert "has no cross-attention" in said
