"""The program of the process in which templates are rendered: the standard library and Jinja, nothing of the trainer.

A template comes with a model folder or a data set, so it is someone else's program. Jinja's immutable sandbox, as
transformers sets it up, keeps it from Python; the kernel keeps this process from more memory and CPU time than a render
may have, and from opening any file. So whatever a template does, in whichever line of C, it ends here.

Standard input brings requests, standard output takes replies (sandbox.py has the other ends).
"""

from __future__ import annotations

import io
import json
import pickle
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

TEXT, REFUSED, BROKEN, STOPPED, FULL = b"TRBSF"
"""First byte of a reply: the text; the template's own error; it is no template; it went over a limit; over that of the
memory. What follows are the length (8 bytes) and UTF-8."""

NUMBER_BITS = 128
"""Of a whole number that a template computes: its digits need no memory before they are written."""

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""In the text of what is no text, number, list or dict: it would be another in every run."""

WARM = r"{{ '\N{BULLET}' | wordwrap(1) | striptags }}{{ strftime_now('%Z') }}{{ raise_exception('') }}"
"""Rendered before files are closed to it: Python reads modules and the time zone where they are first needed."""

DAY = "_day"
"""Among a template's values: what strftime_now tells, YYYY-MM-DD."""

SAID = 2000
"""Characters of an error, which may be a template's."""


class RanAway(Exception):
    """A template went over a limit that is not the kernel's."""


class Broken(Exception):
    """It is no template."""


class Environment(ImmutableSandboxedEnvironment):
    """What transformers gives to chat templates, less what is random."""

    intercepted_binops = frozenset(("+", "-", "*", "//", "**"))

    def __init__(self, **options: Any):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], **options)
        del self.filters["random"], self.globals["lipsum"]
        self.filters["tojson"] = to_json
        self.globals |= {"raise_exception": refuse, "strftime_now": now, "dict": Dict(), "namespace": Names}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        found = self.binop_table[operator](left, right)
        if isinstance(found, int) and found.bit_length() > NUMBER_BITS:
            raise RanAway(f"it computes a number of more than {NUMBER_BITS} bits")
        return found


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


@jinja2.pass_context
def now(context: jinja2.runtime.Context, format: str) -> str:
    """Today, or the midnight of the day that the run says (DAY)."""
    day = context.get(DAY)
    return (datetime.now() if day is None else datetime.fromisoformat(day)).strftime(format)


class Dict:
    """dict() and dict.fromkeys(), and no other attribute of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict:
        return dict.fromkeys(*args, **kwargs)


class Names(Namespace):
    """namespace(), with transformers' rule against underscores."""

    def __init__(*args: Any, **kwargs: Any):  # so that namespace(self=...) works, as in jinja2
        self, values = args[0], dict(*args[1:], **kwargs)
        Namespace.__init__(self)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: names do not begin with _")
        super().__setitem__(name, value)


class Generation(Extension):
    """{% generation %}: some templates mark the assistant's words with it. They are found without."""

    tags = frozenset(("generation",))

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("as_it_is"), [], [], body).set_lineno(line)

    def as_it_is(self, caller: Any) -> str:
        return caller()


class Plain(pickle.Unpickler):
    """Values that a template may see: no object with methods of its own, such as an image, which can write files."""

    def find_class(self, module: str, name: str) -> Any:
        if module != "datetime" and (module, name) != ("decimal", "Decimal"):
            raise pickle.UnpicklingError(f"the row holds a {module}.{name}, which templates cannot use")
        return super().find_class(module, name)


class Template:
    """A compiled template and the CPU time left to it: `mean` seconds a render, beyond twice the `most` of one."""

    def __init__(self, template: jinja2.Template, most: float, mean: float):
        self.template, self.most, self.mean = template, most, mean
        self.left = 2 * most

    def render(self, values: dict[str, Any]) -> str:
        """The text. Raises what the template raises."""
        self.left += self.mean
        start = time.process_time()
        try:
            with cpu_time(min(self.most, self.left)):
                return self.template.render(values)
        finally:
            self.left -= time.process_time() - start


@contextmanager
def cpu_time(seconds: float) -> Iterator[None]:
    """Ends the process, by SIGPROF, where it works longer than that."""
    signal.setitimer(signal.ITIMER_PROF, max(1e-3, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class Renderer:
    """Answers requests within the limits (sandbox.py)."""

    def __init__(self, limits: dict[str, Any]):
        self.limits = limits
        self._environments = {False: Environment(), True: Environment(undefined=jinja2.StrictUndefined)}
        self._compiled = lru_cache(maxsize=16)(self._compile)

    def answer(self, request: bytes) -> tuple[int, bytes]:
        """The kind of reply to a pickled (template, strict, values), and what it says; without values it compiles."""
        try:
            return TEXT, self._text(request).encode("utf-8", "surrogatepass")
        except MemoryError:
            return FULL, b""
        except RanAway as error:
            return STOPPED, said(error)
        except Broken as error:
            return BROKEN, said(error)
        except Exception as error:  # of someone else's program: there is nothing that it may not raise
            return REFUSED, said(error)

    def _text(self, request: bytes) -> str:
        text, strict, values = Plain(io.BytesIO(request)).load()
        template = self._compiled(text, strict)
        if values is None:
            return ""
        made = template.render(values)
        if len(made) > self.limits["characters"] + self.limits["times_input"] * len(request):
            raise RanAway("it makes too much text")
        if any(match[0].encode() not in request for match in ADDRESS.finditer(made)):
            raise RanAway("it writes the address of an object that is no text, number, list or dict")
        return made

    def _compile(self, text: str, strict: bool) -> Template:
        most = self.limits["cpu_seconds"]
        try:
            with cpu_time(most):
                template = self._environments[strict].from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise Broken(f", line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, ValueError, OverflowError) as error:
            raise Broken(f": cannot be compiled: {error}") from None
        return Template(template, most, self.limits["mean_cpu_seconds"])


def said(error: Exception) -> bytes:
    return str(error)[:SAID].encode("utf-8", "surrogatepass")


def serve(limits: dict[str, Any], requests: BinaryIO, replies: BinaryIO) -> None:
    """Answers until there are no more requests, or one went over a limit: what that left behind is not kept."""
    renderer = Renderer(limits)
    begun = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    renderer.answer(pickle.dumps((WARM, False, {"value": Decimal()})))
    for limit, most in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 3)):
        resource.setrlimit(limit, (most, most))  # what is open stays open
    ceiling = resource.getrlimit(resource.RLIMIT_AS)[1]
    while header := requests.read(8):
        size = int.from_bytes(header, "little")
        most = begun + limits["num_bytes"] + limits["times_input"] * size
        resource.setrlimit(resource.RLIMIT_AS, (most if ceiling < 0 else min(most, ceiling), ceiling))
        kind, content = renderer.answer(requests.read(size))
        replies.write(bytes([kind]) + len(content).to_bytes(8, "little"))
        replies.write(content)
        replies.flush()
        if kind in (STOPPED, FULL):
            return


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
