"""Headless Chromium for tests, spoken to over pipes in its DevTools protocol.

https://chromedevtools.github.io/devtools-protocol: `--remote-debugging-pipe` reads commands from
descriptor 3 and writes answers and events to 4, each a JSON text that ends with a zero byte.
"""

import base64
import fcntl
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--mute-audio"),
    *("--remote-debugging-pipe", "--hide-scrollbars", "--force-color-profile=srgb"),
)


class Browser:
    """One page. `errors` holds what its console called one; `requests` the URLs it asked for."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 1000) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.profile, self.size, self.session, self.sent = profile, (width, height), "", 0
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()

    def __enter__(self) -> Self:
        assert CHROMIUM
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        lent = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        plumbing = f'exec "$@" 3<&{lent[0]} 4>&{lent[1]}'
        window = f"--window-size={self.size[0]},{self.size[1]}"
        command = [CHROMIUM, *OPTIONS, window, f"--user-data-dir={self.profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", plumbing, "bash", *command], pass_fds=lent, stderr=subprocess.DEVNULL
        )
        for fd in (theirs_in, theirs_out, *lent):
            os.close(fd)
        self.out = os.fdopen(ours_out, "wb", buffering=0)
        self.thread = threading.Thread(target=self.read, args=(ours_in,), daemon=True)
        self.thread.start()
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self.session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self.out.close()  # which ends it
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.thread.join(10)

    def read(self, fd: int) -> None:
        """Sort what the browser says."""
        rest = b""
        with os.fdopen(fd, "rb", buffering=0) as file:
            while part := file.read(1 << 16):
                *messages, rest = (rest + part).split(b"\0")
                for message in messages:
                    self.take(json.loads(message))

    def take(self, message: dict[str, Any]) -> None:
        """An answer, or an event that matters."""
        given = message.get("params", {})
        match message.get("method"):
            case None:
                self.answers.put(message)
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "assert"):
                parts = (part.get("value", part.get("description")) for part in given["args"])
                self.errors.append(" ".join(map(str, parts)))
            case "Runtime.exceptionThrown":
                details = given["exceptionDetails"]
                told = details.get("exception", {}).get("description", details["text"])
                self.errors.append(told)
            case "Log.entryAdded" if given["entry"]["level"] == "error":
                self.errors.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command."""
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.out.write(json.dumps(message).encode() + b"\0")
        while (answer := self.answers.get(timeout=60))["id"] != self.sent:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> None:
        """Go to a page, and wait until the document is there."""
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; of a promise, what it gives."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.send("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 120) -> Any:
        """The value of an expression as soon as it is truthy."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression} is {value!r}; {self.errors}"
            time.sleep(0.1)
        return value

    def emulate(self, **features: str) -> None:
        """Media features, as `prefers_color_scheme="dark"`."""
        listed = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.send("Emulation.setEmulatedMedia", features=listed)

    def screenshot(self, path: Path) -> None:
        """What can be seen, as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))
