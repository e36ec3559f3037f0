"""What NVIDIA FLARE runs of ours: one part in the hub's server process, one in each site's client process.

FLARE carries: mutual TLS, who a site is (a challenge signed with its certificate's key, then a token bound to its name),
heartbeats, reconnection. There are no FLARE jobs: the parts are resident and talk over one channel, and a part that comes
back after a kill simply goes on talking. Both sides' settings allow no job's class and no console's command.

This module is imported by FLARE's processes only; it needs the extra `deploy`.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message
from nvflare.private.admin_defs import error_reply
from nvflare.private.defs import CellMessageHeaderKeys

from ..core import files, reading
from ..core.errors import InputError
from ..edge.monitor import SystemMonitor
from .data import SiteData
from .disclosure import told
from .folders import Hub, Site
from .keeper import REFUSED
from .polling import Unreachable, attend
from .privacy_log import secret_in
from .process import UP, Settings
from .savepoint import SaveEvery
from .service import HubService
from .site import SiteClient

CHANNEL, TOPIC = "fedstill", "talk"
SERVER = "server"  # FLARE's name of the hub's process
ANSWER = 30.0  # seconds in which the hub answers: it holds a site that asks for less
HEADER = 1 << 20  # bytes of a message's header at most


def pack(header: dict[str, Any], body: bytes) -> bytes:
    """Return a message as bytes: the header's length, the header as JSON, the body."""
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + body


def unpack(data: Any) -> tuple[dict[str, Any], bytes]:
    """Return the header and the body of a message; raises `reading.Unreadable` if it is none."""
    data = bytes(data) if isinstance(data, bytes | bytearray | memoryview) else b""
    length = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else HEADER + 1
    if length > HEADER or len(data) < 8 + length:
        raise reading.Unreadable("a message with a header")
    header = reading.parse_json(data[8 : 8 + length])
    if not isinstance(header, dict):
        raise reading.Unreadable("a message with a header")
    return header, data[8 + length :]


class HubPart(FLComponent):  # type: ignore[misc]
    """The hub's part: hands what sites say to the service, under the names that FLARE has authenticated."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.hub = Hub.at(Path(folder))
        self.service = HubService(self.hub, lambda line: print(line, flush=True))

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Begin when FLARE's server is up."""
        if event_type == EventType.SYSTEM_START:
            server = fl_ctx.get_prop(FLContextKey.SITE_OBJ)
            server.cell.register_request_cb(channel=CHANNEL, topic=TOPIC, cb=self._talk)
            self.service.open()

    def _talk(self, request: Any) -> Any:
        site = str(request.get_header(CellMessageHeaderKeys.CLIENT_NAME) or "")
        try:
            header, body = unpack(request.payload)
        except reading.Unreadable:
            self.service.hub_server.refuse(site, "it sent bytes that are no message")
            header, body = {}, b""
        answer, data = self.service.answer(site, header, body)
        return Message({MessageHeaderKey.RETURN_CODE: ReturnCode.OK}, pack(answer, data))


class SitePart(FLComponent):  # type: ignore[misc]
    """A site's part: asks the hub for orders, in a thread, and has its client carry them out."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.site = Site.at(Path(folder))
        self._begun = False

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Begin when FLARE's client is registered."""
        if event_type == EventType.SYSTEM_START and not self._begun:
            self._begun = True
            client = fl_ctx.get_prop(FLContextKey.SITE_OBJ)
            cell, agent = client.cell, client.engine.admin_agent
            agent._dispatch_request = self._refuse  # FLARE registers it again from time to time
            agent.register_cell_cb()
            threading.Thread(target=self._work, args=(cell,), name="site_client", daemon=True).start()

    def _refuse(self, request: Any) -> Any:
        """Refuse what FLARE's own server could ask of a client: jobs, with code or without, shell commands, a restart.

        FLARE checks the rights of a user that the hub names, so these are no obstacle to a hub.
        """
        what = str(getattr(request.payload, "topic", "a message"))[:40]
        why = f"refused {what!r} of the hub: a site takes fedstill's orders, no job and no code"
        print(why, flush=True)
        return Message({MessageHeaderKey.RETURN_CODE: ReturnCode.OK}, error_reply(why))

    def _work(self, cell: Any) -> None:
        try:
            settings = Settings.read(self.site.folder)
            own = SiteData.read(**settings.reading())
            policy = settings.policy()
            monitor = None if policy is None else SystemMonitor(policy)

            def log(line: str) -> None:
                print(line, flush=True)

            for line in [] if own.raw is None else told(own.raw.data):
                log(line)
            runs, device = self.site.folder / "runs", settings.device
            often = SaveEvery(settings.save_every_epochs, settings.save_every_steps)
            site_client = SiteClient(
                runs,
                own,
                device=device,
                monitor=monitor,
                log=log,
                audit=settings.audit,
                often=often,
                secret=secret_in(self.site.folder),
                max_epsilon=settings.max_epsilon,
            )

            def talk(header: Any, body: bytes) -> tuple[dict[str, Any], bytes]:
                reply = cell.send_request(
                    channel=CHANNEL,
                    topic=TOPIC,
                    target=SERVER,
                    request=Message({}, pack(dict(header), body)),
                    timeout=ANSWER,
                    optional=True,
                )
                if reply.get_header(MessageHeaderKey.RETURN_CODE) != ReturnCode.OK:
                    raise Unreachable(str(reply.get_header(MessageHeaderKey.RETURN_CODE)))
                return unpack(reply.payload)

            attend(site_client, talk, threading.Event(), lambda: files.write(self.site.folder / UP, b""))
        except InputError as error:
            print(f"fedstill: {error}", flush=True)
            os._exit(REFUSED)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
