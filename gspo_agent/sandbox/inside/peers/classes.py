"""What one side tells the other about a class, and the class that stands for it there."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable
from typing import Any

from .proxies import Remote, RemoteError, RemoteType

# Looked up on the class by the interpreter, so that a proxy's class has to have them, too.
_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift"
ARITHMETIC = {f"__{prefix}{name}__" for name in _BINARY.split() for prefix in ("", "r", "i")}
ORDER = {"__lt__", "__le__", "__gt__", "__ge__"}
_UNARY = "abs bool ceil complex float floor index int round trunc"
NUMBERS = {f"__{name}__" for name in _UNARY.split()}
_OTHERS = "call delitem enter exit format getitem hash invert iter len neg next pos reversed setitem contains"
SPECIALS = ARITHMETIC | ORDER | NUMBERS | {f"__{name}__" for name in _OTHERS.split()}
_IMMUTABLE = (int, float, complex, str, bytes, tuple, frozenset)
_MUTABLE = (list, dict, set, bytearray)
_FOREIGN = ("unittest", "doctest")  # the standard library's, but with a meaning for whoever runs tests


def by_name(cls: type) -> bool:
    """Whether both sides have the class as a built-in one."""
    return vars(builtins).get(cls.__name__) is cls


def describe(cls: type, number: int, pack: Callable[[Any], Any]) -> dict[str, Any]:
    """JSON; `pack` encodes the classes that it is derived from."""
    failing, kind = issubclass(cls, BaseException), data_kind(cls)
    specials = [] if failing else [name for name in SPECIALS if _defined(cls, name)]
    if kind:  # its value crosses: operators work on that
        specials = [name for name in specials if name not in dir(kind)]
    bases = [base for base in cls.__bases__ if base in _IMMUTABLE or not by_name(base) or _is_error(base)]
    return {
        "number": number,
        "name": cls.__name__,
        "module": str(cls.__module__),
        "bases": [pack(base) for base in bases],
        "specials": specials,
        "unhashable": cls.__hash__ is None,
        "container": issubclass(cls, _MUTABLE),
        "methods": [] if failing else _methods(cls),
    }


def data_kind(cls: type) -> type | None:
    """The immutable data type that a class is derived from: its values cross as data that is also a handle."""
    return next((kind for kind in _IMMUTABLE if issubclass(cls, kind)), None)


def _is_error(cls: type) -> bool:
    return issubclass(cls, BaseException)


def _defined(cls: type, name: str) -> bool:
    owner = next((owner for owner in cls.__mro__ if name in vars(owner)), object)
    return owner is not object and vars(owner)[name] is not None


def _methods(cls: type) -> list[str]:
    """Names that are plain functions wherever they are looked up: calling them needs no look at the object first."""
    found: dict[str, bool] = {}
    for owner in cls.__mro__:
        for name, value in vars(owner).items():
            found.setdefault(name, type(value) is types.FunctionType)
    return [name for name, plain in found.items() if plain and not name.startswith("__")]


def mirror(description: dict[str, Any], bases: list[type], peer: Any) -> type:
    """The class that stands for a described one; exceptions of the standard library stand for themselves."""
    known = _exception(description["module"], description["name"])
    if known:
        return known
    failing = any(map(_is_error, bases))
    mixin = RemoteError if failing else Remote
    namespace = {
        "__module__": description["module"],
        "__doc__": vars(mixin)["__doc__"],
        "__remote__": (peer, description["number"]),
        "__remote_methods__": frozenset(description["methods"]),
        "__remote_container__": bool(description["container"]),
    }
    if not failing:
        namespace |= {name: _forward(name) for name in description["specials"] if name in SPECIALS}
    if description["unhashable"]:
        namespace["__hash__"] = None
    if any(base in _IMMUTABLE for base in bases):
        namespace |= {"__repr__": Remote.__repr__, "__str__": Remote.__str__}
    if not any(issubclass(base, mixin) for base in bases):
        bases = [mixin, *bases] if failing else [*bases, mixin]
    name = str(description["name"])
    try:
        return type.__new__(RemoteType, name, tuple(bases), namespace)
    except TypeError:  # an order of bases that only its own metaclass allows
        return type.__new__(RemoteType, name, (mixin, Exception) if failing else (mixin,), namespace)


def _exception(module: str, name: str) -> type | None:
    root = module.partition(".")[0]
    if root not in sys.stdlib_module_names or root in _FOREIGN:
        return None
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _called(self: Any, *arguments: Any, **named: Any) -> Any:
    return self.__remote__[0].ask("call", self, arguments, named)


def _forward(name: str) -> Callable[..., Any]:
    if name == "__call__":
        return _called

    def special(self: Any, *arguments: Any) -> Any:
        peer = self.__remote__[0]
        answer = peer.may_apply(self, name, arguments)
        if answer is not True:
            return answer
        return peer.applied(name, arguments, peer.ask("special", self, name, arguments))

    special.__name__ = name
    return special
