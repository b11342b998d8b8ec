"""Headless Chromium for tests, controlled over pipes by its DevTools protocol.

https://chromedevtools.github.io/devtools-protocol: `--remote-debugging-pipe` reads commands from
descriptor 3 and writes answers and events to 4, each a JSON text that ends with a zero byte.
"""

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
    """One page. `errors` holds the errors of its console, `requests` the URLs that it requested."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 1000) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.profile, self.size, self.session, self.sent = profile, (width, height), "", 0
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()

    def __enter__(self) -> Self:
        assert CHROMIUM
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        plumbing = f'exec "$@" 3<&{copies[0]} 4>&{copies[1]}'
        window = f"--window-size={self.size[0]},{self.size[1]}"
        command = [CHROMIUM, *OPTIONS, window, f"--user-data-dir={self.profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", plumbing, "bash", *command], pass_fds=copies, stderr=subprocess.DEVNULL
        )
        for fd in (theirs_in, theirs_out, *copies):
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
        self.out.close()  # this ends the browser
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.thread.join(10)

    def read(self, fd: int) -> None:
        """Read answers and events until the browser ends."""
        rest = b""
        with os.fdopen(fd, "rb", buffering=0) as file:
            while part := file.read(1 << 16):
                *messages, rest = (rest + part).split(b"\0")
                for message in messages:
                    self.handle(json.loads(message))

    def handle(self, message: dict[str, Any]) -> None:
        """Queue an answer; keep errors and requests."""
        event = message.get("params", {})
        match message.get("method"):
            case None:
                self.answers.put(message)
            case "Runtime.consoleAPICalled" if event["type"] in ("error", "assert"):
                parts = (part.get("value", part.get("description")) for part in event["args"])
                self.errors.append(" ".join(map(str, parts)))
            case "Runtime.exceptionThrown":
                details = event["exceptionDetails"]
                text = details.get("exception", {}).get("description", details["text"])
                self.errors.append(text)
            case "Log.entryAdded" if event["entry"]["level"] == "error":
                self.errors.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(event["request"]["url"])

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command; returns its answer."""
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
        """Open a page and wait until it is loaded."""
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page; await a promise."""
        options = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.send("Runtime.evaluate", **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 120) -> Any:
        """Wait until an expression is truthy; returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression} is {value!r}; {self.errors}"
            time.sleep(0.1)
        return value

    def emulate(self, **features: str) -> None:
        """Set media features, such as `prefers_color_scheme="dark"`."""
        listed = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.send("Emulation.setEmulatedMedia", features=listed)
