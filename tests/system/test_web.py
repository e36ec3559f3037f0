"""The hub's page in a real browser, and what its server answers to whom."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..chromium import Page, opened

if importlib.util.find_spec("nvflare") is None:
    if os.environ.get("FEDSTILL_NO_SKIP"):
        raise ImportError("the extra deploy is not installed: pip install 'fedstill[deploy]'")
    pytest.skip("the extra deploy (nvflare) is not installed", allow_module_level=True)

from fedstill.cli import main
from fedstill.core.errors import InputError
from fedstill.deploy import keeper, web
from fedstill.deploy.folders import Hub
from fedstill.deploy.page import look, page, part

SITES = ("clinic-bern", "clinic-of-a-town-with-a-rather-long-name", "hospital-7", "practice-a")
EVIL = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\u202eevil\x00"


def record(t: int) -> dict[str, Any]:
    """A round's record as a run has it; one site is slow and counts in every third round alone."""
    good = 1 - 0.6 * 0.9**t
    clients = {str(k): min(1.0, good + 0.02 * k) for k in range(4) if k != 2 or t % 3 == 0}
    return {
        "round": t,
        "participants": [int(k) for k in clients],
        "personal": good,
        "generic": good - 0.08,
        "personal_clients": clients,
        "bytes_total": 4.1e6,
        "seconds": 12.3,
    }


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub's folder as a hub at work has it, in the middle of a run."""
    made = Hub.init(tmp_path / "hub", "heart-study", "127.0.0.1", 8102)
    for name in SITES:
        (made.folder / "sites" / f"{name}.crt").write_text("")
    run = made.folder / "runs" / "first"
    (run / "run").mkdir(parents=True)
    (run / "job.json").write_text(json.dumps({"sites": list(SITES)}))
    (run / "run" / "metrics.jsonl").write_text("".join(json.dumps(record(t)) + "\n" for t in range(1, 31)) + '{"round"')
    now = time.time()
    status(made, now)
    lock = keeper.hold(made.folder)
    yield made
    os.close(lock)


def status(hub: Hub, now: float, rounds: int = 30) -> None:
    """What a hub writes every second."""
    sites = {
        name: {
            "state": state, "seen": seen, "samples": samples, "works": works, "sent": 61_500_000, "received": 61_400_000
        }
        for name, state, seen, samples, works in (
            (SITES[0], "here", now - 1, 412, False), (SITES[1], "here", now - 2, 12_930, True),
            (SITES[2], "away", now - 5000, 88, True), (SITES[3], "never seen", None, None, False),
        )
    }  # fmt: skip
    refused = [
        {"at": now - 40, "site": SITES[2], "reason": "it does not do round 12's work: battery at 5%, below 20%"},
        {"at": now - 20, "site": "d", "reason": EVIL},
    ]
    run = {"run": "first", "round": rounds, "rounds": 50, "sites": list(SITES)}
    told = {"hub": hub.name, "version": "0.1.0", "at": now, "run": run, "sites": sites, "refused": refused}
    (hub.folder / "status.json").write_text(json.dumps(told))


