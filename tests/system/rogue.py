"""A hub or a site that does what it should not, with a right certificate. Started in the place of `fedstill.deploy.process`.

python rogue.py HOW KIND FOLDER
"""

from __future__ import annotations

import io
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

from fedstill.core import version

EVIL = "import pathlib; pathlib.Path({marker!r}).write_text('ran')\n"


def of_another_version() -> None:
    """Be a site that was not upgraded."""
    version.__version__ = "0.0.9"


def lying_site() -> None:
    """Send in round 1 bytes that are no reply, in round 2 too many, in round 3 the reply twice, in round 4 no message."""
    from fedstill.deploy import flare
    from fedstill.transport import wire
    from fedstill.transport.messages import Order

    honest, pack = flare.attend, flare.pack
    noise: list[bytes] = []
    flare.pack = lambda header, body: noise.pop() if noise else pack(header, body)

    def attend(site_client: Any, talk: Any, stop: Any, on_known: Any) -> None:
        carried: list[Order] = []
        handle = site_client.handle

        def keep(data: bytes) -> Any:
            carried.append(wire.decode(data, Order))
            return handle(data)

        def lie(header: Any, body: bytes) -> Any:
            if header.get("do") != "reply" or carried[-1].kind != "train":
                return talk(header, body)
            round = carried[-1].round
            if round == 1:
                return talk(header, b"\xff" * 1000)
            if round == 2:
                return talk(header, body + bytes(64 << 20))
            if round == 3:
                talk(header, body)
            if round == 4:
                noise.append(b"\x00garbage")
                talk(header, b"")
            return talk(header, body)

        site_client.handle = keep
        honest(site_client, lie, stop, on_known)

    flare.attend = attend


def commanding_hub() -> None:
    """Once its folder has a file `go`, have site a take a FLARE job with code of the hub, start it, and run a shell command."""
    from nvflare.fuel.f3.cellnet.defs import CellChannel
    from nvflare.private.admin_defs import Message
    from nvflare.private.defs import RequestHeader, TrainingTopic, new_cell_message

    from fedstill.deploy import flare

    begin = flare.HubPart.handle_event

    def handle_event(self: Any, event_type: str, fl_ctx: Any) -> None:
        begin(self, event_type, fl_ctx)
        if event_type == flare.EventType.SYSTEM_START:
            cell = fl_ctx.get_prop(flare.FLContextKey.SITE_OBJ).cell
            threading.Thread(target=command, args=(cell, self.hub.folder), daemon=True).start()

    def command(cell: Any, folder: Path) -> None:
        while not (folder / "go").exists():
            time.sleep(0.05)
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as file:
            file.writestr("custom/evil.py", EVIL.format(marker=str(folder / "ran")))
            executor = {"tasks": ["train"], "executor": {"path": "evil.Evil", "args": {}}}
            file.writestr(
                "config/config_fed_client.json", flare.json.dumps({"format_version": 2, "executors": [executor]})
            )
        lines = []
        for topic, body in (
            (TrainingTopic.DEPLOY, packed.getvalue()),
            (TrainingTopic.START, ""),
            ("sys.shell", "touch ran"),
        ):
            message = Message(topic, body)
            message.set_header(RequestHeader.JOB_ID, "j1")
            message.set_header(RequestHeader.APP_NAME, "app")
            message.set_header(RequestHeader.JOB_META, {"byoc": True})
            reply = cell.send_request(
                channel=CellChannel.CLIENT_MAIN,
                topic=topic,
                target="a",
                request=new_cell_message({}, message),
                timeout=20.0,
            )
            lines.append(f"{topic}: {getattr(reply.payload, 'body', reply.headers)}")
        (folder / "told").write_text("\n".join(lines))

    flare.HubPart.handle_event = handle_event


HOW = {"version": of_another_version, "lies": lying_site, "commands": commanding_hub}

if __name__ == "__main__":
    HOW[sys.argv[1]]()
    from fedstill.deploy import process

    sys.exit(process.main(sys.argv[2:]))
