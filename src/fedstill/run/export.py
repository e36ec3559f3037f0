"""Write a run's models to files for use elsewhere: safetensors, ONNX, and torch.export's archive.

A file is written beside its place, loaded again and asked about samples; it gets its name only where it gives the same answers
as the model in the run. What it is stands in its metadata: model, client, classes, method, and the evaluation contract.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..core import files, settings
from ..core.errors import InputError, Shown, TrainingError, first_line
from ..core.metric import measure_of
from ..core.tree import Params
from ..core.version import __version__
from ..nn import lora, peft_format
from ..nn.probe import logits_of
from .evaluate import Evaluation
from .result import Run

TOLERANCE = 1e-5  # of a probability, and of a logit relative to the largest one
SYNTHETIC = 16  # samples to compare on where the run's own are not loaded
MOST = 256
FORBIDDEN = frozenset('/\\:*?"<>|')  # in names of files, on one system or another
LONGEST = 120  # bytes of a client's name in a file's
ABOUT = "fedstill.json"  # metadata in an archive of torch.export
MISSING = "installed to write ONNX: pip install 'fedstill[export]'"
Predict: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how far its answers were from the run's."""

    path: Path
    difference: float  # the largest, of a probability or (relative to the largest) of a logit
    samples: int
    real: bool  # whether these were samples of the run's data

    def __str__(self) -> str:
        kind = "test" if self.real else "synthetic"
        size = f"{self.path.stat().st_size:,} bytes"
        apart = f"to {self.difference:.0e}" if self.difference else "to the bit"
        return f"{self.path}: {size}; loaded again: same predictions on {self.samples} {kind} samples ({apart})"


def export(run: Run, path: str | Path, client: int | str | None = None, merge: bool = False) -> Exported:
    """Write a client's own model, or without `client` the generic one, to a file whose suffix says in which format.

    With `merge`, LoRA's adapters are added into the weights that they adapt. A path without a suffix is a new folder, into which
    the adapters alone are written, as peft writes them.
    """
    path = check_path(path, run, merge)
    number = None if client is None else run.client(client)
    if number is None and "generic" not in run.method.scores:
        raise InputError("client", Shown("nothing"), f"a client: {run.method.id} trains no generic model")
    params = run.generic_model() if number is None else run.served(number)
    inputs, real = _inputs(run, number)
    with torch.no_grad():
        expected = run.task.predict(params, inputs).cpu()
    state = run.task.net.export(params)
    if not path.suffix:
        return _export_adapters(run, path, state, expected, inputs.cpu(), real, about(run, number))
    module = _merged(run, state) if merge else _module(run, state)
    write, load = FORMATS[path.suffix.lower()]
    files.make_folder(path.parent)
    part = path.with_name(f".{path.stem}{files.PART}{path.suffix}")
    try:
        write(module, inputs.cpu(), about(run, number), part)
        difference = _compare(path, load(part, module)(inputs.cpu()), expected)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    files.sync_folder(path.parent)
    return Exported(path, difference, len(inputs), real)


def _export_adapters(
    run: Run, folder: Path, state: Params, expected: Tensor, inputs: Tensor, real: bool, meta: dict[str, str]
) -> Exported:
    """Write the adapters, and what trains beside them, into a new folder, and ask the base model with these files' numbers."""
    from safetensors.torch import load

    net, head = run.task.net, run.task.head_modules()
    contents = peft_format.files_of(net.module, state, net.names, head, run.model, meta)
    again = peft_format.restored(net.export(net.initial()), load(contents[peft_format.TENSORS]))
    with torch.no_grad():
        difference = _compare(folder, _module(run, again)(inputs), expected)
    files.make_folder(folder)
    for name, content in contents.items():
        files.write(folder / name, content)
    return Exported(folder / peft_format.TENSORS, difference, len(inputs), real)


