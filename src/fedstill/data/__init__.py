"""Data: sources, partitions, and the federation made from them."""

from .dataset import Dataset
from .federation import Client, Federation
from .partition import Partition, deal, parse
from .record import load_record, save_record
from .rules import Preprocessing
from .source import catalogue, load

__all__ = [
    "Client",
    "Dataset",
    "Federation",
    "Partition",
    "Preprocessing",
    "catalogue",
    "deal",
    "load",
    "load_record",
    "parse",
    "save_record",
]
