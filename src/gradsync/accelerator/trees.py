"""Nested structures, traversed by torch's pytree, extended to containers that torch would take for leaves.

torch goes by the exact class of a container. A mapping, list or tuple of another class (a tokenizer's batch is a
``UserDict``) is opened here and rebuilt as its own class. None of these classes is registered with torch: its registry
is global to the process, and registering a class is up to its authors.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch.utils._pytree import (
    TreeSpec,
    is_namedtuple_instance,
    keystr,
    tree_flatten,
    tree_leaves_with_path,
    tree_map,
)

__all__ = ["flatten", "leaves_of", "map_leaves", "plain"]

Stop = Callable[[Any], bool]

# Others that somebody has registered stay leaves: many of them cannot say where in them a leaf lies.
KNOWN = (dict, OrderedDict, defaultdict, list, tuple)


def map_leaves(function: Callable[[Any], Any], tree: Any, *, stop: Stop = lambda _: False) -> Any:
    """``tree`` with ``function(leaf)`` in the place of every leaf; also of what ``stop`` does not want opened."""

    def visit(node: Any) -> Any:
        if not isinstance(node, Mapping | list | tuple) or stop(node):
            return function(node)
        return _refilled(node, map_leaves(function, _opened(node), stop=stop))

    return tree_map(visit, tree, is_leaf=lambda node: _is_unknown(node) or stop(node))


def plain(tree: Any) -> Any:
    """``tree`` with dicts, lists and tuples in the place of the containers that torch does not know."""

    def visit(node: Any) -> Any:
        return plain(_opened(node)) if isinstance(node, Mapping | list | tuple) else node

    return tree_map(visit, tree, is_leaf=_is_unknown)


def flatten(tree: Any, *, stop: Stop = lambda _: False) -> tuple[list[Any], TreeSpec]:
    """The leaves of ``plain(tree)``, and how it is built."""
    return tree_flatten(plain(tree), is_leaf=lambda node: _is_unknown(node) or stop(node))


def leaves_of(tree: Any, name: str = "value") -> list[tuple[str, Any]]:
    """The leaves, each with the expression that finds it in ``name``."""
    return [(name + keystr(path), leaf) for path, leaf in tree_leaves_with_path(plain(tree), is_leaf=_is_unknown)]


def _is_unknown(node: Any) -> bool:
    return type(node) not in KNOWN and not is_namedtuple_instance(node)


def _opened(container: Any) -> Any:
    if isinstance(container, Mapping):
        return dict(container)
    return list(container) if isinstance(container, list) else tuple(container)


def _refilled(container: Any, children: Any) -> Any:
    if not isinstance(container, MutableMapping):
        return type(container)(children)
    # A copy, as constructors differ; key by key, as some classes refuse update().
    filled = copy.copy(container)
    for key, child in children.items():
        filled[key] = child
    return filled
