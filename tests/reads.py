"""Who reads which attribute of which class of the dispatcher, by its source: names are followed, not matched.

`settings.gateway.tls` is two reads where `settings` is known to be a Settings: by an annotation, by what it
was assigned from, or by what a call returns. A name in a comment, in a string, or of another class is none.
What is passed on counts for the class that it is passed as, so that a Protocol's reads are those of what
implements it. What cannot be followed is no read: the error is on the safe side.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Class = tuple[str, str]
"""Module and name."""
Classes = frozenset[Class]
Read = tuple[Class, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef
NONE: Classes = frozenset()


@dataclass
class Known:
    """A class: what its attributes are, and its functions."""

    attributes: dict[str, Classes] = field(default_factory=lambda: defaultdict(frozenset))
    functions: dict[str, Function] = field(default_factory=dict)
    bases: list[ast.expr] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    """Of a dataclass, in the order of its arguments."""


@dataclass
class Scope:
    """A function, or a module's own lines: what it reads, and which functions of ours it runs."""

    module: str
    owner: Class | None
    names: dict[str, Classes]
    reads: set[Read] = field(default_factory=set)
    calls: set[Read] = field(default_factory=set)
    """Methods and properties."""


class Source:
    """All modules, by name."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._trees = {name: ast.parse(text) for name, text in modules.items()}
        self._classes: dict[Class, Known] = {}
        self._functions: dict[tuple[str, str], Function] = {}
        self._imports: dict[tuple[str, str], tuple[str, str]] = {}
        self._stands_for: dict[Class, set[Class]] = defaultdict(set)
        """What was passed where this class was asked for."""
        self.carried: dict[Read, set[Read]] = defaultdict(set)
        """Attributes that are set from others, when an object is made: by which."""
        for module, tree in self._trees.items():
            self._collect(module, tree)
        self.scopes: list[tuple[str, Class | None, str, Scope]] = []
        for _ in range(3):  # what an attribute is assigned from may be known only once another's is
            self.scopes = list(self._walk())

    def reads(self, outside: str) -> set[Read]:
        """What is read outside a package, and within it by what is called from outside."""
        inner = {
            (owner, name): scope for module, owner, name, scope in self.scopes if module.startswith(outside)
        }
        found: set[Read] = set()
        todo = [scope for module, _, _, scope in self.scopes if not module.startswith(outside)]
        seen: set[int] = set()
        while todo:
            scope = todo.pop()
            if id(scope) in seen:
                continue
            seen.add(id(scope))
            found |= scope.reads
            todo += [inner[key] for key in scope.calls | scope.reads if key in inner]
        for asked, given in self._stands_for.items():
            found |= {(each, name) for owner, name in found if owner == asked for each in given}
        return found

    # What there is.

    def _collect(self, module: str, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self._imports[module, alias.asname or alias.name] = node.module, alias.name
        for node in tree.body:
            if isinstance(node, Function):
                self._functions[module, node.name] = node
            elif isinstance(node, ast.ClassDef):
                functions = {each.name: each for each in node.body if isinstance(each, Function)}
                annotated = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                fields = [each.id for each in annotated if isinstance(each, ast.Name)]
                if "__init__" in functions:
                    fields = []
                known = Known(functions=functions, bases=node.bases, fields=fields)
                self._classes[module, node.name] = known

    def _resolved(self, module: str, name: str) -> tuple[str, str]:
        while (module, name) in self._imports:
            module, name = self._imports[module, name]
        return module, name

    def _annotated(self, module: str, node: ast.expr | None) -> Classes:
        match node:
            case ast.Name(id=name):
                found = self._resolved(module, name)
                return frozenset({found}) if found in self._classes else NONE
            case ast.Attribute(value=ast.Name(id=package), attr=name):
                found = (".".join(self._resolved(module, package)), name)
                return frozenset({found}) if found in self._classes else NONE
            case ast.Constant(value=str(text)):
                return self._annotated(module, ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, right=right):
                return self._annotated(module, left) | self._annotated(module, right)
            case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[first, *_])):
                return self._annotated(module, first)
        return NONE

    def _attribute(self, owner: Class, name: str) -> tuple[Classes, Class | None]:
        """What it is, and in which class it is declared; None: nowhere."""
        known = self._classes[owner]
        function = known.functions.get(name)
        if function is not None:
            return self._annotated(owner[0], function.returns), owner
        if name in known.attributes:
            return known.attributes[name], owner
        for base in known.bases:
            for each in self._annotated(owner[0], base):
                found, where = self._attribute(each, name)
                if where is not None:
                    return found, where
        return NONE, None

    # What is done.

    def _walk(self) -> Iterator[tuple[str, Class | None, str, Scope]]:
        for module, tree in self._trees.items():
            own = Scope(module, None, {})
            for node in tree.body:
                if isinstance(node, Function):
                    yield module, None, node.name, self._function(Scope(module, None, {}), node)
                elif isinstance(node, ast.ClassDef):
                    owner = module, node.name
                    for each in node.body:
                        if isinstance(each, Function):
                            scope = Scope(module, owner, {})
                            yield module, owner, each.name, self._function(scope, each)
                        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                            what = self._annotated(module, each.annotation)
                            self._classes[owner].attributes[each.target.id] |= what
                else:
                    self._visit(own, node)
            yield module, None, "", own

    def _function(self, scope: Scope, node: Function | ast.Lambda) -> Scope:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            scope.names[argument.arg] = self._annotated(scope.module, argument.annotation)
        if scope.owner is not None and arguments and arguments[0].arg == "self":
            scope.names["self"] = frozenset({scope.owner})
        for each in node.body if isinstance(node.body, list) else [node.body]:
            self._visit(scope, each)
        return scope

    def _visit(self, scope: Scope, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                inner = Scope(scope.module, None, dict(scope.names), scope.reads, scope.calls)
                self._function(inner, node)
            case ast.Assign(targets=targets, value=value):
                found = self._value(scope, value)
                for target in targets:
                    self._assign(scope, target, value, found)
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                found = self._annotated(scope.module, annotation)
                if value is not None:
                    self._value(scope, value)
                    self._assign(scope, target, value, found)
            case ast.expr():
                self._value(scope, node)
            case _:
                for child in ast.iter_child_nodes(node):
                    self._visit(scope, child)

    def _assign(self, scope: Scope, target: ast.expr, value: ast.expr, found: Classes) -> None:
        match target, value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                for each, its in zip(targets, values, strict=True):
                    self._assign(scope, each, its, self._value(scope, its))
            case ast.Name(id=name), _:
                scope.names[name] = found
            case ast.Attribute(value=ast.Name(id="self"), attr=name), _:
                for owner in scope.names.get("self", NONE):
                    self._classes[owner].attributes[name] |= found
            case ast.Attribute(value=inner), _:
                self._value(scope, inner)

    def _value(self, scope: Scope, node: ast.expr) -> Classes:
        """What an expression is; what it reads on the way is noted."""
        match node:
            case ast.Name(id=name):
                return scope.names.get(name, NONE)
            case ast.Attribute(value=value, attr=name, ctx=ast.Load()):
                found = NONE
                for owner in self._value(scope, value):
                    what, declared = self._attribute(owner, name)
                    if declared is not None:
                        scope.reads |= {(owner, name), (declared, name)}
                        found |= what
                return found
            case ast.Call():
                return self._call(scope, node)
            case ast.Await(value=value):
                return self._value(scope, value)
            case ast.NamedExpr(target=ast.Name(id=name), value=value):
                scope.names[name] = self._value(scope, value)
                return scope.names[name]
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._value(scope, test)
                return self._value(scope, body) | self._value(scope, orelse)
            case ast.BoolOp(values=values):
                return frozenset().union(*(self._value(scope, each) for each in values))
            case ast.Lambda():
                self._visit(scope, node)
                return NONE
        for child in ast.iter_child_nodes(node):
            self._visit(scope, child)
        return NONE

    def _call(self, scope: Scope, node: ast.Call) -> Classes:
        found, takers = NONE, list[tuple[Class | None, str, Function]]()
        match node.func:
            case ast.Name(id=name):
                where = self._resolved(scope.module, name)
                if where in self._classes:
                    found = frozenset({where})
                    if (made := self._classes[where].functions.get("__init__")) is not None:
                        takers.append((where, where[0], made))
                elif where in self._functions:
                    function = self._functions[where]
                    found = self._annotated(where[0], function.returns)
                    takers.append((None, where[0], function))
            case ast.Attribute(value=value, attr=name):
                for owner in self._value(scope, value):
                    what, declared = self._attribute(owner, name)
                    if declared is not None and name in self._classes[declared].functions:
                        scope.calls.add((declared, name))
                        found |= what
                        takers.append((declared, declared[0], self._classes[declared].functions[name]))
            case other:
                self._visit(scope, other)
        self._pass(scope, node, found, takers)
        return found

    def _pass(
        self,
        scope: Scope,
        node: ast.Call,
        made: Classes,
        takers: Iterable[tuple[Class | None, str, Function]],
    ) -> None:
        """What is passed stands for what is asked for; what makes an object is carried by it."""
        given: list[tuple[int | str, Classes]] = []
        carriers = made if isinstance(node.func, ast.Name) else NONE
        passed: list[tuple[int | str, ast.expr]] = [*enumerate(node.args)]
        passed += ((keyword.arg or "", keyword.value) for keyword in node.keywords)
        for place, value in passed:
            inner = Scope(scope.module, None, scope.names)
            given.append((place, self._value(inner, value)))
            scope.reads |= inner.reads
            scope.calls |= inner.calls
            for carrier in carriers:
                fields = self._classes[carrier].fields
                if (name := _named(fields, place)) in fields:
                    self.carried[carrier, name] |= inner.reads
        for owner, module, function in takers:
            asked = [*function.args.posonlyargs, *function.args.args][0 if owner is None else 1 :]
            annotations = {each.arg: each.annotation for each in (*asked, *function.args.kwonlyargs)}
            for place, classes in given:
                name = _named([each.arg for each in asked], place)
                for wanted in self._annotated(module, annotations.get(name)):
                    self._stands_for[wanted] |= classes - {wanted}


def _named(names: Sequence[str], place: int | str) -> str:
    """An argument's name, by its place among these or by itself."""
    return place if isinstance(place, str) else "".join(names[place : place + 1])
