"""Models of Hugging Face's transformers, from a configuration: `hf:bert-tiny`, `hf:bert`, `hf:FOLDER` or `hf:FILE.json`.

A name that comes with fedstill or a type that transformers knows (its default configuration) starts from random weights; so does
a configuration in a file. A folder with model.safetensors starts from these; pickles are not read, no code that lies in a folder
is run, and nothing is downloaded. Samples of whole numbers are ids of tokens, of one length; images go to models of images.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import InputError, first_line
from ..core.reading import Unreadable, read_json
from .beside_torchvision import import_torchvision

MISSING = "installed to take models of transformers: pip install 'fedstill[hf]'"
CONFIGS: dict[str, dict[str, Any]] = {
    "bert-tiny": {
        "model_type": "bert", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512,
    },
}  # fmt: skip
PAD = "pad"  # the argument that names the id of padding, to which nothing then attends


class Unpadded:
    """A hook that gives a model of tokens the mask of those that are no padding.

    A model that looks both ways gets the mask that its scores are added to: from a plainer one transformers would make it by a
    branch on its values.
    """

    def __init__(self, pad: int, both_ways: bool) -> None:
        self.pad, self.both_ways = pad, both_ways

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        """Add the mask to the arguments of forward."""
        real = args[0] != self.pad
        if not self.both_ways:
            return args, {**kwargs, "attention_mask": real.long()}
        dtype = next(module.parameters()).dtype
        added = torch.zeros_like(real, dtype=dtype).masked_fill(~real, torch.finfo(dtype).min)
        return args, {**kwargs, "attention_mask": added[:, None, None]}


def place(source: str) -> str:
    """Return a folder or file by its whole path, and any other source as it is."""
    path = Path(source).expanduser()
    return source if source in CONFIGS or not path.exists() else str(path.absolute())


def build(source: str, shape: Sequence[int], classes: int, arguments: Mapping[str, Any]) -> nn.Module:
    """Build a classifier of sequences or of images; `arguments` are fields of the configuration, or `pad`."""
    full, fields = f"hf:{source}", dict(arguments)
    transformers = _transformers(full)
    pad = fields.pop(PAD, None)
    if pad is not None and (isinstance(pad, bool) or not isinstance(pad, int)):
        raise InputError("model_args", f"{PAD}={pad}", "the id of the token that fills short sequences")
    try:
        config = _config(transformers, source)
        unknown = [name for name in fields if name.startswith("_") or not hasattr(config, name)]
        if unknown:
            raise InputError("model_args", unknown[0], f"a field of {type(config).__name__}, or {PAD}")
        images = len(shape) == 3
        fitted = {"num_channels": shape[0], "image_size": shape[-1]} if images else {}
        for name, value in {**{n: v for n, v in fitted.items() if hasattr(config, n)}, **fields}.items():
            setattr(config, name, value)
        config.num_labels = classes
        if pad is not None and hasattr(config, "pad_token_id"):
            config.pad_token_id = pad
        _check(full, transformers, config, shape)
        auto = (
            transformers.AutoModelForImageClassification if images else transformers.AutoModelForSequenceClassification
        )
        folder = Path(source).expanduser()
        if folder.is_dir() and (folder / "model.safetensors").exists():
            model = _pretrained(full, auto, folder, config)
        else:
            model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32)
    except InputError:
        raise
    except Exception as error:
        right = f"one that transformers can make ({type(error).__name__}: {first_line(error)})"
        raise InputError("model", full, right) from error
    if pad is not None:
        both_ways = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
        model.register_forward_pre_hook(Unpadded(pad, both_ways), with_kwargs=True)
    made: nn.Module = model
    return made


def _transformers(model: str) -> ModuleType:
    try:
        with contextlib.suppress(ImportError):
            import_torchvision()
        return importlib.import_module("transformers")
    except ImportError:
        raise InputError("model", model, MISSING) from None


def _config(transformers: ModuleType, source: str) -> Any:
    """Return the configuration that a source names."""
    path = Path(source).expanduser()
    if source in CONFIGS:
        fields = CONFIGS[source]
    elif path.is_dir() or path.is_file():
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise InputError("model", f"hf:{source}", "a folder that holds config.json")
        if path.is_dir() and not (path / "model.safetensors").exists() and any(path.glob("*.bin")):
            right = "a folder whose weights are in model.safetensors: a .bin is a pickle, which would run what it holds"
            raise InputError("model", f"hf:{source}", right)
        try:
            fields = read_json(file)
        except Unreadable as error:
            raise InputError("model", f"hf:{source}", f"a config.json that is {error}") from None
    elif source in transformers.CONFIG_MAPPING:
        fields = {"model_type": source}
    else:
        right = f"{', '.join(CONFIGS)}, a type that transformers knows (bert, distilbert, vit, …), or a folder with config.json"
        raise InputError("model", f"hf:{source}", right)
    if not isinstance(fields, dict) or fields.get("model_type") not in transformers.CONFIG_MAPPING:
        raise InputError("model", f"hf:{source}", "a configuration with a model_type that transformers knows")
    own = {name: value for name, value in fields.items() if name not in ("model_type", "auto_map")}
    return transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(own)


def _check(full: str, transformers: ModuleType, config: Any, shape: Sequence[int]) -> None:
    """Refuse samples that the model does not take."""
    images = len(shape) == 3
    kind = "IMAGE" if images else "SEQUENCE"
    if len(shape) not in (1, 3) or type(config) not in getattr(
        transformers, f"MODEL_FOR_{kind}_CLASSIFICATION_MAPPING"
    ):
        what = "×".join(map(str, shape))
        right = f"a model that classifies samples of shape {what}: sequences of ids have one axis, images three"
        raise InputError("model", full, right)
    longest = getattr(config, "max_position_embeddings", None)
    if not images and isinstance(longest, int) and 0 < longest < shape[0]:
        right = f"sequences of at most {longest}, as max_position_embeddings says"
        raise InputError("data", f"sequences of {shape[0]} tokens", right)


def _pretrained(full: str, auto: Any, folder: Path, config: Any) -> nn.Module:
    """Load a folder's weights; a head that is not in them or has another size starts anew, and a line says so."""
    logging = importlib.import_module("transformers.utils.logging")
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, about = auto.from_pretrained(
            str(folder), config=config, local_files_only=True, use_safetensors=True, ignore_mismatched_sizes=True,
            output_loading_info=True, attn_implementation="eager", dtype=torch.float32,
        )  # fmt: skip
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
    anew = sorted({*about["missing_keys"], *(entry[0] for entry in about["mismatched_keys"])})
    body = [name for name in anew if name.startswith(f"{model.base_model_prefix}.") and ".pooler." not in name]
    if body:
        right = f"a folder whose model.safetensors has {', '.join(body[:5])} as the model has"
        raise InputError("model", full, right)
    if anew:
        print(f"fedstill: {folder}: {', '.join(anew)} start anew", file=sys.stderr, flush=True)
    loaded: nn.Module = model
    return loaded
