"""Stand-ins for objects of the other side. Whatever is done to them is done there.

A proxy never equals plain data, and the other side is not asked whether it does: it would say yes.
"""

from __future__ import annotations

import types
from typing import Any

_IMPORT = frozenset(("__cached__", "__file__", "__loader__", "__package__", "__path__", "__spec__"))
# Of text and sets: their answer would be a verdict on something that should have been data.
_PREDICATES = frozenset(
    name for kind in (str, bytes, set) for name in dir(kind) if name.startswith("is") or name.endswith("swith")
)


class Unsupported(BaseException):
    """The tests do what cannot be done from outside of the solution."""


class RemoteType(type):
    """The class of classes that stand for one of the other side."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        if any(isinstance(base, RemoteType) and "__remote__" in vars(base) for base in bases):
            owner: Any = next(base for base in bases if "__remote__" in vars(base))
            owner.__remote__[0].unsupported(f"derive a class from {owner.__name__!r}, a class of the solution")
        return super().__new__(cls, name, bases, namespace)

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        return cls.__remote__[0].ask("call", cls, arguments, named)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__remote"):
            raise AttributeError(name)
        return cls.__remote__[0].ask("get", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith("__remote"):
            type.__setattr__(cls, name, value)
        else:
            cls.__remote__[0].ask("set", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        cls.__remote__[0].ask("delete", cls, name)

    def __dir__(cls) -> list[str]:
        return list(cls.__remote__[0].ask("dir", cls))

    def __bool__(cls) -> bool:
        return True

    def __iter__(cls) -> Any:
        return cls.__remote__[0].ask("special", cls, "__iter__", ())

    def __len__(cls) -> Any:
        return cls.__remote__[0].ask("special", cls, "__len__", ())

    def __getitem__(cls, key: Any) -> Any:
        return cls.__remote__[0].ask("item", cls, key)

    def __contains__(cls, item: Any) -> bool:
        return bool(cls.__remote__[0].ask("special", cls, "__contains__", (item,)))


def is_remote_class(kind: Any) -> bool:
    return type(kind) is RemoteType


def is_remote(value: Any) -> bool:
    """Whether it stands for something of the other side."""
    kind = type(value)
    return isinstance(kind, RemoteType) or isinstance(value, RemoteType | RemoteModule)


class _Attributes(metaclass=RemoteType):
    """What proxies of objects and of exceptions share; `__remote__` is (peer, number)."""

    __remote_methods__: frozenset[str] = frozenset()
    __remote_container__ = False
    __remote_named__ = False

    def __getattr__(self, name: str) -> Any:
        kind = type(self)
        if name.startswith("__remote"):
            raise AttributeError(name)
        if name in _PREDICATES and not kind.__remote_named__ and self.__remote__[0].strict:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        if name in kind.__remote_methods__:
            return Method(self, name)
        return self.__remote__[0].ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):  # the interpreter's own: __traceback__, __context__, __notes__
            object.__setattr__(self, name, value)
        else:
            self.__remote__[0].ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__remote__[0].ask("delete", self, name)

    def __repr__(self) -> str:
        return str(self.__remote__[0].ask("repr", self))

    def __str__(self) -> str:
        return str(self.__remote__[0].ask("str", self))


class Remote(_Attributes):
    """An object of the other side."""

    def __eq__(self, other: object) -> Any:
        peer = self.__remote__[0]
        if type(self).__remote_container__ and not is_remote(other):
            return peer.ask("plain", self) == other
        # Only the other side's own objects are compared there.
        return bool(peer.ask("equal", self, other)) if is_remote(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.__remote__[1])

    def __copy__(self) -> Any:
        return self.__remote__[0].ask("copy", self)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__remote__[0].ask("deepcopy", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"cannot pickle {type(self).__name__!r} object")

    def __dir__(self) -> list[str]:
        return list(self.__remote__[0].ask("dir", self))

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return dict(self.__remote__[0].ask("vars", self))

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return self.__remote__[0].ask("get", self, "__doc__")


class RemoteError(_Attributes):
    """An exception of the other side; also derived from an exception class of this side."""

    __remote_text__: str

    def __str__(self) -> str:
        return self.__remote_text__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__remote_text__!r})"

    __eq__, __hash__ = object.__eq__, object.__hash__


class Method:
    """A method of a proxy, that needs no look at the object when it is called."""

    def __init__(self, owner: Any, name: str) -> None:
        self.__remote_owner, self.__remote_name = owner, name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.__remote_owner.__remote__[0].ask(
            "method", self.__remote_owner, self.__remote_name, arguments, named
        )

    def __remote_get__(self) -> Any:
        return self.__remote_owner.__remote__[0].ask("get", self.__remote_owner, self.__remote_name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__remote_get__(), name)

    def __eq__(self, other: object) -> bool:
        return bool(self.__remote_get__() == (other.__remote_get__() if isinstance(other, Method) else other))

    def __hash__(self) -> int:
        return hash(self.__remote_name)

    def __repr__(self) -> str:
        return repr(self.__remote_get__())


class RemoteModule(types.ModuleType):
    """A module of the other side."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__remote") or name in _IMPORT:
            raise AttributeError(name)
        peer = vars(self)["__remote__"][0]
        own = peer.own_module(f"{self.__name__}.{name}")
        if own is not None:
            return own
        if name == "__all__":
            return peer.starred(peer.ask("names", self))
        return peer.named(name, peer.ask("get", self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        # What an import leaves in a package was left there, too, or is not for the other side.
        elif not (isinstance(value, types.ModuleType) and value.__name__ == f"{self.__name__}.{name}"):
            vars(self)["__remote__"][0].ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        vars(self)["__remote__"][0].ask("delete", self, name)

    def __dir__(self) -> list[str]:
        return list(vars(self)["__remote__"][0].ask("dir", self))