def export_all(run: Run, folder: str | Path, suffix: str = ".safetensors", merge: bool = False) -> Iterator[Exported]:
    """Write every client's own model, and the generic one where the method trains one, into a new folder."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("all", str(folder), "a folder that is new or empty")
    if "personal" in run.method.scores:
        for k in (*run.clients, *run.newcomers):
            yield export(run, folder / f"{stem(run, k)}{suffix}", k, merge)
    if "generic" in run.method.scores:
        yield export(run, folder / f"generic{suffix}", merge=merge)


def stem(run: Run, client: int) -> str:
    """Return a name for the file of a client's model: its number, and its name, with _ for what a file's name cannot have."""
    name = "" if run.outline is None or client >= len(run.outline.names) else run.outline.names[client]
    usable = "".join(c if c.isprintable() and c not in FORBIDDEN else "_" for c in name)
    usable = usable.encode()[:LONGEST].decode(errors="ignore").strip(" .")
    return f"client-{client}" + (f"-{usable}" if usable.strip("_") else "")


def about(run: Run, client: int | None) -> dict[str, str]:
    """Return what an exported model is, as texts."""
    outline = run.outline
    contract = Evaluation.by(run.training)
    who = {} if client is None else {"client": str(client)}
    if client is not None and outline is not None and outline.names:
        who["client_name"] = outline.client(client)
    scored = next((record for record in reversed(run.kept) if "personal_clients" in record), {})
    score = scored.get("personal_clients", {}).get(str(client)) if client is not None else scored.get("generic")
    data = {}
    if outline is not None:
        data = {
            "data": outline.name,
            "shape": json.dumps(list(outline.shape)),
            "objective": outline.objective,
            "classes": json.dumps([outline.label(c) for c in range(outline.classes)], ensure_ascii=False),
            "mean": json.dumps(list(outline.mean)),
            "std": json.dumps(list(outline.std)),
        }
        if outline.preparation is not None:
            data["preprocessing"] = json.dumps(outline.preparation.only(client).to_dict(), ensure_ascii=False)
    return {
        "format": "pt",
        "fedstill": __version__,
        "model": run.model,
        "kind": "generic" if client is None else "personal",
        **who,
        "method": run.method.id or type(run.method).__name__,
        "method_settings": json.dumps(settings.values_of(run.method)),
        "seed": str(run.training.seed),
        "round": str(run.task.round),
        "contract": str(contract),
        **({} if score is None else {measure_of("", scored).name: repr(float(score))}),
        **data,
    }


def check_path(path: str | Path, run: Run | None = None, merge: bool = False) -> Path:
    """Return the file to write; refuse a format that there is not, a file that is there, and adapters of a model without any."""
    path = Path(path)
    adapted = run is None or next(lora.adapters(run.task.net.module), None) is not None
    if merge and (not adapted or not path.suffix):
        raise InputError(
            "merge", True, "left out: there are no adapters to merge" if path.suffix else "used with a file"
        )
    if not path.suffix and not adapted:
        raise InputError("to", str(path), f"a file that ends in {', '.join(FORMATS)}: the model has no adapters (lora)")
    if path.suffix and path.suffix.lower() not in FORMATS:
        raise InputError("to", str(path), f"a file that ends in {', '.join(FORMATS)}")
    if path.exists():
        raise InputError("to", str(path), "a file that does not exist yet")
    if path.suffix.lower() == ".onnx":
        try:
            import onnx  # noqa: F401
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError:
            raise InputError("to", str(path), MISSING) from None
    return path


def _inputs(run: Run, client: int | None) -> tuple[Tensor, bool]:
    """Return samples to compare on: a client's tests where they are loaded, else synthetic ones."""
    net = run.task.net
    if run.has_data:
        x, _ = run.data.test.of(run.clients[0] if client is None else client)
        return x[:MOST], True
    generator = torch.Generator().manual_seed(0)
    shape = (SYNTHETIC, *net.example.shape[1:])
    if not net.example.is_floating_point():  # ids: the lowest are in every vocabulary
        return torch.randint(2, shape, generator=generator).to(net.device), False
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(net.device, net.dtype), False


def _module(run: Run, state: Params) -> nn.Module:
    """Return a module on the CPU with these weights, in evaluation mode."""
    module = copy.deepcopy(run.task.net.module).cpu()
    module.load_state_dict(state)
    return module.eval()


