"""Adapters as the library peft writes them: `adapter_model.safetensors` and `adapter_config.json`.

peft calls an adapted model's layers `base_model.model.NAME`, their matrices `lora_A.weight` and `lora_B.weight`; it replaces an
attention by one of its own that has the first as its `base_layer`. What trains besides, as the head, is whole modules
(`modules_to_save`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..core.errors import InputError, Shown
from ..core.tree import Params
from .lora import A, B, adapters

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


def tensors_of(module: nn.Module, state: Params, moving: Sequence[str], head: Sequence[str]) -> Params:
    """Return the tensors of a state dict that belong to the adapters and to what trains besides, under peft's names."""
    layers = dict(adapters(module))
    attentions = {name for name, layer in layers.items() if isinstance(layer, nn.MultiheadAttention)}
    tensors = {}
    for name in layers:
        outer, _, leaf = name.rpartition(".")
        place = f"{outer}.base_layer.{leaf}" if outer in attentions and leaf == "out_proj" else name
        for matrix in (A, B):
            tensors[f"{PREFIX}{place}.{matrix}.weight"] = state[f"{name}.{matrix}"]
    inside = tuple(f"{name}." for name in saved(moving, head))
    tensors |= {PREFIX + name: value for name, value in state.items() if name.startswith(inside)}
    return {name: value.contiguous().clone() for name, value in tensors.items()}


def restored(base: Params, tensors: Params) -> Params:
    """Return a state dict of an adapted model from that of its base and peft's tensors: the inverse of `tensors_of`."""
    names = {}
    for name in tensors:
        place = name.removeprefix(PREFIX).removesuffix(".weight").replace(".base_layer.", ".")
        matrix = place.rpartition(".")[2] in (A, B)
        names[place if matrix else name.removeprefix(PREFIX)] = tensors[name]
    return {**base, **names}


def saved(moving: Sequence[str], head: Sequence[str]) -> list[str]:
    """Return the modules whose entries train, or move, beside the adapters: the head's, and the owners of all others."""
    others = [name for name in moving if name.rpartition(".")[2] not in (A, B)]
    of_head = {part: [name for name in others if name.startswith(f"{part}.")] for part in head}
    rest = {name.rpartition(".")[0] for name in others} - {
        name.rpartition(".")[0] for names in of_head.values() for name in names
    }
    return sorted({part for part, names in of_head.items() if names} | rest)


def config_of(module: nn.Module, moving: Sequence[str], head: Sequence[str], base: str) -> dict[str, Any]:
    """Return peft's description of the adapters; `base` names the model that they were made for."""
    layers = dict(adapters(module))
    forms = {(layer.lora_A.shape[0], layer.lora_scale, layer.lora_p) for layer in layers.values()}
    if len(forms) != 1:
        raise InputError(
            "to", Shown(type(module).__name__), "a file: peft's folder has one rank and scale for all adapters"
        )
    ((r, scale, dropout),) = forms
    inner = {f"{name}.out_proj" for name, layer in layers.items() if isinstance(layer, nn.MultiheadAttention)}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "r": r,
        "lora_alpha": scale * r,
        "lora_dropout": dropout,
        "target_modules": "|".join(re.escape(name) for name in layers if name not in inner),  # matched as a whole
        "modules_to_save": saved(moving, head) or None,
        "bias": "none",
        "fan_in_fan_out": any(layer.lora_kind == "transposed" for layer in layers.values()),
        "use_rslora": False,  # the scale is in lora_alpha
        "init_lora_weights": True,
        "inference_mode": True,
    }


def files_of(
    module: nn.Module, state: Params, moving: Sequence[str], head: Sequence[str], base: str, about: dict[str, str]
) -> dict[str, bytes]:
    """Return the contents of peft's two files; `about` is the tensors' metadata."""
    from safetensors.torch import save

    config = json.dumps(config_of(module, moving, head, base), indent=2, sort_keys=True)
    with torch.no_grad():
        tensors = tensors_of(module, state, moving, head)
    return {TENSORS: save(tensors, metadata=about), CONFIG: (config + "\n").encode()}
