"""One side of the conversation: asks the other side to do something with its objects, and does what it is asked."""

from __future__ import annotations

import builtins
import inspect
import json
import threading
import types
from collections.abc import Callable
from typing import Any

from .. import data
from . import classes
from .operations import OPERATIONS
from .proxies import Method, RemoteModule, is_remote, is_remote_class
from .values import Packer, Unpacker, snapshot, unchanged

_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError)
_TEXT = 4000


class Lost(BaseException):
    """The other side is gone, or says what no one would say; nothing that catches exceptions should stop it."""


class Peer:
    """Objects are known to the other side by numbers; whatever it holds is kept here as long as the peer.

    Args:
        send: one message of ours.
        receive: waits for the other side's next message; raises Lost.
    """

    strict = False
    """Whether the other side is not trusted."""

    def __init__(self, send: Callable[[bytes], None], receive: Callable[[], bytes]) -> None:
        self._send, self._receive = send, receive
        self._objects: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._proxies: dict[int, Any] = {}
        self._described: set[int] = set()
        self._turn = threading.RLock()

    def ask(self, operation: str, *arguments: Any) -> Any:
        """What came of it there; raises what was raised there. Containers among the arguments are changed in place."""
        packer = Packer(self._pack)
        request = {"do": operation, "with": [packer.pack(argument) for argument in arguments]}
        with self._turn:
            reply = self._exchange(request)
        unpacker = Unpacker(self._unpack, packer.boxes)
        try:
            outcome = unpacker.unpack(reply["raised" if "raised" in reply else "value"])
            for number, content in reply["changed"]:
                unpacker.fill(packer.boxes[number], content)
        except _MALFORMED as error:
            raise Lost(f"an unreadable answer: {type(error).__name__}: {error}") from None
        if "raised" not in reply:
            return outcome
        raise self.raised(outcome)

    def raised(self, error: Any) -> BaseException:
        """What to raise for an exception of the other side."""
        return error if isinstance(error, BaseException) else Lost("an exception that is none")

    def serve(self) -> None:
        """Does what it is asked, until there is nobody any more."""
        while True:
            with self._turn:
                request = self._parsed()
            reply = self._done(request)
            with self._turn:
                self._send(json.dumps(reply).encode())

    def may_apply(self, proxy: Any, special: str, operands: tuple[Any, ...]) -> Any:
        """True where the other side is to be asked what a special method says, else the answer."""
        return True

    def applied(self, special: str, operands: tuple[Any, ...], result: Any) -> Any:
        """Hears of each answer, and passes it on."""
        return result

    def named(self, name: str, value: Any) -> Any:
        """Hears of each object that is looked up by name in a module of the other side."""
        return value

    def own_module(self, name: str) -> types.ModuleType | None:
        """The module of this side that has a name inside of a module of the other side."""
        return None

    def starred(self, names: Any) -> Any:
        """What `from module import *` takes of the names that a module of the other side has for it."""
        return names

    def unsupported(self, what: str) -> None:
        raise TypeError(f"cannot {what}")

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        """Does what the other side asks in the meantime."""
        self._send(json.dumps(message).encode())
        while "do" in (reply := self._parsed()):
            self._send(json.dumps(self._done(reply)).encode())
        if not ("value" in reply or "raised" in reply) or not isinstance(reply.get("changed"), list):
            raise Lost("an answer without a value")
        return reply

    def _parsed(self) -> dict[str, Any]:
        try:
            message = json.loads(self._receive())
        except (ValueError, RecursionError):
            raise Lost("an unreadable message") from None
        if not isinstance(message, dict):
            raise Lost("an unreadable message")
        return message

    def _done(self, request: dict[str, Any]) -> dict[str, Any]:
        unpacker = Unpacker(self._unpack)
        before: dict[int, Any] = {}
        try:
            arguments = [unpacker.unpack(argument) for argument in request["with"]]
            before = {number: snapshot(box) for number, box in unpacker.boxes.items()}
            packer = Packer(self._pack, unpacker.boxes)
            reply = {"value": packer.pack(self.perform(request["do"], *arguments))}
        except Lost:
            raise
        except BaseException as error:
            packer = Packer(self._pack, unpacker.boxes)
            reply = {"raised": self._pack_error(error)}
        changed = [number for number, kept in before.items() if not unchanged(unpacker.boxes[number], kept)]
        return {**reply, "changed": [[number, packer.content(unpacker.boxes[number])] for number in changed]}

    def perform(self, operation: str, *arguments: Any) -> Any:
        """One operation on an object of this side."""
        return OPERATIONS[operation](*arguments)

    def trace(self, error: BaseException) -> str:
        """Where an exception came from, as far as the other side may know."""
        return ""

    def _pack(self, value: Any) -> Any:
        if isinstance(value, Method):
            value = value.__remote_get__()
        if is_remote(value):
            return {"$yours": value.__remote__[1]}
        if isinstance(value, type):
            return self._pack_class(value)
        if isinstance(value, BaseException):
            return self._pack_error(value)
        name = getattr(value, "__name__", None) if isinstance(value, types.BuiltinFunctionType) else None
        if name and vars(builtins).get(name) is value:
            return {"$builtin": name}
        if isinstance(value, types.ModuleType):
            return {"$module": [self._number(value), value.__name__]}
        kind = classes.data_kind(type(value))
        plain = [Packer(self._pack).pack(_as_data(value, kind))] if kind else []
        tag = "$awaited" if inspect.iscoroutine(value) else "$mine"
        return {tag: [self._number(value), self._described_class(type(value)), *plain]}

    def _pack_class(self, cls: type) -> Any:
        return {"$type": cls.__name__} if classes.by_name(cls) else self._described_class(cls)

    def _described_class(self, cls: type) -> Any:
        """Of an object that stays here: also a built-in class, as that of a map, has one that stands for it."""
        number = self._number(cls)
        if number in self._described:
            return {"$class": number}
        self._described.add(number)
        return {"$class": classes.describe(cls, number, self._pack)}

    def _pack_error(self, error: BaseException) -> Any:
        if is_remote(error):
            return {"$yours": error.__remote__[1]}  # type: ignore[attr-defined]
        text = type(error).__name__
        arguments = []
        try:
            text = str(error)[:_TEXT]
            arguments = [Packer(self._pack).pack(argument) for argument in error.args]
        except Exception:
            arguments = [text]
        return {"$error": [self._number(error), self._pack_class(type(error)), arguments, text, self.trace(error)]}

    def _number(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._numbers))
        self._objects[number] = value  # kept, so that its id stays its own
        return number

    def _unpack(self, tag: str, content: Any) -> Any:
        match tag:
            case "$yours":
                return self._objects[content]
            case "$type":
                found = vars(builtins)[content]
                if not isinstance(found, type):
                    raise ValueError(f"{content} is no class")
                return found
            case "$builtin" if not self.strict:
                return vars(builtins)[content]
            case "$class":
                return self._class(content)
            case "$mine":
                return self._proxy(*content)
            case "$awaited":
                return self._await(self._proxy(*content))
            case "$module":
                return self._module(*content)
            case "$error":
                return self._error(*content)
        raise ValueError(f"unknown tag {tag!r}")

    def _own_class(self, content: Any) -> Any:
        """A class that is the other side's own, or a built-in one, never one of this side."""
        if not content.keys() <= {"$class", "$type"}:
            raise ValueError("no class of the other side")
        return Unpacker(self._unpack).unpack(content)

    def _class(self, content: Any) -> Any:
        if not isinstance(content, dict):
            return self._proxies[content]
        if content["number"] in self._proxies:
            raise ValueError("a class is described twice")
        made = classes.mirror(content, [self._own_class(base) for base in content["bases"]], self)
        return self._proxies.setdefault(content["number"], made)

    def _proxy(self, number: int, cls: Any, plain: Any = None) -> Any:
        if number in self._proxies:
            return self._proxies[number]
        kind: Any = self._own_class(cls)
        data_kind: Any = classes.data_kind(kind)
        if not is_remote_class(kind):
            raise ValueError("an object of no class of the other side")
        value = Unpacker(self._unpack).unpack(plain)
        proxy = data_kind.__new__(kind, value) if data_kind else object.__new__(kind)
        object.__setattr__(proxy, "__remote__", (self, number))
        return self._proxies.setdefault(number, proxy)

    async def _await(self, proxy: Any) -> Any:
        return self.ask("await", proxy)

    def _module(self, number: int, name: str) -> RemoteModule:
        if number not in self._proxies:
            self._proxies[number] = module = RemoteModule(str(name))
            vars(module)["__remote__"] = (self, number)
        return self._proxies[number]  # type: ignore[no-any-return]

    def _error(self, number: int, cls: Any, arguments: list[Any], text: str, trace: str) -> Any:
        if number in self._proxies:
            return self._proxies[number]
        kind: Any = self._own_class(cls)
        if not issubclass(kind, BaseException):
            raise ValueError("an exception that is none")
        args = [Unpacker(self._unpack).unpack(argument) for argument in arguments]
        try:
            error = kind.__new__(kind, *args) if is_remote_class(kind) else kind(*args)
        except Exception:
            error = kind.__new__(kind, str(text))
        object.__setattr__(error, "__remote_text__", str(text))
        object.__setattr__(error, "__remote_trace__", str(trace))
        if is_remote_class(kind):
            object.__setattr__(error, "__remote__", (self, number))
        return self._proxies.setdefault(number, error)


def _as_data(value: Any, kind: Any) -> Any:
    """The value of an object of a class derived from `kind`; runs no method of its own."""
    return kind(kind.__iter__(value)) if kind in (tuple, frozenset) else data.decode(data.encode(value))
