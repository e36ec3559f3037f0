"""What `import fedstill as fs` offers by name. `fedstill` imports this when a name is first asked for, since it takes seconds."""

from __future__ import annotations

from . import methods as _methods
from .core import terms, tree
from .core.batch import Batch
from .core.errors import InputError, TrainingError
from .core.method import Method, Phase, Upload
from .core.settings import setting
from .core.task import Task
from .core.tree import Params, Tree
from .data import Federation
from .methods.apfl import APFL
from .methods.cd2_pfed import CD2PFed
from .methods.ditto import Ditto
from .methods.fedavg import FedAvg
from .methods.fedavgm import FedAvgM
from .methods.fedbabu import FedBABU
from .methods.fedbn import FedBN
from .methods.fedbsd import FedBSD
from .methods.feddyn import FedDyn
from .methods.fedfomo import FedFomo
from .methods.fedgen import FedGen
from .methods.fedgkd import FedGKD
from .methods.fedpac import FedPAC
from .methods.fedper import FedPer
from .methods.fedprox import FedProx
from .methods.fedrep import FedRep
from .methods.fedrod import FedRoD
from .methods.fedsa_lora import FedSALoRA
from .methods.ffa_lora import FFALoRA
from .methods.l2gd import L2GD
from .methods.lg_fedavg import LGFedAvg
from .methods.local import Local
from .methods.per_fedavg import PerFedAvg
from .methods.pfedkd_wcl import PFedKDWCL
from .methods.pfedme import PFedMe
from .methods.pfedsd import PFedSD
from .methods.scaffold import SCAFFOLD
from .methods.spectral import SpectralCoDistillation
from .nn.lora import with_lora
from .report import text as _text  # noqa: F401 - `Run.table` prints with it
from .report.progress import Progress
from .run.evaluate import Evaluation
from .run.experiment import Experiment, Training
from .run.export import export
from .run.load import load
from .run.predict import predict
from .run.result import Run
from .run.simulation import resume, run, simulate
from .run.together import run_together

METHODS = _methods.METHODS

__all__ = [
    "APFL",
    "L2GD",
    "METHODS",
    "SCAFFOLD",
    "Batch",
    "CD2PFed",
    "Ditto",
    "Evaluation",
    "Experiment",
    "FFALoRA",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedBSD",
    "FedDyn",
    "FedFomo",
    "FedGKD",
    "FedGen",
    "FedPAC",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSALoRA",
    "Federation",
    "InputError",
    "LGFedAvg",
    "Local",
    "Method",
    "PFedKDWCL",
    "PFedMe",
    "PFedSD",
    "Params",
    "PerFedAvg",
    "Phase",
    "Progress",
    "Run",
    "SpectralCoDistillation",
    "Task",
    "Training",
    "TrainingError",
    "Tree",
    "Upload",
    "export",
    "load",
    "predict",
    "resume",
    "run",
    "run_together",
    "setting",
    "simulate",
    "terms",
    "tree",
    "with_lora",
]
