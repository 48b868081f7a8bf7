"""Command-line flags from dataclasses, by transformers' parser."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from transformers import HfArgumentParser

T = TypeVar("T")


def argument_parser(*dataclasses: type, **settings: Any) -> HfArgumentParser:
    """A flag for every field, with dashes or underscores; `none` is accepted by a number that may be None.

    Args:
        dataclasses: their fields become flags, their metadata the help.
        settings: arguments of `argparse.ArgumentParser`.
    """
    parser = HfArgumentParser(list(dataclasses), **settings)
    for dataclass in dataclasses:
        for name, annotation in typing.get_type_hints(dataclass).items():
            if type(None) in typing.get_args(annotation):
                _accept_none(parser, name)
    return parser


def _accept_none(parser: argparse.ArgumentParser, name: str) -> None:
    action = next(action for action in parser._actions if action.dest == name)
    action.type = _or_none(action.type)


def _or_none(convert: Callable[[str], T]) -> Callable[[str], T | None]:
    def converted(text: str) -> T | None:
        return None if text.lower() == "none" else convert(text)

    converted.__name__ = getattr(convert, "__name__", "value")
    return converted
