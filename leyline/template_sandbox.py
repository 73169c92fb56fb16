"""The sandbox that chat templates run in.

A template is code that came with the model folder. jinja2's immutable sandbox keeps it away from
Python's internals, files and imports (CVE-2026-5760 is what happens otherwise); it does not keep it
from looping for ever or from writing a terabyte. For that there is a meter
(`leyline.template_meter`): filters, tests, calls and operators report to it by themselves, and the
template's tree is rewritten (`leyline.template_tree`) so that all the rest does too.

It gets the helpers that transformers offers (`tojson`, `raise_exception`, `strftime_now`, loop
controls, the `generation` block, guarded `dict` and `namespace`), since published templates rely on
them. Of jinja2's filters those are left out that are no business of a prompt: HTML, chance, pretty
printing.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from leyline.template_meter import (
    FILTER_CHECKS,
    METER,
    STR_CHECKS,
    WorkLimitError,
    check_binop,
    check_fields,
)
from leyline.template_tree import CONCAT, MEASURED, OUTPUT, SPENT, TURNS, Metering, check_node

MAX_SOURCE = 1 << 18  # characters; the longest templates of the hub have about 30,000
LEFT_OUT = ("filesizeformat", "forceescape", "pprint", "random", "striptags", "urlize")
LEFT_OUT += ("wordwrap", "xmlattr")
UNSAFE_STR = frozenset({"encode", "maketrans", "translate"})  # to bytes, or to any length
MAX_LAYOUT = 64  # characters of an indent or a separator of JSON
STRFTIME_GROWTH = 256  # the most that Python makes of a pattern
PART_FIELD = re.compile(r"\{[^{}:!]*[.\[]")  # such as {0.x}: the part may be any size
WITHOUT_METHODS = (bytes, int, float, complex)


class GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks replies for training; here, just text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Drop the two tags and keep what is between them."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateNamespace(Namespace):
    """`namespace()`, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # like jinja2's own, so that `namespace(self=1)` works
        fields = dict(*rest, **kwargs)
        for name in fields:
            _check_name(name)
        Namespace.__init__(self, fields)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # what it holds may hold itself


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"{name!r} is no name for a field of a namespace")


class TemplateDict:
    """`dict()`, without the rest of Python's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Do what `dict` does."""
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Do what `dict.fromkeys` does."""
        return dict.fromkeys(*args)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with a meter; use `compiled`, not `from_string`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationBlock]
        )
        own: dict[str, Callable[..., Any]] = {"tojson": _tojson}
        for name, function in {**self.filters, **own}.items():
            self.filters[name] = _metered(function, FILTER_CHECKS.get(name), name == "join")
        for name, function in self.tests.items():
            self.tests[name] = _metered(function)
        for name in LEFT_OUT:
            del self.filters[name]
        self.filters |= {
            TURNS: _turns,
            OUTPUT: _output,
            CONCAT: _concat,
            MEASURED: _measured,
            SPENT: _spent,
        }
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
        }
        del self.globals["lipsum"]

    def compiled(self, source: str) -> jinja2.Template:
        """Compile a template, rewritten so that it reports to the meter.

        Raises:
            TemplateError: It is no valid template.
            SecurityError: It is too long, or asks for what it may not have.
        """
        if len(source) > MAX_SOURCE:
            raise SecurityError(f"it is longer than {MAX_SOURCE} characters")
        tree = self.parse(source)
        for node in tree.find_all(nodes.Node):
            check_node(node)
        code = self.compile(Metering(self).visit(tree))
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse an unsafe attribute at once, rather than print it as "".

        Raises:
            SecurityError: Always.
        """
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute of a Python object."""
        if isinstance(obj, WITHOUT_METHODS) or (isinstance(obj, str) and attr in UNSAFE_STR):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return what stands for `str.format` in a template, or None if this is none."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text: str = value.__self__

        @functools.wraps(wrapped)
        def bounded(*args: Any, **kwargs: Any) -> str:
            if _has_nested_field(text):
                raise WorkLimitError("it formats with a width that it does not name")
            if PART_FIELD.search(text.replace("{{", "").replace("}}", "")):
                raise WorkLimitError("it formats with a part of a value")
            check_fields(METER.get(), text, "{", [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator."""
        meter = METER.get()
        check_binop(meter, operator, left, right)
        return meter.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a method or a global."""
        meter = METER.get()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, list, tuple, dict)):
            meter.read(owner)
        if isinstance(owner, str):
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            if check := STR_CHECKS.get(__obj.__name__):
                check(meter, owner, *args, **kwargs)
        meter.read(*args, *kwargs.values())
        return meter.made(super().call(__context, __obj, *args, **kwargs))


def _has_nested_field(text: str) -> bool:
    """Whether a width is itself a field, as in "{:{width}}"."""
    depth = 0
    for character in text.replace("{{", "").replace("}}", ""):
        depth += (character == "{") - (character == "}")
        if depth > 1:
            return True
    return False


# Filters that the rewritten tree calls -----------------------------------------------------------


@pass_context  # jinja2 folds no filter at compile time that wants to see the context
def _turns(context: Context, values: Iterable[Any], weight: int) -> Iterator[Any]:
    meter = METER.get()
    meter.read(values)
    for value in values:
        meter.spend(weight)
        yield value


@pass_context
def _output(context: Context, values: list[Any]) -> str:
    meter = METER.get()
    return "".join([meter.wrote(_text(value)) for value in values])


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    meter = METER.get()
    meter.fits(meter.read(values))
    return meter.made("".join([_text(value) for value in values]))


@pass_context
def _measured(context: Context, value: Any) -> Any:
    METER.get().read(value)
    return value


@pass_context
def _spent(context: Context, weight: int) -> None:
    METER.get().spend(weight)


def _text(value: Any) -> str:
    """What a value prints, if that is not too much."""
    if not isinstance(value, str):
        METER.get().read(value)
    return str(value)


# Functions ----------------------------------------------------------------------------------------


def _metered(
    function: Callable[..., Any], check: Callable[..., None] | None = None, eager: bool = False
) -> Callable[..., Any]:
    """Return a filter or test that reports to the meter."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    @functools.wraps(function)
    def metered(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        meter = METER.get()
        if eager and isinstance(value, Iterator):
            value = list(value)
        meter.read(value, *args, *kwargs.values())
        if check is not None:
            check(meter, value, *args, **kwargs)
        head = {
            None: (),
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (context.environment,),
        }[wanted]
        return meter.made(function(*head, value, *args, **kwargs))

    return metered


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    METER.get().fits(len(pattern) * STRFTIME_GROWTH)
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if separators is not None:
        item, key = separators
        separators = (str(item), str(key))
    width = len(indent) if isinstance(indent, str) else indent or 0
    if max(width, *map(len, separators or ("",))) > MAX_LAYOUT:
        raise WorkLimitError("it makes a JSON text with wide gaps")
    # jinja2's own tojson escapes HTML characters, which models have never seen in training.
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    pieces, size, meter = [], 0, METER.get()
    for piece in encoder.iterencode(value):  # each level of nesting makes its lines longer
        size += len(piece)
        meter.fits(size)
        pieces.append(piece)
    return "".join(pieces)