def _merged(run: Run, state: Params) -> nn.Module:
    """Return a module without adapters, whose weights have them, in evaluation mode."""
    module = lora.removed(run.task.net.module).cpu()
    module.load_state_dict(lora.merged(run.task.net.module, state))
    return module.eval()


def _compare(path: Path, answers: Tensor, expected: Tensor) -> float:
    """Return the largest difference, of a probability or, relative to the largest, of a logit; fail where it is too large."""
    answers, expected = answers.double(), expected.double()
    if answers.shape != expected.shape or not torch.isfinite(answers).all():
        raise TrainingError(f"{path}: the exported model gives other answers than the run's, so it was not kept")
    apart = float((answers.softmax(-1) - expected.softmax(-1)).abs().max())
    logits = float((answers - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    if max(apart, logits) > TOLERANCE:
        far = f"probabilities differ by {apart:.2g}, logits by {logits:.2g}"
        raise TrainingError(
            f"{path}: the exported model gives other answers than the run's ({far}), so it was not kept"
        )
    return max(apart, logits)


# ---- formats ---------------------------------------------------------------------------------------------------------
def _write_safetensors(module: nn.Module, x: Tensor, meta: dict[str, str], path: Path) -> None:
    from safetensors.torch import save

    state = {name: value.detach().contiguous().clone() for name, value in module.state_dict().items()}
    files.write(path, save(state, metadata=meta))


def _load_safetensors(path: Path, module: nn.Module) -> Predict:
    from safetensors.torch import load

    again = copy.deepcopy(module)
    for tensor in again.state_dict().values():
        tensor.zero_()  # so that nothing of what was written is left; buffers outside of the state are not written
    again.load_state_dict(load(path.read_bytes()))
    return _without_gradient(again)


def _write_onnx(module: nn.Module, x: Tensor, meta: dict[str, str], path: Path) -> None:
    with _followed(path, module), _quiet():
        batch = ({0: torch.export.Dim("batch")},)
        program = torch.onnx.export(
            _Logits(module), (_pair(x),), dynamo=True, dynamic_shapes=batch, input_names=["x"], output_names=["logits"],
            verbose=False,
        )  # fmt: skip
        assert program is not None
        program.model.metadata_props.update(meta)
        program.save(str(path))


def _load_onnx(path: Path, module: nn.Module) -> Predict:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def _write_pt2(module: nn.Module, x: Tensor, meta: dict[str, str], path: Path) -> None:
    with _followed(path, module), _quiet():
        program = torch.export.export(_Logits(module), (_pair(x),), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, str(path), extra_files={ABOUT: json.dumps(meta, ensure_ascii=False)})


def _load_pt2(path: Path, module: nn.Module) -> Predict:
    with _quiet():
        return _without_gradient(torch.export.load(str(path)).module())


FORMATS: dict[str, tuple[Callable[[nn.Module, Tensor, dict[str, str], Path], None], Callable[[Path, nn.Module], Predict]]] = {
    ".safetensors": (_write_safetensors, _load_safetensors),
    ".onnx": (_write_onnx, _load_onnx),
    ".pt2": (_write_pt2, _load_pt2),
}  # fmt: skip


class _Logits(nn.Module):
    """The model, with its scores as the only output: some return a mapping or a tuple."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        return logits_of(self.module(x))  # type: ignore[no-any-return]


def _pair(x: Tensor) -> Tensor:
    """Return two or more samples: of one, its number would become a part of the program."""
    return x[:2] if len(x) > 1 else torch.cat([x, x])


def _without_gradient(module: nn.Module) -> Predict:
    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = logits_of(module(x))
        return out

    return predict


@contextlib.contextmanager
def _followed(path: Path, module: nn.Module) -> Iterator[None]:
    """Within, have a model that cannot be followed refused in one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # torch.export and its passes raise whatever they stumble over
        right = f"a file that ends in .safetensors: {type(module).__name__} cannot be followed ({first_line(error)})"
        raise InputError("to", str(path), right) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within, have torch's exporters print nothing: the file is checked afterwards."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
