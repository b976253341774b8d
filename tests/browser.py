"""Headless Chromium for tests of pages, by its DevTools protocol over a pipe.

The browser is the command in CHROMIUM, or chromium, chromium-browser or google-chrome on the path.
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time

import pytest

NAMES = (os.environ.get("CHROMIUM", "chromium"), "chromium-browser", "google-chrome")
# The protocol reads from file 3 and writes to file 4.
_AS_3_AND_4 = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(reads, 3), os.dup2(writes, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def found():
    """The browser's command; skips the test where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("there is no Chromium here: apt-get install chromium, or set CHROMIUM")
    return path


class Browser:
    """A page in Chromium, that a test points at, clicks and types into."""

    def __init__(self, profile):
        reads, to_browser = os.pipe()
        from_browser, writes = os.pipe()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--mute-audio",
        ]
        options += ["--autoplay-policy=no-user-gesture-required", f"--user-data-dir={profile}"]
        command = [sys.executable, "-c", _AS_3_AND_4, str(reads), str(writes), found(), *options]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(command, pass_fds=(reads, writes), **quiet)
        os.close(reads), os.close(writes)
        self.sends = os.fdopen(to_browser, "wb", buffering=0)
        self.answers = os.fdopen(from_browser, "rb", buffering=0)
        self.numbers, self.session, self.rest, self.events = itertools.count(1), None, b"", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        self.sends.close(), self.answers.close()
        self.process.kill()
        self.process.wait()

    def call(self, method, **params):
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        self.sends.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _next(self):
        while b"\0" not in self.rest:
            read = self.answers.read(2**16)
            assert read, "the browser has ended"
            self.rest += read
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, address, width=1100, height=900, dark=False):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def js(self, code):
        """The value of an expression in the page."""
        options = dict(expression=code, returnByValue=True, awaitPromise=True, userGesture=True)
        found = self.call("Runtime.evaluate", **options)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, code, seconds=20):
        end = time.monotonic() + seconds
        while not self.js(code):
            assert time.monotonic() < end, f"never true: {code}"
            time.sleep(0.02)

    def _mouse(self, kind, selector, across=0.5, down=0.5, **options):
        box = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            "return [b.left, b.top, b.width, b.height]; })()"
        )
        x, y = box[0] + across * box[2], box[1] + down * box[3]
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def hover(self, selector, *place):
        self._mouse("mouseMoved", selector, *place)

    def leave(self):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)

    def click(self, selector, *place):
        self.hover(selector, *place)
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, selector, *place, button="left", clickCount=1)

    @contextlib.contextmanager
    def frame(self):
        """Inside, the page is that of its first frame, which is a target of its own."""
        options = dict(autoAttach=True, waitForDebuggerOnStart=False, flatten=True)
        outer = self.session
        self.call("Target.setAutoAttach", **options)
        attached = [e for e in self.events if e.get("method") == "Target.attachedToTarget"]
        self.session = attached[-1]["params"]["sessionId"]
        yield
        self.session = outer
        self.call("Target.setAutoAttach", **options | dict(autoAttach=False))

    def key(self, name):
        code = {"Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}[name]
        for kind in ("keyDown", "keyUp"):
            options = dict(key=name, code=name, windowsVirtualKeyCode=code)
            self.call("Input.dispatchKeyEvent", type=kind, **options)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def text(self, selector):
        return self.js(f"document.querySelector({json.dumps(selector)}).innerText")

    def screenshot(self, path, whole=True):
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self):
        """Exceptions, errors in the console, and addresses that the page asked of a network."""
        self.js("0")
        bad = [e for e in self.events if e.get("method") == "Runtime.exceptionThrown"]
        logged = [e["params"]["entry"] for e in self.events if e.get("method") == "Log.entryAdded"]
        sent = [e["params"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        asked = [each["request"]["url"] for each in sent]
        local = ("file:", "data:", "blob:", "about:", "http://127.0.0.1")
        return bad + [e for e in logged if e["level"] == "error"] + [
            url for url in asked if not url.startswith(local)
        ]  # fmt: skip