@pytest.fixture
def served(hub: Hub) -> Iterator[int]:
    with web.server(hub, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with opened() as made:
        yield made


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_it_is_readable_on_a_phone_and_a_screen(
    width: int, scheme: str, served: int, tab: Page, tmp_path: Path
) -> None:
    tab.open(f"http://127.0.0.1:{served}/", width, dark=scheme == "dark")
    assert tab.messages == []
    assert tab.overflow() <= 0
    assert tab.clipped() == []
    rows = tab.script("return [...document.querySelectorAll('#sites tbody tr')].map(r => r.innerText)")
    assert len(rows) == 4
    for name, row in zip(sorted(SITES), rows, strict=True):
        assert name in row
    assert "working" in rows[1]
    assert "12,930" in rows[1]
    assert "10 of 30" in rows[2]
    assert "away" in rows[2]
    points = tab.script("return [...document.querySelectorAll('polyline')].map(p => p.points.numberOfItems)")
    assert points == [30, 30]
    card, plot, *lines = tab.script(
        "return ['#run', 'svg', 'polyline.personal', 'polyline.generic'].map(s => document.querySelector(s))"
        ".map(e => e.getBoundingClientRect()).map(b => [b.left, b.top, b.right, b.bottom])"
    )
    assert plot[2] - plot[0] > 0.6 * min(width, 1100)
    assert 150 < plot[3] - plot[1] < 300
    for inner, outer in ((plot, card), *((line, plot) for line in lines)):
        assert inner[0] >= outer[0] - 2
        assert inner[1] >= outer[1] - 2
        assert inner[2] <= outer[2] + 2
        assert inner[3] <= outer[3] + 2
    contrast = tab.script(CONTRAST)
    assert contrast
    assert min(contrast.values()) >= 4.5, contrast  # WCAG AA, for text of any size
    shot = tab.screenshot(Path(os.environ.get("FEDSTILL_SHOTS", tmp_path)) / f"hub-{width}-{scheme}.png")
    assert shot.stat().st_size > 10_000


CONTRAST = """
const parse = c => c.match(/[\\d.]+/g).map(Number);
const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const light = c => { const [r, g, b] = parse(c).map(v => linear(v / 255));
  return .2126 * r + .7152 * g + .0722 * b; };
const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (parse(c).length < 4 || parse(c)[3] > 0) return c; } return 'rgb(255, 255, 255)'; };
const found = {};
for (const e of document.querySelectorAll('main *')) {
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
  const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
  found[e.tagName + '.' + e.className] = (a + .05) / (b + .05);
}
return found;
"""


def test_it_renews_itself_and_says_when_its_server_has_gone(hub: Hub, tab: Page) -> None:
    server = web.server(hub, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    tab.open(f"http://127.0.0.1:{server.server_port}/", 1440)
    assert tab.script("return document.querySelectorAll('polyline')[0].points.numberOfItems") == 30
    with (hub.folder / "runs" / "first" / "run" / "metrics.jsonl").open("a") as file:
        file.write(": 0}\n" + json.dumps(record(31)) + "\n")
    tab.wait("return document.querySelectorAll('polyline')[0].points.numberOfItems === 31")
    assert tab.messages == []
    server.shutdown()
    thread.join()
    server.server_close()
    assert "does not answer" in tab.wait(
        "const p = document.getElementById('lost'); return p.hidden ? '' : p.innerText"
    )


def test_what_sites_say_is_text(served: int, hub: Hub, tab: Page) -> None:
    tab.open(f"http://127.0.0.1:{served}/", 1440)
    assert tab.script("return document.title") == "heart-study · fedstill hub"
    assert tab.script("return document.querySelectorAll('main script, main img').length") == 0
    assert "<script>document.title" in tab.script("return document.querySelector('#refused li').innerText")
    shown = part(look(hub))
    assert "\u202e" not in shown
    assert "\x00" not in shown


# ---- the server ------------------------------------------------------------------------------------------------------
def asked(port: int, path: str, method: str = "GET", host: str = "") -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode()


def test_it_is_read_only_and_for_this_machine(served: int) -> None:
    code, headers, text = asked(served, "/")
    assert code == 200
    assert "heart-study" in text
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "http" not in text.replace("http-equiv", "")  # nothing of another place
    for path in ("/style.css", "/page.js", "/icon.svg", "/part"):
        assert asked(served, path)[0] == 200
    for path in ("/static/style.css", "/../hub.json", "/root/root.key", "/part/../../hub.json", "/?x"):
        assert asked(served, path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert asked(served, "/", method)[0] == 501
    assert asked(served, "/", host="evil.example")[0] == 403  # a name that was made to lead to this machine
    assert asked(served, "/", host=f"localhost:{served}")[0] == 200


def test_folders_that_are_new_stopped_or_damaged_are_shown(tmp_path: Path, hub: Hub) -> None:
    empty = Hub.init(tmp_path / "empty", "new", "127.0.0.1", 8102)
    shown = page(look(empty))
    assert "stopped" in shown
    assert "No site was approved yet" in shown
    assert "No run was handed in yet" in shown
    (hub.folder / "status.json").write_text("{")
    (hub.folder / "runs" / "first" / "run" / "metrics.jsonl").write_bytes(
        b'[1]\n{"personal": "x", "participants": [9, "y"]}\n\xff'
    )
    shown = page(look(hub))
    assert "No round was scored yet" in shown
    assert "no sign for" in shown
    status(hub, time.time() - 3600)
    assert "no sign for 60 min" in page(look(hub))
    (hub.folder / "runs" / "first" / "outcome.json").write_text(json.dumps({"ok": False, "why": "site b: <b>"}))
    assert "site b: &lt;b&gt;" in page(look(hub))


def test_a_port_that_is_taken_is_refused_in_one_line(served: int, hub: Hub, capsys: Any) -> None:
    with pytest.raises(InputError, match=f"--web = {served}: should be a port that is free"):
        web.server(hub, served)
    assert main(["hub", "status", "--folder", str(hub.folder), "--web", "70000"]) == 2
    assert "from 1 to 65535" in capsys.readouterr().err
