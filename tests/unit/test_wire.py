"""Messages as bytes: what arrives may be anything, and only `MessageError` says so."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save

import fedstill as fs
from fedstill.core import tree
from fedstill.transport import local, wire
from fedstill.transport.messages import Order, Reply
from fedstill.transport.wire import MessageError, decode, encode

from ..problems import SETTINGS, WIRED, Tampered, identical, make, ragged, states

REPLY = Reply("train", 1, 2, {"params": {"w": torch.ones(3)}}, {"loss": 0.5, "steps": 4.0}, order=77)


def bytes_of(header: Any, tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    """A message with any header."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + save({"up|params|w": torch.ones(3)} if tensors is None else tensors)


HEADER = {"kind": "train", "round": 1, "client": 2, "up": {"params": {"w": None}}, "report": {"loss": 0.5}, "order": 77}
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "it has 0 bytes"),
    "a few bytes": (b"abc", "it has 3 bytes"),
    "a length beyond the end": (struct.pack("<Q", 2**63) + b"{}", "is not whole"),
    "half of it": (encode(REPLY)[:-5], "its tensors are not whole"),
    "more behind it": (encode(REPLY) + b"more", "its tensors are not whole"),
    "no JSON": (bytes_of(b"{"), "its header should be whole JSON"),
    "no text": (bytes_of(b"\xff\xfe"), "its header should be a text in UTF-8"),
    "a list": (bytes_of([1]), "its header is a list"),
    "deep": (bytes_of(b'{"up":' * 90000), "at most 32 brackets deep"),
    "no kind": (bytes_of({"round": 1, "client": 2}), "its header has no kind"),
    "another kind": (bytes_of({**HEADER, "kind": "obey"}), "its kind is the text 'obey'"),
    "a list as kind": (bytes_of({**HEADER, "kind": []}), "its kind is a list"),
    "an unknown field": (bytes_of({**HEADER, "fault": "x"}), "its header has a field 'fault'"),
    "a text as client": (bytes_of({**HEADER, "client": "2"}), "whose client is a whole number (it is the text '2')"),
    "a negative round": (bytes_of({**HEADER, "round": -1}), "whose round is at least 0"),
    "true as order": (bytes_of({**HEADER, "order": True}), "whose order is a whole number (it is true)"),
    "a huge order": (bytes_of({**HEADER, "order": 10**40}), "whole numbers fit into 64 bits"),
    "NaN": (bytes_of(b'{"kind": "train", "round": NaN}'), "JSON without NaN"),
    "a report of texts": (bytes_of({**HEADER, "report": {"samples": "5"}}), "it reports the text '5' as samples"),
    "a report of bools": (bytes_of({**HEADER, "report": {"finite": True}}), "it reports true as finite"),
    "a list as report": (bytes_of({**HEADER, "report": []}), "whose report is an object"),
    "a number as tree": (bytes_of({**HEADER, "up": 3}), "its up is 3"),
    "a number as branch": (bytes_of({**HEADER, "up": {"params": 3}}), "it has no tensor up|params"),
    "a tensor that is missing": (bytes_of({**HEADER, "up": {"params": {"v": None}}}), "it has no tensor up|params|v"),
    "a tensor without a name": (bytes_of({**HEADER, "up": {}}), "it names 0 of its 1 tensors"),
    "an ambiguous name": (bytes_of({**HEADER, "up": {"params|w": None}}), "an entry with the name 'params|w'"),
    "a pickle": (b"\x80\x04\x95" + bytes(40), "is not whole"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_that_are_no_message_give_one_error(name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(MessageError) as error:
        decode(data, Reply)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(REPLY)
    assert decode(data, Reply, most=len(data)).order == 77
    monkeypatch.setattr(wire, "parse_json", lambda text: pytest.fail("the header was read"))
    with pytest.raises(MessageError, match=rf"it has {len(data)} bytes; at most {len(data) - 1} are read"):
        decode(data, Reply, most=len(data) - 1)


def test_numbers_that_are_not_finite_travel_and_faults_do_not() -> None:
    report = {"loss": math.nan, "a": math.inf, "b": -math.inf, "c": 1e-300}
    back = decode(encode(dataclasses.replace(REPLY, report=report, fault="made up")), Reply)
    assert math.isnan(back.report["loss"])
    assert (back.report["a"], back.report["b"], back.report["c"], back.fault) == (math.inf, -math.inf, 1e-300, "")
    assert b"NaN" not in encode(dataclasses.replace(REPLY, report=report))


def trained(transport: Any, **changes: Any) -> fs.Run:
    return fs.simulate(
        fs.SCAFFOLD(), model=make("normed"), data=ragged(), transport=transport,
        **{**SETTINGS, "engine": "one", "participation": 1.0, **changes},
    )  # fmt: skip


def lost(reply: Reply) -> Reply | None:
    return None if (reply.kind, reply.round, reply.client) == ("train", 2, 3) else reply


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[: len(data) // 2], "are not whole"),
        (lambda data: data + bytes(1 << 22), "are read"),
        (lambda data: b"", "it has 0 bytes"),
    ],
    ids=["half", "long", "empty"],
)
def test_bytes_that_cannot_be_read_count_against_their_sender(
    change: Callable[[bytes], bytes], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' round is the one in which that client had not answered."""

    def spoilt(message: Order | Reply) -> bytes:
        at = isinstance(message, Reply) and (message.kind, message.round, message.client) == ("train", 2, 3)
        return change(encode(message)) if at else encode(message)

    monkeypatch.setattr(local.wire, "encode", spoilt)
    refused = trained(WIRED)
    monkeypatch.undo()
    without = trained(Tampered(lost))
    assert [set(record.get("rejected", {})) for record in refused.history] == [set(), {"3"}, set()]
    assert refused.history[1]["rejected"]["3"].startswith("it sent bytes that are no message: ")
    assert reason in refused.history[1]["rejected"]["3"]
    assert identical(states(refused), states(without))
    assert identical({"": tree.flatten(refused.server)}, {"": tree.flatten(without.server)})


def test_the_limit_of_a_reply_is_a_setting_or_what_a_right_upload_has() -> None:
    run = trained(None)
    coordinator = run._coordinator
    assert coordinator is not None
    size = sum(leaf.nbytes for name in ("params", "c") for leaf in tree.flatten(run.server[name]).values())
    assert coordinator.room("train") == (1 << 20) + 2 * size  # SCAFFOLD's uploads are as its server's state
    assert (coordinator.room("score"), coordinator.room("state")) == (1 << 20, 0)
    with pytest.raises(
        fs.TrainingError, match=r"no upload has ever had the right form; client 0: it sent bytes .* are read"
    ):
        trained(WIRED, max_upload=1e-4)
